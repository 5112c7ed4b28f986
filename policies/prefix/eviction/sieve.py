"""SIEVE: one queue, a bit per block, a hand that moves from the old end to the new one.

Zhang et al., "SIEVE is Simpler than LRU" (NSDI 2024). The hand spares a used block once and clears
its bit; survivors keep their place. The queue is held as two: blocks the hand has yet to meet on
this round, and survivors behind it; newcomers join the end of the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from policies.prefix.eviction.base import Block, Key


class Sieve:
    """SIEVE; O(1) per call, amortised. A pinned block is passed over, its bit kept."""

    keeps_prefixes_whole = False

    def __init__(self, capacity_bytes: int) -> None:
        self._ahead: OrderedDict[Key, None] = OrderedDict()  # oldest first, from the hand on
        self._behind: OrderedDict[Key, None] = OrderedDict()  # oldest first, up to the hand
        self._used: dict[Key, bool] = {}

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        """Nothing is learned from what a request will read."""

    def access(self, key: Key, *, now: float) -> None:
        """The block's bit is set."""
        if key not in self._used:
            raise KeyError(key)
        self._used[key] = True

    def insert(self, block: Block, *, now: float) -> None:
        """The block joins the new end of the queue, its bit clear."""
        if block.key in self._used:
            raise ValueError("the block is resident already")
        self._used[block.key] = False
        self._ahead[block.key] = None

    def end_request(self, chain: Sequence[Key], *, now: float) -> None:
        """Nothing is kept of a request."""

    def evict(self, pinned: Container[Key], *, now: float) -> Key | None:
        """Give up the first block from the hand on that is neither used nor pinned."""
        used = self._used
        for _ in range(2 * len(used)):  # the first round clears every bit
            key, _nothing = self._ahead.popitem(last=False)
            if key not in pinned and not used[key]:
                del used[key]
                self._wrap()
                return key
            if key not in pinned:
                used[key] = False
            self._behind[key] = None
            self._wrap()
        return None

    def _wrap(self) -> None:
        """At the new end the hand goes back to the old end."""
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead

    def remove(self, key: Key) -> None:
        """The block left for another reason."""
        del self._used[key]
        if key in self._ahead:
            del self._ahead[key]
            self._wrap()
        else:
            del self._behind[key]

    def reprice(self, key: Key, cost_s: float, *, now: float) -> None:
        """Use knows no prices."""
        if key not in self._used:
            raise KeyError(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._used

    def __len__(self) -> int:
        return len(self._used)
