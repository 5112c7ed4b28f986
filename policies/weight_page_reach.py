"""Which planes and tables a width needs, and which widths given planes and tables reach."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_history import ResidentTables
from policies.weight_page_parts import BlockParts

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class WidthParts:
    """Masks over [k blocks, S parts]; see policies/weight_page_parts.py for the numbering."""

    def __init__(self, parts: BlockParts, tables: ResidentTables) -> None:
        self._parts = parts
        self._reads = parts.read_by_width(tables)

    def read_at(self, bits: Ints) -> Mask:
        """[k, S]: parts that kernels may read, or that stay resident, at widths ``bits``."""
        read: Mask = self._reads[bits]
        return read

    def keys(self, blocks: Ints, mask: Mask) -> Ints:
        """Keys ``block * S + part`` of the parts in a mask, block by block."""
        rows, parts = np.nonzero(mask)
        keys: Ints = blocks[rows] * self._parts.num_parts + parts
        return keys

    def reached(self, q: Ints, desired: Ints, have: Mask) -> Ints:
        """Width nearest to the desired one whose parts are all there, else the committed one.

        A raise may stop at any width between, a drop goes all the way or nowhere.

        Args:
            q: [k] committed widths.
            desired: [k] desired widths.
            have: [k, S] parts that are there.
        """
        reached = q.copy()
        for bits in range(self._parts.min_bits, self._parts.parent_bits + 1):
            on_the_way = ((q < bits) & (bits <= desired)) | ((bits == desired) & (desired < q))
            reached[on_the_way & have[:, self._reads[bits]].all(axis=1)] = bits
        return reached


def fitting(need: Ints, free: int) -> Mask:
    """Which of the needs fit into the free pages, first come, first served."""
    if need.sum() <= free:
        return np.ones(len(need), np.bool_)
    fits = np.zeros(len(need), np.bool_)
    for place, pages in enumerate(need.tolist()):
        if pages <= free:
            fits[place] = True
            free -= pages
    return fits
