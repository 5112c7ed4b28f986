"""An engine that is started anew when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from runtime.engine.frames import EngineInfo, EngineStats, NewSequence, SequenceOutput
from runtime.server.engine_client import EngineClient, EngineGoneError
from runtime.server.logs import log

Start = Callable[[int], Awaitable[EngineClient]]
"""Starts an engine; told which start of this instance it is, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait before a start.

    Attributes:
        first_s: After the first end.
        most_s: Each wait is twice the one before, up to this.
        well_after_s: An engine that lived so long was well: waiting begins anew.
        watch_s: Between two looks whether the engine is there.
    """

    first_s: float = 0.5
    most_s: float = 60.0
    well_after_s: float = 60.0
    watch_s: float = 0.1


class RestartedEngine:
    """One instance; see ``EngineClient``. Its sequences end with the engine that had them.

    Attributes:
        number: Of the instance, from 0.
        starts: Engines that were started so far; tells one from the next.
    """

    def __init__(
        self, number: int, engine: EngineClient, start: Start, backoff: Backoff | None = None
    ) -> None:
        """Watch a running engine; needs the event loop.

        Args:
            number: Of the instance.
            engine: Its first engine.
            start: Makes the next ones.
            backoff: Of the starts.
        """
        self.number, self.starts = number, 1
        self._engine, self._start = engine, start
        self._backoff = backoff or Backoff()
        self._watching = asyncio.create_task(self._watch())

    @property
    def info(self) -> EngineInfo:
        """What it serves; while it is started anew, what it served."""
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        """Its last report; nothing while it is started anew. Counters begin anew with it."""
        return self._engine.stats if self._engine.is_alive else EngineStats()

    @property
    def silent_s(self) -> float:
        """Seconds since it last said anything."""
        return self._engine.silent_s

    @property
    def is_alive(self) -> bool:
        """Whether its engine is there now."""
        return self._engine.is_alive

    @property
    def restarts(self) -> int:
        """Engines that took the place of one that had ended."""
        return self.starts - 1

    @property
    def engine(self) -> EngineClient:
        """The engine of now."""
        return self._engine

    async def submit(self, sequence: NewSequence) -> AsyncIterator[SequenceOutput]:
        """See ``EngineClient.submit``."""
        outputs = self._engine.submit(sequence)
        try:
            async for output in outputs:
                yield output
        finally:
            if close := getattr(outputs, "aclose", None):
                await close()

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """See ``EngineClient.abort``."""
        self._engine.abort(sequence_ids)

    async def control(self, command: str) -> None:
        """See ``EngineClient.control``."""
        if not self._engine.is_alive:
            raise EngineGoneError(f"instance {self.number} has ended and is started anew")
        await self._engine.control(command)

    async def close(self) -> None:
        """See ``EngineClient.close``."""
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching
        await self._engine.close()

    async def _watch(self) -> None:
        backoff = self._backoff
        began_s, wait_s = time.monotonic(), backoff.first_s
        while True:
            while self._engine.is_alive:
                await asyncio.sleep(backoff.watch_s)
            if time.monotonic() - began_s >= backoff.well_after_s:
                wait_s = backoff.first_s
            log().error("instance_ended", instance=self.number, starts_again_in_s=wait_s)
            with contextlib.suppress(Exception):  # it is gone; this only collects its process
                await self._engine.close()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, backoff.most_s)
            try:
                engine = await self._start(self.starts)
            except Exception as error:
                log().error("instance_not_started", instance=self.number, error=str(error)[:500])
                continue
            self._engine, began_s = engine, time.monotonic()
            self.starts += 1
            log().info("instance_started_again", instance=self.number, starts=self.starts)
