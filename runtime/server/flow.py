"""The sequences of one request under way, and all that can end them, as one stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from enum import Enum

from starlette.types import Receive

from runtime.engine.frames import NewSequence, SequenceOutput
from runtime.server.engine_client import EngineClient, EngineGoneError


class Halt(Enum):
    """Why a request ends before its answers do."""

    CLIENT_GONE = "client_gone"
    TIMEOUT = "timeout"
    SHUTDOWN = "shutdown"


Event = tuple[int, SequenceOutput | Exception]


class Flow:
    """Submits sequences and merges what comes; a halt aborts all of them at once.

    The halt does not wait for whoever writes the answer: a client that has stopped reading holds
    no pages.
    """

    def __init__(
        self, engine: EngineClient, sequences: Sequence[NewSequence], receive: Receive
    ) -> None:
        self._engine = engine
        self._sequences = sequences
        self._receive = receive
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.halted: Halt | None = None

    def start(self, timeout_s: float) -> None:
        """Submit everything.

        Args:
            timeout_s: Until all of it must be done.
        """
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self.halt, Halt.TIMEOUT)
        self._watcher = loop.create_task(self._watch())
        for index in range(len(self._sequences)):
            self._pumps[index] = loop.create_task(self._pump(index))

    async def next_events(self) -> list[Event]:
        """All events since the last call, at least one; none after a halt."""
        while not self._events and self.halted is None:
            self._news.clear()
            await self._news.wait()
        if self.halted is not None:
            return []
        events = list(self._events)
        self._events.clear()
        return events

    def end(self, index: int) -> None:
        """This sequence has said enough; the engine may drop it."""
        pump = self._pumps.pop(index, None)
        if pump is not None and not pump.done():
            pump.cancel()
            self._engine.abort((self._sequences[index].sequence_id,))

    def halt(self, why: Halt) -> None:
        """End everything; the first reason stays."""
        if self.halted is None:
            self.halted = why
            self._abort_all()
            self._news.set()

    async def close(self) -> None:
        """Leave nothing behind, whatever has happened."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._pumps.values()]
        self._abort_all()
        if self._watcher is not None:
            self._watcher.cancel()
            tasks.append(self._watcher)
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def _abort_all(self) -> None:
        for index in list(self._pumps):
            self.end(index)

    async def _watch(self) -> None:
        """Wait until the client is gone; nobody else reads from the connection now."""
        while (await self._receive())["type"] != "http.disconnect":
            await asyncio.sleep(0)
        self.halt(Halt.CLIENT_GONE)

    async def _pump(self, index: int) -> None:
        outputs = self._engine.submit(self._sequences[index])
        try:
            async for output in outputs:
                if output.finish_reason is not None:
                    self._pumps.pop(index, None)  # nothing is left to abort
                self._put(index, output)
                if output.finish_reason is not None:
                    return
            self._put(index, EngineGoneError("the engine ended an answer without a reason"))
        except Exception as error:
            self._put(index, error)
        finally:
            if close := getattr(outputs, "aclose", None):
                with contextlib.suppress(Exception):
                    await close()

    def _put(self, index: int, event: SequenceOutput | Exception) -> None:
        self._events.append((index, event))
        self._news.set()
