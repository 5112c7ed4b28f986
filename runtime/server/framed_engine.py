"""An engine at the other end of a stream of frames, whatever carries them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable

import msgspec

from runtime.engine.frames import (
    Abort,
    Control,
    ControlDone,
    EngineInfo,
    EngineStats,
    FromEngine,
    NewSequence,
    Outputs,
    SequenceOutput,
    ToEngine,
)
from runtime.server.engine_client import EngineGoneError


class FramedEngine:
    """All of ``EngineClient`` but how frames are sent and received, and how it is closed."""

    def __init__(self, info: EngineInfo) -> None:
        """An engine that has said what it serves."""
        self._info, self._stats = info, EngineStats()
        self._heard_s = time.monotonic()
        self._is_alive = True
        self._queues: dict[str, asyncio.Queue[SequenceOutput | None]] = {}
        self._controls: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count(1)

    def _send(self, message: ToEngine) -> None:
        """Send it, in order, without waiting; called only while the engine is alive."""
        raise NotImplementedError

    @property
    def info(self) -> EngineInfo:
        """What it serves."""
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Its last report."""
        return self._stats

    @property
    def silent_s(self) -> float:
        """Seconds since it last said anything."""
        return time.monotonic() - self._heard_s

    @property
    def is_alive(self) -> bool:
        """False once it has ended."""
        return self._is_alive

    async def submit(self, sequence: NewSequence) -> AsyncIterator[SequenceOutput]:
        """See ``EngineClient.submit``."""
        if not self._is_alive:
            raise EngineGoneError("the engine has ended")
        queue: asyncio.Queue[SequenceOutput | None] = asyncio.Queue()
        self._queues[sequence.sequence_id] = queue
        is_over = False
        try:
            self._say(sequence)
            while not is_over:
                output = await queue.get()
                if output is None:
                    is_over = True
                    raise EngineGoneError("the engine has ended")
                is_over = output.finish_reason is not None
                yield output
        finally:
            self._queues.pop(sequence.sequence_id, None)
            if not is_over:
                self._say(Abort((sequence.sequence_id,)))

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """See ``EngineClient.abort``."""
        known = tuple(name for name in sequence_ids if name in self._queues)
        if known:
            self._say(Abort(known))
            for name in known:
                self._queues[name].put_nowait(
                    SequenceOutput(sequence_id=name, finish_reason="abort")
                )

    async def control(self, command: str) -> None:
        """See ``EngineClient.control``."""
        if not self._is_alive:
            raise EngineGoneError("the engine has ended")
        number = next(self._numbers)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._controls[number] = done
        try:
            self._say(
                msgspec.convert(
                    {"type": "control", "command": command, "number": number}, type=Control
                )
            )
            error = await done
        finally:
            self._controls.pop(number, None)
        if error:
            raise RuntimeError(error)

    def _hear(self, message: FromEngine) -> None:
        """Take in what it says."""
        self._heard_s = time.monotonic()
        match message:
            case Outputs():
                for output in message.outputs:
                    queue = self._queues.get(output.sequence_id)
                    if queue is not None:
                        queue.put_nowait(output)
            case EngineStats():
                self._stats = message
            case ControlDone():
                done = self._controls.get(message.number)
                if done is not None and not done.done():
                    done.set_result(message.error)
            case EngineInfo():
                self._info = message

    def _say(self, message: ToEngine) -> None:
        if self._is_alive:
            self._send(message)

    def _gone(self) -> None:
        """It has ended: whoever waits for something learns it."""
        self._is_alive = False
        for queue in self._queues.values():
            queue.put_nowait(None)
        for done in self._controls.values():
            if not done.done():
                done.set_exception(EngineGoneError("the engine has ended"))
