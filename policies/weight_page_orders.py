"""What the weight page table asks its driver to do: copies, cancellations, a new bit table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class PartCopies:
    """Order: copy these parts from the host into these pages.

    Attributes:
        blocks: [c] int64, block ids.
        parts: [c] int64, parts as in policies/weight_page_parts.py.
        first: [c + 1] int64, where the pages of copy i start and end in ``pages``.
        pages: page ids of all copies, int32, in the order of each part's stream.
    """

    blocks: NDArray[np.int64]
    parts: NDArray[np.int64]
    first: NDArray[np.int64]
    pages: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.blocks)

    def page_list(self, copy: int) -> NDArray[np.int32]:
        """Pages of one copy."""
        return self.pages[self.first[copy] : self.first[copy + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class PartList:
    """Parts named one by one: [c] int64 block ids and parts."""

    blocks: NDArray[np.int64]
    parts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class PageOrders:
    """Answer of the weight page table to a plan or a step boundary.

    Carry out in this order: write ``bits`` of ``blocks`` into the kernels' bit table (ordered
    before the next step's kernels), ask the device to drop ``cancels``, start ``copies``.

    Attributes:
        blocks: [b] int64, blocks whose committed width has moved.
        bits: [b] int64, their widths now.
        copies: Copies to start.
        cancels: Copies that are not wanted any more. Each must still be reported once as landed
            or failed, when the device can no longer write to its pages; only then are they free.
        freed: Parts that have left the device; their page lists hold no more.
        freed_pages: Pages that have gone back to the arena.
    """

    blocks: NDArray[np.int64]
    bits: NDArray[np.int64]
    copies: PartCopies
    cancels: PartList
    freed: PartList
    freed_pages: int
