"""What drivers need of a batching policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.batching.orders import BatchOrders


class BatchingPolicy(Protocol):
    """See ``policies.batching.first_come.FirstComeBatching`` for what each call means."""

    def add(self, sequence: int, prompt_tokens: int, max_tokens: int, *, now: float) -> None:
        """A sequence arrives."""

    def cached(self, sequence: int, tokens: int, *, now: float) -> None:
        """So many leading tokens of a waiting one could be loaded."""

    def loaded(self, sequence: int, tokens: int, *, now: float) -> None:
        """A load has ended."""

    def cancel(self, sequence: int, *, now: float) -> None:
        """Nobody waits for it any more."""

    def schedule(self, free_pages: int, *, now: float) -> BatchOrders:
        """The next step, or its beginning."""

    def room(self, is_coming: bool, free_pages: int, *, now: float) -> BatchOrders:
        """The answer to ``pages_needed``."""

    def step_done(self, ended: Sequence[int], *, now: float) -> None:
        """The step is over."""
