"""An engine in a replica of Ray Serve, as the front end sees it.

What the engine says comes as one stream of frames. What it is told goes in calls, one after the
other, each with all that has gathered meanwhile, so that the order is kept and many requests cost
few calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from runtime.engine.frames import ControlDone, EngineInfo, FromEngine, ToEngine
from runtime.engine.wire import LENGTH, START_FAILED, from_engine_decoder, length_of, packed
from runtime.server.framed_engine import FramedEngine
from runtime.server.logs import log
from runtime.server.process_engine import EngineStartError

CLOSE_S: Final = 5.0


class RayEngine(FramedEngine):
    """One life of a replica; see ``EngineClient``. The replica itself belongs to its cluster."""

    def __init__(self, handle: Any, stream: Any, info: EngineInfo, rest: list[FromEngine]) -> None:
        """See ``connect``."""
        super().__init__(info)
        self._handle, self._stream = handle, stream
        for message in rest:
            self._hear(message)
        self._frames: list[bytes] = []
        self._has_frames = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._listen()),
            asyncio.create_task(self._tell()),
        ]

    @classmethod
    async def connect(cls, handle: Any) -> RayEngine:
        """Wait until the deployment's replica is there, and listen to it.

        Args:
            handle: ``DeploymentHandle`` of a deployment of ``EngineReplica`` with one replica.

        Raises:
            EngineStartError: If its engine did not start.
        """
        stream = handle.options(stream=True).listen.remote()
        try:
            messages = messages_of(await anext(aiter(stream), b""))
        except BaseException:
            stream.cancel()
            raise
        match messages[:1]:
            case [EngineInfo() as info]:
                return cls(handle, stream, info, messages[1:])
            case [ControlDone(number=number, error=error)] if number == START_FAILED:
                raise EngineStartError(error)
        raise EngineStartError("the engine ended before it was ready")

    async def close(self) -> None:
        """Stop listening; the replica aborts what is under way."""
        self._gone()
        self._stream.cancel()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, message: ToEngine) -> None:
        self._frames.append(packed(message))
        self._has_frames.set()

    async def _tell(self) -> None:
        try:
            while True:
                await self._has_frames.wait()
                self._has_frames.clear()
                frames = b"".join(self._frames)
                self._frames.clear()
                await self._handle.say.remote(frames)
        except Exception as error:  # whatever Ray raises, the engine cannot be told anything
            self._lost(error)

    async def _listen(self) -> None:
        try:
            async for frames in _pieces(self._stream):
                for message in messages_of(frames):
                    self._hear(message)
            self._lost(None)
        except Exception as error:  # Ray has many for a replica that is gone
            self._lost(error)

    def _lost(self, error: Exception | None) -> None:
        if self._is_alive:
            self._gone()
            words = str(error).strip().splitlines() or [type(error).__name__]
            log().error("replica_lost", error="it ended" if error is None else words[0][:300])


def messages_of(frames: bytes) -> list[FromEngine]:
    """The messages of a run of frames."""
    found: list[FromEngine] = []
    begin = 0
    while begin < len(frames):
        body = begin + LENGTH.size
        end = body + length_of(frames[begin:body])
        found.append(from_engine_decoder.decode(frames[body:end]))
        begin = end
    return found


async def _pieces(stream: Any) -> AsyncIterator[bytes]:
    """A response generator of Serve, with a type."""
    async for piece in stream:
        yield piece
