"""Weights on the pages of an arena, as the CPU kernels take them.

Arrays are checked once, when an object is made. They may be written in place afterwards (widths
and page lists, between steps): the kernels read them at every call, and check every page id they
are going to use before they read a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.arrays import check_array
from kernels.cpu.blocks import ContiguousBlock, IntArray
from kernels.cpu.library import WeightsArgument
from kernels.planes import plane_words

TABLE = -1  # instead of the number of a plane


@dataclass(frozen=True, eq=False)
class PagedWeights:
    """An arena and, for n blocks, a committed width and the pages of every plane and table.

    Byte k of the stream of plane p of block i is
    ``arena[plane_pages[i, p, k // page_bytes] * page_bytes + k % page_bytes]``; tables likewise,
    width q at index q - min_bits. A stream is its rows one after the other, padded behind its end
    only. Plane rows may straddle pages; table rows never do, being powers of two.

    Args:
        arena: [bytes], uint8, C-contiguous.
        page_bytes: A power of two >= 1024.
        min_bits: The least width that has a table.
        bits: [n], int32, committed width of a block.
        plane_pages: [n, B, P], int32; entries that are not needed at the committed width are free.
        table_pages: [n, B - min_bits + 1, T], int32.

    Raises:
        ValueError: If an array does not fit.
    """

    arena: NDArray[np.uint8]
    page_bytes: int
    min_bits: int
    bits: IntArray
    plane_pages: IntArray
    table_pages: IntArray

    def __post_init__(self) -> None:
        if self.page_bytes < 1024 or self.page_bytes & (self.page_bytes - 1):
            raise ValueError(f"page_bytes must be a power of two >= 1024, found {self.page_bytes}")
        if self.plane_pages.ndim != 3 or self.table_pages.ndim != 3:
            raise ValueError(
                "plane_pages and table_pages must have three axes, found "
                f"{list(self.plane_pages.shape)} and {list(self.table_pages.shape)}"
            )
        blocks, parent, _ = self.plane_pages.shape
        if not 2 <= self.min_bits <= parent <= 8:
            raise ValueError(
                f"2 <= min_bits <= parent bits <= 8 needed, found {self.min_bits} and {parent}"
            )
        tables = parent - self.min_bits + 1
        check_array("arena", self.arena, np.uint8, (self.arena.size,))
        check_array("bits", self.bits, np.int32, (blocks,))
        check_array("plane_pages", self.plane_pages, np.int32, self.plane_pages.shape)
        shape = (blocks, tables, self.table_pages.shape[2])
        check_array("table_pages", self.table_pages, np.int32, shape)

    @cached_property
    def argument(self) -> WeightsArgument:
        """What the library takes; valid as long as this object lives."""
        return WeightsArgument(
            page_shift=self.page_bytes.bit_length() - 1,
            min_bits=self.min_bits,
            parent_bits=self.plane_pages.shape[1],
            bits=self.bits.ctypes.data,
            arena=self.arena.ctypes.data,
            num_pages=self.num_pages,
            plane_pages=self.plane_pages.ctypes.data,
            plane_list=self.plane_pages.shape[2],
            table_pages=self.table_pages.ctypes.data,
            table_list=self.table_pages.shape[2],
        )

    @property
    def num_pages(self) -> int:
        """Whole pages in the arena."""
        return self.arena.size // self.page_bytes

    @property
    def widths(self) -> str:
        """Widths a block may have, for messages."""
        return f"{self.min_bits}..{self.plane_pages.shape[1]}"


@dataclass(frozen=True, eq=False)
class PagedBlock:
    """One expert matrix of a paged model, at whatever width is committed when it is used.

    Args:
        weights: The arena and its page lists.
        index: Which of the model's blocks.
        rows: N.
        columns: K.

    Raises:
        ValueError: If there is no such block or its shape is empty.
    """

    weights: PagedWeights
    index: int
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < len(self.weights.bits):
            raise ValueError(f"index must be in [0, {len(self.weights.bits)}), found {self.index}")
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"rows and columns must be >= 1: {self.rows}, {self.columns}")

    @property
    def num_pages(self) -> int:
        """Whole pages in the arena."""
        return self.weights.num_pages

    @property
    def widths(self) -> str:
        """Widths a block may have, for messages."""
        return self.weights.widths

    @property
    def bits(self) -> int:
        """The committed width.

        Raises:
            ValueError: If it is not a width this model has.
        """
        bits, parent = int(self.weights.bits[self.index]), self.weights.plane_pages.shape[1]
        if not self.weights.min_bits <= bits <= parent:
            raise ValueError(
                f"block {self.index}: bits must be {self.weights.widths}, found {bits}"
            )
        return bits

    @property
    def argument(self) -> WeightsArgument:
        """What the library takes; valid as long as the weights live."""
        return self.weights.argument

    def contiguous(self) -> ContiguousBlock:
        """A copy without pages, at the width committed now.

        Raises:
            ValueError: If a page it needs is not in the arena.
        """
        bits, words = self.bits, plane_words(self.columns)
        size = 4 * self.rows * words
        planes = np.stack([self._stream(p, size).view("<u4") for p in range(bits)])
        table = self._stream(TABLE, self.rows << (bits + 1)).view("<f2")
        return ContiguousBlock(
            np.ascontiguousarray(planes.reshape(bits, self.rows, words), np.uint32),
            np.ascontiguousarray(table.reshape(self.rows, 1 << bits), np.float16),
            bits,
            self.columns,
        )

    def _stream(self, plane: int, size: int) -> NDArray[np.uint8]:
        w = self.weights
        listed = (
            w.table_pages[self.index, self.bits - w.min_bits]
            if plane == TABLE
            else w.plane_pages[self.index, plane]
        )
        needed = -(-size // w.page_bytes)
        pages = listed[:needed]
        wrong = np.flatnonzero((pages < 0) | (pages >= w.num_pages))
        if len(wrong) or len(pages) < needed:
            at = int(wrong[0]) if len(wrong) else len(pages)
            part = "table" if plane == TABLE else f"plane {plane}"
            found = int(pages[at]) if at < len(pages) else -1
            raise ValueError(
                f"block {self.index}: page {at} of its {part} must be in [0, {w.num_pages}), "
                f"found {found}"
            )
        all_pages = w.arena[: w.num_pages * w.page_bytes].reshape(w.num_pages, w.page_bytes)
        stream: NDArray[np.uint8] = all_pages[pages].reshape(-1)[:size]
        return stream


@dataclass(frozen=True, eq=False)
class PagedExperts:
    """The experts of one layer of a paged model.

    Args:
        weights: The arena and its page lists.
        first_block: Index of the layer's first block; the layer has blocks first_block ..
            first_block + 2 * experts, in the order expert * 2 + module.
        experts: E >= 1.
        hidden: H.
        inner: I.

    Raises:
        ValueError: If the blocks are not all there or a number is not positive.
    """

    weights: PagedWeights
    first_block: int
    experts: int
    hidden: int
    inner: int

    def __post_init__(self) -> None:
        if min(self.experts, self.hidden, self.inner) < 1:
            raise ValueError(
                "experts, hidden and inner must be >= 1, found "
                f"{self.experts}, {self.hidden}, {self.inner}"
            )
        end = self.first_block + 2 * self.experts
        if self.first_block < 0 or end > len(self.weights.bits):
            raise ValueError(
                f"blocks {self.first_block}..{end - 1} needed, there are {len(self.weights.bits)}"
            )

    def block(self, index: int) -> PagedBlock:
        """Block expert * 2 + module of this layer."""
        shape = (self.hidden, self.inner) if index % 2 else (2 * self.inner, self.hidden)
        return PagedBlock(self.weights, self.first_block + index, *shape)

    @property
    def argument(self) -> WeightsArgument:
        """What the library takes; valid as long as the weights live."""
        return self.weights.argument

    @property
    def num_pages(self) -> int:
        """Whole pages in the arena."""
        return self.weights.num_pages

    @property
    def widths(self) -> str:
        """Widths a block may have, for messages."""
        return self.weights.widths
