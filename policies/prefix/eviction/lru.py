"""Least recently used.

All blocks of a request are used at the same moment, so an order among them has to be chosen.
Touched deepest first, the tail of a chain goes before its root and what stays is a usable prefix
(``Lru``); touched root first, the root goes first and leaves orphans that no request can use
(``LruFront``, for comparison).

With whole chains touched deepest first a parent is always more recent than its children, so ``Lru``
gives up what a policy restricted to leaves would. It does not *promise* that: a reader that pins a
block without the blocks before it can break it, hence ``keeps_prefixes_whole`` is False.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from policies.prefix.eviction.base import Block, Key


class Lru:
    """The block used longest ago goes first; O(1) per call.

    A pinned block that is met while looking for a victim is in use, and counts as used just then.
    """

    keeps_prefixes_whole = False

    def __init__(self, capacity_bytes: int) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # least recent first

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        """Nothing is learned from what a request will read."""

    def access(self, key: Key, *, now: float) -> None:
        """The block is the most recent one now."""
        self._order.move_to_end(key)

    def insert(self, block: Block, *, now: float) -> None:
        """The block enters as the most recent one."""
        if block.key in self._order:
            raise ValueError("the block is resident already")
        self._order[block.key] = None

    def end_request(self, chain: Sequence[Key], *, now: float) -> None:
        """The blocks of the request become the most recent ones, in the order of touching."""
        order = self._order
        for key in self._touched(chain):
            if key in order:
                order.move_to_end(key)

    def _touched(self, chain: Sequence[Key]) -> Iterable[Key]:
        return reversed(chain)

    def evict(self, pinned: Container[Key], *, now: float) -> Key | None:
        """Give up the least recent block that is not pinned."""
        order = self._order
        for _ in range(len(order)):
            key = next(iter(order))
            if key not in pinned:
                del order[key]
                return key
            order.move_to_end(key)
        return None

    def remove(self, key: Key) -> None:
        """The block left for another reason."""
        del self._order[key]

    def reprice(self, key: Key, cost_s: float, *, now: float) -> None:
        """Recency knows no prices."""
        if key not in self._order:
            raise KeyError(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)


class LruFront(Lru):
    """LRU that touches the root of a chain first, so that the root goes first."""

    def _touched(self, chain: Sequence[Key]) -> Iterable[Key]:
        return chain
