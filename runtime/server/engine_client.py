"""What the front end needs of an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from runtime.engine.frames import EngineInfo, EngineStats, NewSequence, SequenceOutput


class EngineGoneError(RuntimeError):
    """The engine has ended; its sequences are lost."""


class EngineClient(Protocol):
    """An engine at the other end of a pipe, socket or cluster; used from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """What it serves; known once it is ready."""

    @property
    def stats(self) -> EngineStats:
        """Its last report."""

    @property
    def silent_s(self) -> float:
        """Seconds since it last said anything; it speaks at least twice a second."""

    @property
    def is_alive(self) -> bool:
        """False once it has ended."""

    def submit(self, sequence: NewSequence) -> AsyncIterator[SequenceOutput]:
        """Give it a sequence; what it brings, up to and with the output that has a finish reason.

        Nothing is submitted before the first ``__anext__``. Closing the iterator early aborts.

        Raises:
            EngineGoneError: In ``__anext__``, when the engine has ended.
        """

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """Nobody waits for them any more; unknown ones are none."""

    async def control(self, command: str) -> None:
        """``reset_prefix_cache`` or ``write_decisions``; returns when done.

        Raises:
            EngineGoneError: If the engine has ended.
            RuntimeError: If it could not do it, in its words.
        """

    async def close(self) -> None:
        """End the engine; sequences under way are aborted."""
