"""First in, first out."""

from __future__ import annotations

from collections.abc import Container, Sequence

from policies.prefix.eviction.base import Block, Key
from policies.prefix.eviction.pinned_queue import PinnedQueue


class Fifo:
    """The block that came first goes first, used or not; O(1) per call, for comparison."""

    keeps_prefixes_whole = False

    def __init__(self, capacity_bytes: int) -> None:
        self._queue = PinnedQueue()

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        """Blocks that were pinned may be met again."""
        self._queue.restore()

    def access(self, key: Key, *, now: float) -> None:
        """A use changes nothing."""
        if key not in self._queue:
            raise KeyError(key)

    def insert(self, block: Block, *, now: float) -> None:
        """The block joins the end of the queue."""
        if block.key in self._queue:
            raise ValueError("the block is resident already")
        self._queue.append(block.key, block.size_bytes)

    def end_request(self, chain: Sequence[Key], *, now: float) -> None:
        """Blocks that were pinned may be met again."""
        self._queue.restore()

    def evict(self, pinned: Container[Key], *, now: float) -> Key | None:
        """Give up the first block of the queue that is not pinned."""
        key = self._queue.oldest(pinned)
        if key is not None:
            self._queue.remove(key)
        return key

    def remove(self, key: Key) -> None:
        """The block left for another reason."""
        self._queue.remove(key)

    def reprice(self, key: Key, cost_s: float, *, now: float) -> None:
        """Age knows no prices."""
        if key not in self._queue:
            raise KeyError(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._queue

    def __len__(self) -> int:
        return len(self._queue)
