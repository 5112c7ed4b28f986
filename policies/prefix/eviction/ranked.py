"""Blocks in the order of a rank that changes: the frame of the heap policies.

A subclass says what a block's rank is; the least rank goes first. The heap is lazy: a use only
notes the new rank, and an entry that has become too low is put back at its present rank when it
comes to the top. Ranks that fall are entered anew at once; entries left over are thrown out as
they surface, and all together once they outnumber the blocks.

Blocks that came with the running request are pinned, so they wait outside the heap until it ends.
They are ranked then, after the evictions that made room for them. Other pinned blocks that surface
are put aside until the next request begins or ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence
from dataclasses import dataclass

from policies.prefix.eviction.base import Block, Key

Rank = tuple[float, float, float]
Entry = tuple[Rank, int, Key]  # the number is unique, so keys are never compared

SPARE_ENTRIES = 64  # left-over heap entries that are not worth a rebuild


@dataclass(slots=True)
class Ranked:
    """What is known of a resident block.

    Attributes:
        parent, depth, size_bytes, cost_s: As told, see ``Block``.
        uses: Times it was inserted or accessed since it became resident.
        request: Number of the request that used it last.
        base: What the subclass noted at the last use.
        entry: Its place in the order.
    """

    parent: Key | None
    depth: int
    size_bytes: int
    cost_s: float
    uses: int
    request: int
    base: float
    entry: Entry


class RankedBlocks:
    """Gives up the block of least rank; O(log n) per call, amortised."""

    keeps_prefixes_whole = False

    def __init__(self, capacity_bytes: int) -> None:
        self._blocks: dict[Key, Ranked] = {}
        self._heap: list[Entry] = []
        self._waiting: dict[Key, bool] = {}  # resident, not in the heap: is it a newcomer?
        self._request = 0
        self._stamp = 0
        self._base = 0.0

    def _rank(self, block: Ranked) -> Rank:
        """The order of going; equal ranks go by age of the last use."""
        raise NotImplementedError

    def _may_go(self, key: Key) -> bool:
        """Whether the block is a candidate at present."""
        return True

    def _entered(self, block: Block) -> None:
        """The block has become resident."""

    def _left(self, block: Ranked, rank: Rank) -> None:
        """The block is resident no more."""

    def _given_up(self, rank: Rank) -> None:
        """A block of that rank was the victim."""

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        """Uses from here on belong to a new request."""
        self._settle()
        self._request += 1

    def access(self, key: Key, *, now: float) -> None:
        """One use more."""
        block = self._blocks[key]
        block.uses += 1
        block.request = self._request
        block.base = self._base
        self._stamp += 1
        self._place(key, block, self._stamp)

    def insert(self, block: Block, *, now: float) -> None:
        """The block enters with its first use."""
        key = block.key
        if key in self._blocks:
            raise ValueError("the block is resident already")
        self._stamp += 1
        unplaced: Entry = ((0.0, 0.0, 0.0), self._stamp, key)
        ranked = Ranked(
            block.parent,
            block.depth,
            block.size_bytes,
            block.cost_s,
            1,
            self._request,
            self._base,
            unplaced,
        )
        ranked.entry = (self._rank(ranked), self._stamp, key)
        self._blocks[key] = ranked
        self._waiting[key] = True
        self._entered(block)

    def end_request(self, chain: Sequence[Key], *, now: float) -> None:
        """Blocks that came with the request may go from now on."""
        self._settle()

    def evict(self, pinned: Container[Key], *, now: float) -> Key | None:
        """Give up the block of least rank that is not pinned."""
        key = self._pop(pinned)
        if key is None and self._waiting:
            self._settle()
            key = self._pop(pinned)
        if key is None:
            return None
        block = self._blocks.pop(key)
        self._given_up(block.entry[0])
        self._left(block, block.entry[0])
        return key

    def remove(self, key: Key) -> None:
        """The block left for another reason."""
        block = self._blocks.pop(key)
        self._waiting.pop(key, None)
        self._left(block, block.entry[0])

    def reprice(self, key: Key, cost_s: float, *, now: float) -> None:
        """The block's cost is another from now on."""
        block = self._blocks[key]
        block.cost_s = cost_s
        self._place(key, block, block.entry[1])

    def _place(self, key: Key, block: Ranked, stamp: int) -> None:
        entry = (self._rank(block), stamp, key)
        falls = entry < block.entry
        block.entry = entry
        if falls and key not in self._waiting:
            self._push(key)

    def _push(self, key: Key) -> None:
        if self._may_go(key):
            heapq.heappush(self._heap, self._blocks[key].entry)
            if len(self._heap) > 2 * len(self._blocks) + SPARE_ENTRIES:
                self._rebuild()

    def _rebuild(self) -> None:
        waiting = self._waiting
        self._heap = [
            block.entry
            for key, block in self._blocks.items()
            if key not in waiting and self._may_go(key)
        ]
        heapq.heapify(self._heap)

    def _settle(self) -> None:
        """Put waiting blocks into the heap."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for key, is_newcomer in waiting.items():
            block = self._blocks[key]
            if is_newcomer:  # ranked after the evictions that made room for it
                block.base = self._base
                block.entry = (self._rank(block), block.entry[1], key)
            self._push(key)

    def _pop(self, pinned: Container[Key]) -> Key | None:
        heap, blocks = self._heap, self._blocks
        while heap:
            entry = heap[0]
            key = entry[2]
            block = blocks.get(key)
            if block is None or key in self._waiting or not self._may_go(key):
                heapq.heappop(heap)
            elif block.entry is not entry and block.entry != entry:
                if entry < block.entry:
                    heapq.heapreplace(heap, block.entry)
                else:  # its rank fell: the lower entry was met before
                    heapq.heappop(heap)
            elif key in pinned:
                heapq.heappop(heap)
                self._waiting[key] = False
            else:
                heapq.heappop(heap)
                return key
        return None

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)


class RankedLeaves(RankedBlocks):
    """Gives up the *leaf* of least rank: never a block with a resident block behind it."""

    keeps_prefixes_whole = True

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._children: dict[Key, int] = {}  # resident ones, of any parent, resident or not

    def _may_go(self, key: Key) -> bool:
        return key not in self._children

    def _entered(self, block: Block) -> None:
        if block.parent is not None:
            self._children[block.parent] = self._children.get(block.parent, 0) + 1

    def _left(self, block: Ranked, rank: Rank) -> None:
        parent = block.parent
        if parent is None:
            return
        children = self._children[parent] - 1
        if children:
            self._children[parent] = children
        else:
            del self._children[parent]
            if parent in self._blocks and parent not in self._waiting:
                self._push(parent)
