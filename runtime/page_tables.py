"""What kernels read to find the weights: a width per block and page lists, at fixed addresses.

All arrays are allocated once and only written in place, so that a kernel (or a captured CUDA graph)
may keep their addresses. They change at step boundaries only, in stream order. With `n` blocks,
parent bits `B` (planes 0..B-1, plane 0 = most significant bit of the code), lowest width `m`:

    bits:        [n] int32                committed width q of the block; the kernel uses no other
    plane_pages: [n, B, P] int32          page ids of plane p in order; P = most pages of any plane
    table_pages: [n, B - m + 1, T] int32  page ids of the table of width q, at index q - m

Addresses (`arena`: one uint8 buffer, 64-byte aligned; `page_bytes`: a power of two, >= 1 KiB):

    byte k of the stream of plane p of block i
        = arena[plane_pages[i, p, k // page_bytes] * page_bytes + k % page_bytes]
    byte k of the stream of the table of width q of block i
        = arena[table_pages[i, q - m, k // page_bytes] * page_bytes + k % page_bytes]

The stream of a plane is its words row by row (canonical layout: uint32 [N, ceil(K / 32)], or the
bytes of the layout the arena was built with, see runtime/page_layout.py); the stream of a table is
float16 [N, 2**q] row by row. A stream is padded only behind its end, in its last page. A table row
(2**(q + 1) bytes) never straddles two pages; a plane row may.

Entries that hold no page are NO_PAGE (-1): behind the last page of a shorter list, and everywhere
in a plane or table that is not resident. A kernel launched with width q may read planes 0..q-1 and
the table of q; nothing else is promised. Entries of planes >= q may change while it runs.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_orders import PartCopies, PartList

NO_PAGE: Final = -1


@dataclass(frozen=True, slots=True)
class PageTables:
    """The three arrays of one model, on the host; see the module text for shapes and addresses.

    On a CPU the kernels read these very arrays. On a GPU the device keeps a mirror of each.
    """

    page_bytes: int
    min_bits: int
    bits: NDArray[np.int32]
    plane_pages: NDArray[np.int32]
    table_pages: NDArray[np.int32]

    @classmethod
    def empty(
        cls,
        num_blocks: int,
        *,
        parent_bits: int,
        min_bits: int,
        plane_pages: int,
        table_pages: int,
        page_bytes: int,
    ) -> "PageTables":
        """Tables of `num_blocks` blocks in which nothing is resident and every width is 0.

        Args:
            num_blocks: n >= 1.
            parent_bits: B, 1 to 8.
            min_bits: m, the lowest width that has a table, 1 to B.
            plane_pages: P, pages of the largest plane of any block.
            table_pages: T, pages of the largest table of any block.
            page_bytes: a power of two, >= 1024.

        Raises:
            ValueError: If a number lies outside these ranges.
        """
        if page_bytes < 1024 or page_bytes & (page_bytes - 1):
            raise ValueError(f"page_bytes must be a power of two >= 1024, not {page_bytes}")
        if not 1 <= min_bits <= parent_bits <= 8:
            raise ValueError(f"need 1 <= min_bits <= parent_bits <= 8: {min_bits}, {parent_bits}")
        if min(num_blocks, plane_pages, table_pages) < 1:
            raise ValueError(
                "num_blocks, plane_pages and table_pages must be >= 1, not "
                f"{num_blocks}, {plane_pages}, {table_pages}"
            )
        num_tables = parent_bits - min_bits + 1
        return cls(
            page_bytes=page_bytes,
            min_bits=min_bits,
            bits=np.zeros(num_blocks, np.int32),
            plane_pages=np.full((num_blocks, parent_bits, plane_pages), NO_PAGE, np.int32),
            table_pages=np.full((num_blocks, num_tables, table_pages), NO_PAGE, np.int32),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks n."""
        return len(self.bits)

    @property
    def parent_bits(self) -> int:
        """Planes of the parent, B."""
        return int(self.plane_pages.shape[1])

    def write_plane(self, block: int, plane: int, pages: NDArray[np.int32]) -> None:
        """Enter the page list of one plane; an empty list removes it."""
        row = self.plane_pages[block, plane]
        row[: len(pages)] = pages
        row[len(pages) :] = NO_PAGE

    def write_table(self, block: int, bits: int, pages: NDArray[np.int32]) -> None:
        """Enter the page list of the table of width `bits`; an empty list removes it."""
        row = self.table_pages[block, bits - self.min_bits]
        row[: len(pages)] = pages
        row[len(pages) :] = NO_PAGE

    def write_parts(self, copies: PartCopies) -> None:
        """Enter the page lists of many planes and tables at once."""
        counts = np.diff(copies.first)
        places = np.arange(len(copies.pages)) - np.repeat(copies.first[:-1], counts)
        blocks, parts = np.repeat(copies.blocks, counts), np.repeat(copies.parts, counts)
        planes = parts < self.parent_bits
        self.clear_parts(PartList(copies.blocks, copies.parts))
        self.plane_pages[blocks[planes], parts[planes], places[planes]] = copies.pages[planes]
        tables = parts[~planes] - self.parent_bits
        self.table_pages[blocks[~planes], tables, places[~planes]] = copies.pages[~planes]

    def clear_parts(self, gone: PartList) -> None:
        """Remove the page lists of planes and tables that are not resident any more."""
        planes = gone.parts < self.parent_bits
        self.plane_pages[gone.blocks[planes], gone.parts[planes]] = NO_PAGE
        self.table_pages[gone.blocks[~planes], gone.parts[~planes] - self.parent_bits] = NO_PAGE

    def plane_list(self, block: int, plane: int) -> NDArray[np.int32]:
        """Page ids of one plane, without padding (a copy)."""
        return _held(self.plane_pages[block, plane])

    def table_list(self, block: int, bits: int) -> NDArray[np.int32]:
        """Page ids of the table of width `bits`, without padding (a copy)."""
        return _held(self.table_pages[block, bits - self.min_bits])


def _held(row: NDArray[np.int32]) -> NDArray[np.int32]:
    held: NDArray[np.int32] = row[row != NO_PAGE]
    return held
