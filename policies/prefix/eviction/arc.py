"""Adaptive replacement cache: recency against frequency, the share of each learned.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003). T1 holds blocks
used once, T2 blocks used again; B1 and B2 remember what went from each. A block that returns while
B1 remembers it says that T1 is too small, and B2 the like of T2: the target of T1 moves. All are
counted in bytes, a block moving the target by its size times the ratio of the memories.

Three things differ from the paper, since a policy here makes room before it is told for what, and
for all newcomers of a request: the target moves as newcomers join, when the request ends; T1 gives
way as soon as it reaches its target; and B1 and B2 are bounded by the capacity each.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from policies.prefix.eviction.base import Block, Key
from policies.prefix.eviction.ghosts import Ghosts
from policies.prefix.eviction.pinned_queue import PinnedQueue


class Arc:
    """ARC; O(1) per call, amortised; remembers at most twice the capacity.

    Of the blocks of one request the root counts as used last, as in ``Lru``.
    """

    keeps_prefixes_whole = False

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._once = PinnedQueue()  # T1
        self._again = PinnedQueue()  # T2
        self._went_once = Ghosts(capacity_bytes)  # B1
        self._went_again = Ghosts(capacity_bytes)  # B2
        self._target_bytes = 0.0  # p, of T1
        self._newcomers: dict[Key, int] = {}
        self._accessed: dict[Key, None] = {}

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        """Blocks that were pinned may be met again."""
        self._settle()

    def access(self, key: Key, *, now: float) -> None:
        """The block has been used again."""
        if key in self._again:
            self._again.renew(key)
        elif key in self._newcomers:
            return  # the same request brought it
        else:
            self._again.append(key, self._once.remove(key))
        self._accessed[key] = None

    def insert(self, block: Block, *, now: float) -> None:
        """The block enters; in which list is seen when the request ends."""
        if block.key in self:
            raise ValueError("the block is resident already")
        self._newcomers[block.key] = block.size_bytes

    def end_request(self, chain: Sequence[Key], *, now: float) -> None:
        """The blocks of the request become the most recent of their lists, deepest first."""
        self._settle()

    def _settle(self) -> None:
        self._once.restore()
        self._again.restore()
        for key in reversed(self._accessed):
            if key in self._again:
                self._again.renew(key)
        self._accessed = {}
        newcomers, self._newcomers = self._newcomers, {}
        for key, size_bytes in reversed(newcomers.items()):
            is_remembered = self._adapt(key, size_bytes)
            (self._again if is_remembered else self._once).append(key, size_bytes)

    def _adapt(self, key: Key, size_bytes: int) -> bool:
        """Move the target for a newcomer; whether it was remembered."""
        once, again = self._went_once, self._went_again
        if key in once:
            step = size_bytes * max(again.used_bytes / once.used_bytes, 1.0)
            self._target_bytes = min(self._target_bytes + step, float(self._capacity_bytes))
            return once.discard(key)
        if key in again:
            step = size_bytes * max(once.used_bytes / again.used_bytes, 1.0)
            self._target_bytes = max(self._target_bytes - step, 0.0)
            return again.discard(key)
        return False

    def evict(self, pinned: Container[Key], *, now: float) -> Key | None:
        """Give up the oldest of T1 if that has reached its target, else the oldest of T2."""
        key = self._replace(pinned)
        if key is None and self._newcomers:
            self._settle()
            key = self._replace(pinned)
        return key

    def _replace(self, pinned: Container[Key]) -> Key | None:
        from_once = self._once.used_bytes >= max(int(self._target_bytes), 1)
        key = self._give_up(from_once, pinned)
        return self._give_up(not from_once, pinned) if key is None else key

    def _give_up(self, from_once: bool, pinned: Container[Key]) -> Key | None:
        queue = self._once if from_once else self._again
        key = queue.oldest(pinned)
        if key is not None:
            size_bytes = queue.remove(key)
            (self._went_once if from_once else self._went_again).add(key, size_bytes)
        return key

    def remove(self, key: Key) -> None:
        """The block left for another reason; it is not remembered."""
        if key in self._newcomers:
            del self._newcomers[key]
        else:
            (self._once if key in self._once else self._again).remove(key)

    def reprice(self, key: Key, cost_s: float, *, now: float) -> None:
        """Use knows no prices."""
        if key not in self:
            raise KeyError(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._once or key in self._again or key in self._newcomers

    def __len__(self) -> int:
        return len(self._once) + len(self._again) + len(self._newcomers)
