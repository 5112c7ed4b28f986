"""Tree-HD: leaves only, the one whose room would earn least by the learned hazard of its class.

Prefix blocks form trees, and a block without its parent is of no use, so only leaves go. What a
leaf is worth depends on how blocks *like it* were used before: a class is made of how often it was
used, whether chains part at it or below it, how many chains its first ancestor of the same
increment joined when it came, and the octave of its price then (what weighs more in the rank must
not borrow the hazard of what weighs less). For every class the hazards of reuse by age are learned
(``ReuseIntervals``), blocks that were given up included. The rank of a leaf is

    rank = reuses per second of its class and age, at the best horizon, x cost_s / size_bytes

and the victim is the least rank among the oldest unpinned leaves of every class (and octave of
price, since the prices of copies differ by orders of magnitude). An eviction costs O(classes).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Container, Sequence

from policies.prefix.eviction.base import Block, Key
from policies.prefix.eviction.tree_hd_intervals import ReuseIntervals, age_bin
from policies.prefix.eviction.tree_hd_nodes import (
    FREE,
    NUM_BANDS,
    NUM_CATEGORIES,
    LeafQueue,
    Node,
    is_leaf,
)

REFIT_REQUESTS = 100
HISTORY_PER_CAPACITY = 4


class TreeHd:
    """Evicts leaves by learned hazard and density."""

    keeps_prefixes_whole = True

    def __init__(self, capacity_bytes: int) -> None:
        self._history_limit_bytes = HISTORY_PER_CAPACITY * capacity_bytes
        self._nodes: dict[Key, Node] = {}
        self._history: OrderedDict[Key, None] = OrderedDict()  # first given up first
        self._history_bytes = 0
        self._num_resident = 0
        # By parent: children that are known, and resident ones whose parent is unknown.
        self._branches: dict[Key | None, int] = {}
        self._orphans: dict[Key, int] = {}
        self._queues: dict[tuple[int, int], LeafQueue] = {}
        self._num_entries = 0
        # The queues by the rank of their oldest leaf, as of one moment; old versions are skipped.
        self._order: list[tuple[float, tuple[float, int, int], LeafQueue, int]] = []
        self._unranked: dict[LeafQueue, None] = {}
        self._ranked_at = -1.0  # -1: something else than a push has changed since
        self._aside: list[Node] = []
        self._new_leaves: dict[Key, None] = {}
        self._stamp = 0
        self._request = 0
        self._category = 0
        self._next_refit = REFIT_REQUESTS // 4
        self._now = 0.0
        self._base_price = 0.0
        self._intervals = ReuseIntervals(0)
        self._kinds: dict[int, int] = {}  # class code -> its number among those met

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        """Every hundred requests (earlier at first) the hazards are fitted again."""
        self._request += 1
        self._category = min(max(category, 0), NUM_CATEGORIES - 1)
        if self._request >= self._next_refit and now > self._now:
            self._intervals.refit(now)
            self._next_refit = self._request + min(self._request, REFIT_REQUESTS)
        self._ranked_at = -1.0

    def access(self, key: Key, *, now: float) -> None:
        """The block was used again."""
        node = self._resident(key)
        self._intervals.end(node.kind, node.last_s, now)
        self._use(node, now)
        if not node.children:
            self._new_leaves[key] = None
            self._ranked_at = -1.0

    def insert(self, block: Block, *, now: float) -> None:
        """A block comes, or comes back."""
        node = self._nodes.get(block.key)
        if node is None:
            node = self._first_seen(block)
        elif node.is_resident:
            raise ValueError("the block is resident already")
        else:
            del self._history[block.key]
            self._history_bytes -= node.size_bytes
            self._intervals.end(node.kind, node.last_s, now)
            node.size_bytes, node.cost_s = block.size_bytes, block.cost_s
        node.is_resident = True
        self._num_resident += 1
        self._count_child(block.parent, 1)
        self._use(node, now)
        if not node.children:
            self._new_leaves[block.key] = None

    def end_request(self, chain: Sequence[Key], *, now: float) -> None:
        """Nothing more to learn: uses were told one by one."""

    def evict(self, pinned: Container[Key], *, now: float) -> Key | None:
        """Give up the leaf of least rank among the oldest of their classes."""
        self._queue_new_leaves()
        self._rank_queues(pinned, now)
        order = self._order
        node: Node | None = None
        while order:
            queue, version = order[0][2:]
            if queue.version != version:
                heapq.heappop(order)
            elif is_leaf(queue.heap[0]) and queue.heap[0][3].key not in pinned:
                node = heapq.heappop(queue.heap)[3]
                self._num_entries -= 1
                self._unranked[queue] = None
                break
            else:
                self._rank_oldest(queue, pinned, now)
        for leaf in self._aside:
            self._push(leaf)
        self._aside.clear()
        if node is None:
            return None
        self._leave(node, now)
        return node.key

    def remove(self, key: Key) -> None:
        """A block is gone; it is remembered like one given up."""
        self._leave(self._resident(key), self._now)
        self._ranked_at = -1.0

    def reprice(self, key: Key, cost_s: float, *, now: float) -> None:
        """The block's loss is another one."""
        node = self._resident(key)
        if node.cost_s != cost_s:
            node.cost_s = cost_s
            if not node.children:
                self._new_leaves[key] = None
                self._ranked_at = -1.0

    @property
    def history_bytes(self) -> int:
        """Bytes of the blocks that are remembered only; at most 4 times the capacity."""
        return self._history_bytes

    def __contains__(self, key: Key) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.is_resident

    def __len__(self) -> int:
        return self._num_resident

    def _resident(self, key: Key) -> Node:
        node = self._nodes[key]
        if not node.is_resident:
            raise KeyError(key)
        return node

    def _use(self, node: Node, now: float) -> None:
        node.uses += 1
        node.last_s = self._now = now
        node.kind = self._class_of(node)
        self._intervals.begin(node.kind)

    def _class_of(self, node: Node) -> int:
        code = node.class_code()
        kind = self._kinds.get(code)
        if kind is None:
            kind = self._kinds[code] = self._intervals.add_class()
        return kind

    def _first_seen(self, block: Block) -> Node:
        before = self._branches.get(block.parent, 0)
        self._branches[block.parent] = before + 1
        above = None if block.parent is None else self._nodes.get(block.parent)
        joins = 0 if not before else 1 if before < 3 else 2
        if above is not None and above.request == self._request:
            joins = above.joins  # the same increment
        if before:
            self._mark_shared(above)
        node = Node(block, joins, self._band(block), self._category, self._request)
        node.children = self._orphans.pop(block.key, 0)
        node.is_shared = self._branches.get(block.key, 0) > 1
        self._nodes[block.key] = node
        return node

    def _band(self, block: Block) -> int:
        """Octaves of price above the first block that had one."""
        price = block.cost_s / block.size_bytes
        if price <= 0:
            return 0
        self._base_price = self._base_price or price
        return min(max(round(math.log2(price / self._base_price)), 0), NUM_BANDS - 1)

    def _mark_shared(self, node: Node | None) -> None:
        """Chains part at this block: that holds for all blocks before it, too."""
        while node is not None and not node.is_shared:
            node.is_shared = True
            kind = self._class_of(node)
            self._intervals.rename(node.kind, kind, node.last_s)
            node.kind = kind
            if node.is_resident and not node.children:
                self._new_leaves[node.key] = None
            node = None if node.parent is None else self._nodes.get(node.parent)

    def _count_child(self, parent: Key | None, change: int) -> None:
        if parent is None:
            return
        above = self._nodes.get(parent)
        if above is None:
            number = self._orphans.get(parent, 0) + change
            if number:
                self._orphans[parent] = number
            else:
                del self._orphans[parent]
            return
        above.children += change
        if above.children == 0 and above.is_resident:
            self._new_leaves[parent] = None

    def _leave(self, node: Node, now: float) -> None:
        node.is_resident = False
        self._num_resident -= 1
        self._count_child(node.parent, -1)
        self._history[node.key] = None
        self._history_bytes += node.size_bytes
        while self._history_bytes > self._history_limit_bytes:
            self._forget(self._nodes[next(iter(self._history))], now)

    def _forget(self, node: Node, now: float) -> None:
        del self._history[node.key]
        self._history_bytes -= node.size_bytes
        del self._nodes[node.key]
        self._intervals.give_up(node.kind, node.last_s, now)
        if node.children:
            self._orphans[node.key] = node.children
        left = self._branches[node.parent] - 1
        if left:
            self._branches[node.parent] = left
        else:
            del self._branches[node.parent]

    def _queue_new_leaves(self) -> None:
        if not self._new_leaves:
            return
        nodes = self._nodes
        for key in self._new_leaves:
            node = nodes.get(key)
            if node is not None and node.is_resident and not node.children:
                self._push(node)
        self._new_leaves.clear()
        if self._num_entries > 2 * self._num_resident + 64:
            self._drop_old_entries()

    def _push(self, node: Node) -> None:
        self._stamp += 1
        node.stamp = self._stamp
        price = node.cost_s / node.size_bytes
        octave = math.frexp(price)[1] if price else FREE
        queue = self._queues.get((node.kind, octave))
        if queue is None:
            queue = self._queues[node.kind, octave] = LeafQueue()
        entry = (node.last_s, -node.depth, node.stamp, node)
        heapq.heappush(queue.heap, entry)
        self._num_entries += 1
        self._unranked[queue] = None

    def _rank_queues(self, pinned: Container[Key], now: float) -> None:
        """Rank anew what changed since the last eviction; all queues where time has passed."""
        if now != self._ranked_at or len(self._order) > 4 * len(self._queues) + 64:
            self._ranked_at = now
            self._order.clear()
            self._unranked = dict.fromkeys(self._queues.values())
        for queue in self._unranked:
            self._rank_oldest(queue, pinned, now)
        self._unranked.clear()

    def _rank_oldest(self, queue: LeafQueue, pinned: Container[Key], now: float) -> None:
        """Bring the oldest unpinned leaf to the front and rank it; pinned ones are put aside."""
        queue.version += 1
        heap = queue.heap
        while heap:
            entry = heap[0]
            node = entry[3]
            if is_leaf(entry):
                if node.key not in pinned:
                    rank = self._intervals.rank[node.kind][age_bin(now - node.last_s)]
                    rank *= node.cost_s / node.size_bytes
                    heapq.heappush(self._order, (rank, entry[:3], queue, queue.version))
                    return
                self._aside.append(node)
            heapq.heappop(heap)
            self._num_entries -= 1

    def _drop_old_entries(self) -> None:
        self._num_entries = 0
        for name, queue in list(self._queues.items()):
            queue.heap = [entry for entry in queue.heap if is_leaf(entry)]
            heapq.heapify(queue.heap)
            self._num_entries += len(queue.heap)
            if not queue.heap:
                del self._queues[name]
        self._ranked_at = -1.0
