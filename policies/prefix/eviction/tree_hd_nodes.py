"""What Tree-HD remembers of a block, and queues of leaves by age."""

from __future__ import annotations

from policies.prefix.eviction.base import Block

NUM_CATEGORIES = 4
FREE = -5000  # stands for the octave of price 0, below that of any float

_USES = (0, 0, 1, 2, 3, 3, 3, 3, 4)  # by number of uses: 1, 2, 3, 4-7, 8+
_NUM_SHARED, _NUM_JOINS, NUM_BANDS = 2, 3, 5
# At most 5 x 2 x 3 x 5 x 4 classes; those are kept that were met.


class Node:
    """A block that is resident or remembered."""

    __slots__ = (
        "band",
        "category",
        "children",
        "cost_s",
        "depth",
        "is_resident",
        "is_shared",
        "joins",
        "key",
        "kind",
        "last_s",
        "parent",
        "request",
        "size_bytes",
        "stamp",
        "uses",
    )

    def __init__(self, block: Block, joins: int, band: int, category: int, request: int) -> None:
        self.key = block.key
        self.parent = block.parent
        self.depth = block.depth
        self.size_bytes = block.size_bytes
        self.cost_s = block.cost_s
        self.joins = joins
        self.band = band
        self.category = category
        self.request = request
        self.uses = 0
        self.kind = 0
        self.last_s = 0.0
        self.children = 0
        self.is_resident = False
        self.is_shared = False
        self.stamp = 0

    def class_code(self) -> int:
        """Everything by which classes are told apart, as one number."""
        uses = _USES[self.uses] if self.uses < 9 else 4
        shared = uses * _NUM_SHARED + self.is_shared
        joins = shared * _NUM_JOINS + self.joins
        return (joins * NUM_BANDS + self.band) * NUM_CATEGORIES + self.category


Entry = tuple[float, int, int, Node]  # last use, -depth, stamp, leaf


def is_leaf(entry: Entry) -> bool:
    """Whether the entry still tells of a leaf: later entries carry a later stamp."""
    node = entry[3]
    return node.stamp == entry[2] and node.is_resident and not node.children


class LeafQueue:
    """Leaves of one class and octave of price, oldest first; entries may be out of date."""

    __slots__ = ("heap", "version")

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.version = 0
