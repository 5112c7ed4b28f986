"""Random expert layers in arena pages: what tests and benchmarks feed to every kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.planes import plane_words
from kernels.reference import dequantize

NO_PAGE = -1
_GARBAGE = 0xFF


PlaneStream = Callable[[int, NDArray[np.uint32]], NDArray[np.uint32]]
TableStream = Callable[[int, NDArray[np.float16], int], NDArray[np.uint8]]


def canonical_planes(module: int, planes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """[P, N, words] to [P, words of the stream]: row by row."""
    del module
    return planes.reshape(len(planes), -1)


def canonical_table(module: int, table: NDArray[np.float16], bits: int) -> NDArray[np.uint8]:
    """[N, 2**bits] to the bytes of the stream: row by row."""
    del module, bits
    return table.reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """One expert matrix.

    Attributes:
        planes: [parent_bits, N, ceil(K/32)], uint32, canonical.
        tables: float16 [N, 2**q] by width q.
        columns: K.
    """

    planes: NDArray[np.uint32]
    tables: dict[int, NDArray[np.float16]]
    columns: int

    def weights(self, bits: int) -> NDArray[np.float32]:
        """[N, K] at this width, by the reference."""
        return dequantize(self.planes, self.tables[bits], bits, self.columns)


@dataclass(frozen=True, slots=True)
class SampleLayer:
    """Experts with their planes and tables scattered over an arena.

    Block 2 * expert is gate_up [2I, H], block 2 * expert + 1 is down [H, I].

    Attributes:
        blocks: One per block.
        arena: uint8, 64-byte aligned; pages that nobody owns hold 0xFF.
        page_bytes: Size of a page.
        min_bits: Lowest width.
        bits: [blocks] int32, committed widths.
        plane_pages: [blocks, parent_bits, pages] int32, -1 where no page is.
        table_pages: [blocks, parent_bits - min_bits + 1, pages] int32.
    """

    blocks: tuple[SampleBlock, ...]
    arena: NDArray[np.uint8]
    page_bytes: int
    min_bits: int
    bits: NDArray[np.int32]
    plane_pages: NDArray[np.int32]
    table_pages: NDArray[np.int32]

    def weights(self) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        """gate_up and down of every expert at the committed widths."""
        at = [block.weights(int(q)) for block, q in zip(self.blocks, self.bits, strict=True)]
        return at[0::2], at[1::2]

    def resident_bytes(self) -> int:
        """Bytes that a step over all experts reads: planes below the width, its table."""
        total = 0
        for block, q in zip(self.blocks, self.bits.tolist(), strict=True):
            total += block.planes[:q].nbytes + block.tables[q].nbytes
        return total


def random_block(
    rng: np.random.Generator, rows: int, columns: int, *, parent_bits: int = 8, min_bits: int = 2
) -> SampleBlock:
    """Uniform codes; tables of normal values, ascending in the code, of size 1 / sqrt(K)."""
    words = plane_words(columns)
    planes = rng.integers(0, 2**32, (parent_bits, rows, words), dtype=np.uint32)
    if columns % 32:
        planes[:, :, -1] &= np.uint32((1 << columns % 32) - 1)
    tables = {}
    for q in range(min_bits, parent_bits + 1):
        values = np.sort(rng.standard_normal((rows, 1 << q)), axis=1) / np.sqrt(columns)
        tables[q] = values.astype(np.float16)
    return SampleBlock(planes, tables, columns)


def sample_layer(
    rng: np.random.Generator,
    *,
    hidden_size: int,
    intermediate: int,
    bits: Sequence[int],
    resident_bits: Sequence[int] | None = None,
    parent_bits: int = 8,
    min_bits: int = 2,
    page_bytes: int = 1024,
    spare_pages: int = 7,
    plane_stream: PlaneStream = canonical_planes,
    table_stream: TableStream = canonical_table,
) -> SampleLayer:
    """A random layer of len(bits) / 2 experts whose pages lie in random order.

    Args:
        rng: Source of chance.
        hidden_size: H.
        intermediate: I.
        bits: Width of every block, gate_up and down of expert 0 first.
        resident_bits: Planes of each block that have pages (all tables up to it too); `bits`
            where None, with the one table of that width.
        parent_bits: Planes of a block.
        min_bits: Lowest width.
        page_bytes: A power of two, >= 1024.
        spare_pages: Pages that nobody owns.
        plane_stream: What the planes of a module (0 gate_up, 1 down) are on the device.
        table_stream: What a table of a module and width is on the device.
    """
    shapes = [(2 * intermediate, hidden_size), (hidden_size, intermediate)] * (len(bits) // 2)
    blocks = tuple(
        random_block(rng, n, k, parent_bits=parent_bits, min_bits=min_bits) for n, k in shapes
    )
    planes = [plane_stream(i % 2, block.planes) for i, block in enumerate(blocks)]
    tables = [
        {q: table_stream(i % 2, table, q) for q, table in block.tables.items()}
        for i, block in enumerate(blocks)
    ]
    plane_list = max(_pages(each[0].nbytes, page_bytes) for each in planes)
    table_list = max(_pages(each[parent_bits].nbytes, page_bytes) for each in tables)
    plane_pages = np.full((len(blocks), parent_bits, plane_list), NO_PAGE, np.int32)
    num_tables = parent_bits - min_bits + 1
    table_pages = np.full((len(blocks), num_tables, table_list), NO_PAGE, np.int32)
    streams: list[tuple[NDArray[np.int32], NDArray[np.uint8]]] = []
    for i in range(len(blocks)):
        held = bits[i] if resident_bits is None else resident_bits[i]
        lowest = held if resident_bits is None else min_bits
        streams += [(plane_pages[i, p], planes[i][p].view(np.uint8)) for p in range(held)]
        streams += [(table_pages[i, q - min_bits], tables[i][q]) for q in range(lowest, held + 1)]
    arena = _fill(rng, streams, page_bytes, spare_pages)
    widths = np.asarray(bits, np.int32)
    return SampleLayer(blocks, arena, page_bytes, min_bits, widths, plane_pages, table_pages)


def _pages(num_bytes: int, page_bytes: int) -> int:
    return -(-num_bytes // page_bytes)


def _fill(
    rng: np.random.Generator,
    streams: Sequence[tuple[NDArray[np.int32], NDArray[np.uint8]]],
    page_bytes: int,
    spare_pages: int,
) -> NDArray[np.uint8]:
    """Arena with every stream in pages of its own; the page lists are written in place."""
    needed = sum(_pages(stream.nbytes, page_bytes) for _, stream in streams)
    order = rng.permutation(needed + spare_pages).astype(np.int32)
    raw = np.full((needed + spare_pages) * page_bytes + 64, _GARBAGE, np.uint8)
    start = -raw.ctypes.data % 64
    arena = raw[start : start + (needed + spare_pages) * page_bytes]
    used = 0
    for pages, stream in streams:
        for number, first in enumerate(range(0, stream.nbytes, page_bytes)):
            page = pages[number] = order[used]
            part = stream[first : first + page_bytes]
            arena[page * page_bytes : page * page_bytes + len(part)] = part
            used += 1
    return arena
