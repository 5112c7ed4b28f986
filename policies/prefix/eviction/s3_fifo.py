"""S3-FIFO: a small queue on probation, a main queue, and a memory of what went from the first.

Yang et al., "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023). The small queue takes a
tenth of the memory. A block that leaves it moves to the main queue if it was used at least twice
there, else it goes and is remembered; a remembered block that returns enters the main queue. The
main queue gives a used block another round for each use, three at most.

The newcomers of a request join when it ends, root first; a pinned block that is met moves to the
end of its queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from policies.prefix.eviction.base import Block, Key
from policies.prefix.eviction.ghosts import Ghosts

SMALL_SHARE = 0.1
GHOST_SHARE = 0.9  # bytes of remembered blocks, of the capacity
USES_TO_MOVE = 2
MOST_USES = 3


class _Queue:
    """Blocks with their sizes, oldest first."""

    def __init__(self) -> None:
        self.sizes: OrderedDict[Key, int] = OrderedDict()
        self.used_bytes = 0
        self.is_blocked = False  # all of it was found pinned, and nothing has joined since

    def append(self, key: Key, size_bytes: int) -> None:
        self.sizes[key] = size_bytes
        self.used_bytes += size_bytes
        self.is_blocked = False

    def pop(self, key: Key) -> int:
        size_bytes = self.sizes.pop(key)
        self.used_bytes -= size_bytes
        return size_bytes

    def oldest(self, pinned: Container[Key]) -> Key | None:
        """The oldest that is not pinned, those before it having moved to the end."""
        if self.is_blocked:
            return None
        sizes = self.sizes
        for _ in range(len(sizes)):
            key = next(iter(sizes))
            if key not in pinned:
                return key
            sizes.move_to_end(key)
        self.is_blocked = True
        return None


class S3Fifo:
    """S3-FIFO; O(1) per call, amortised; remembers at most 0.9 times the capacity."""

    keeps_prefixes_whole = False

    def __init__(self, capacity_bytes: int) -> None:
        self._small_bytes = capacity_bytes * SMALL_SHARE
        self._small = _Queue()
        self._main = _Queue()
        self._ghosts = Ghosts(int(capacity_bytes * GHOST_SHARE))
        self._newcomers: dict[Key, int] = {}
        self._uses: dict[Key, int] = {}

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        """Blocks that were pinned may be met again."""
        self._settle()

    def access(self, key: Key, *, now: float) -> None:
        """One use more."""
        self._uses[key] = min(self._uses[key] + 1, MOST_USES)

    def insert(self, block: Block, *, now: float) -> None:
        """The block enters; in which queue is seen when the request ends."""
        if block.key in self._uses:
            raise ValueError("the block is resident already")
        self._uses[block.key] = 0
        self._newcomers[block.key] = block.size_bytes

    def end_request(self, chain: Sequence[Key], *, now: float) -> None:
        """Newcomers join, and blocks that were pinned may be met again."""
        self._settle()

    def _settle(self) -> None:
        self._small.is_blocked = self._main.is_blocked = False
        newcomers, self._newcomers = self._newcomers, {}
        for key, size_bytes in newcomers.items():
            queue = self._main if self._ghosts.discard(key) else self._small
            queue.append(key, size_bytes)

    def evict(self, pinned: Container[Key], *, now: float) -> Key | None:
        """Give up a block of the small queue if that exceeds its share, else of the main one."""
        key = self._evict(pinned)
        if key is None:  # newcomers whose request is not over, and pins that have ended since
            self._settle()
            key = self._evict(pinned)
        return key

    def _evict(self, pinned: Container[Key]) -> Key | None:
        if self._small.used_bytes <= self._small_bytes:
            key = self._evict_main(pinned)
            if key is not None:
                return key
        key = self._evict_small(pinned)
        return self._evict_main(pinned) if key is None else key

    def _evict_small(self, pinned: Container[Key]) -> Key | None:
        small, uses = self._small, self._uses
        while (key := small.oldest(pinned)) is not None:
            size_bytes = small.pop(key)
            if uses[key] < USES_TO_MOVE:
                del uses[key]
                self._ghosts.add(key, size_bytes)
                return key
            uses[key] = 0
            self._main.append(key, size_bytes)
        return None

    def _evict_main(self, pinned: Container[Key]) -> Key | None:
        main, uses = self._main, self._uses
        while (key := main.oldest(pinned)) is not None:
            if not uses[key]:
                main.pop(key)
                del uses[key]
                return key
            uses[key] -= 1
            main.sizes.move_to_end(key)
        return None

    def remove(self, key: Key) -> None:
        """The block left for another reason; it is not remembered."""
        del self._uses[key]
        if key in self._newcomers:
            del self._newcomers[key]
        else:
            (self._small if key in self._small.sizes else self._main).pop(key)

    def reprice(self, key: Key, cost_s: float, *, now: float) -> None:
        """Use knows no prices."""
        if key not in self._uses:
            raise KeyError(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)
