"""Planes and tables of weight blocks as numbered parts, and the pages each of them holds.

Parts of a block with parent bits B and lowest width m: planes 0..B-1 are parts 0..B-1, the table
of width q is part B + q - m; S = 2 * B - m + 1 parts in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from policies.weight_page_history import Part, ResidentTables, parts_read


@dataclass(frozen=True, slots=True, eq=False)
class BlockParts:
    """How many pages every part of every block takes.

    Attributes:
        parent_bits: B, planes of the parent.
        min_bits: m, lowest width with a table.
        pages: [n, S] int32, pages of each part, >= 1.
    """

    parent_bits: int
    min_bits: int
    pages: NDArray[np.int32]

    def __post_init__(self) -> None:
        if not 1 <= self.min_bits <= self.parent_bits <= 8:
            raise ValueError(
                f"need 1 <= min_bits <= parent_bits <= 8, not {self.min_bits}, {self.parent_bits}"
            )
        if self.pages.ndim != 2 or self.pages.shape[1] != self.num_parts:
            raise ValueError(f"pages must be [blocks, {self.num_parts}], not {self.pages.shape}")
        if self.pages.shape[0] < 1 or self.pages.min() < 1:
            raise ValueError("there must be a block, and every part must take a page")

    @classmethod
    def of(
        cls,
        plane_pages: NDArray[np.integer],
        table_pages: NDArray[np.integer],
        *,
        parent_bits: int,
        min_bits: int,
    ) -> BlockParts:
        """Parts of blocks whose planes are alike.

        Args:
            plane_pages: [n], pages of one plane of each block.
            table_pages: [n, B - m + 1], pages of the tables of widths m..B.
            parent_bits: B.
            min_bits: m.

        Raises:
            ValueError: If shapes or numbers do not fit.
        """
        each = whole_numbers("plane_pages", plane_pages)[:, None]
        tables = whole_numbers("table_pages", table_pages)
        pages = np.concatenate([np.repeat(each, parent_bits, axis=1), tables], axis=1)
        return cls(parent_bits, min_bits, pages.astype(np.int32))

    @property
    def num_blocks(self) -> int:
        """Blocks n."""
        return len(self.pages)

    @property
    def num_parts(self) -> int:
        """Parts of a block, S."""
        return 2 * self.parent_bits - self.min_bits + 1

    def name(self, part: int) -> Part:
        """Whether a part is a plane or a table, and which."""
        if part < self.parent_bits:
            return ("plane", part)
        return ("table", part - self.parent_bits + self.min_bits)

    def number(self, part: Part) -> int:
        """Position of a named plane or table among the parts."""
        kind, value = part
        return value if kind == "plane" else self.parent_bits + value - self.min_bits

    def read_by_width(self, tables: ResidentTables) -> NDArray[np.bool_]:
        """[B + 1, S] bool: the parts a block must have resident at each width (row 0: none)."""
        reads = np.zeros((self.parent_bits + 1, self.num_parts), np.bool_)
        for bits in range(self.min_bits, self.parent_bits + 1):
            for part in parts_read(bits, self.min_bits, tables):
                reads[bits, self.number(part)] = True
        return reads


def whole_numbers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """Integers as int64 (a copy); numbers of another kind are refused, never cut off.

    Raises:
        ValueError: Naming the array, if its type is no integer and it is not empty.
    """
    found = np.asarray(values)
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, not {found.dtype} like {found.flat[0]}")
    return found.astype(np.int64)


class HeldPages:
    """Page ids of the parts that have pages, in one flat array.

    A part is addressed by ``block * S + part``; its ids stand at a fixed place of the flat array.
    """

    def __init__(self, parts: BlockParts) -> None:
        self._count = parts.pages.ravel().astype(np.int64)
        self._first = np.cumsum(self._count) - self._count
        self._ids = np.full(int(self._count.sum()), -1, np.int32)

    def write(self, keys: NDArray[np.int64], pages: NDArray[np.int32]) -> None:
        """Enter the pages of several parts, one list behind the other."""
        self._ids[self._places(keys)] = pages

    def read(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Pages of several parts, one list behind the other (a copy)."""
        return self._ids[self._places(keys)]

    def clear(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Read and forget."""
        places = self._places(keys)
        pages = self._ids[places]
        self._ids[places] = -1
        return pages

    def counts(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """[len(keys)] int64: pages of each part."""
        counts: NDArray[np.int64] = self._count[keys]
        return counts

    def num_held(self) -> int:
        """Pages entered now."""
        return int(np.count_nonzero(self._ids >= 0))

    def _places(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        count = self._count[keys]
        ends = np.cumsum(count)
        total = int(ends[-1]) if len(ends) else 0
        places: NDArray[np.int64] = np.arange(total) + np.repeat(
            self._first[keys] - (ends - count), count
        )
        return places
