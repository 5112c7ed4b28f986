"""How the planes and tables of a quantized block become streams of bytes, and streams pages.

A layout turns planes and tables into streams; the arena cuts a stream into pages in order and
pads behind its end only. The canonical layout is the plane's words row by row and the table as
float16; a device layout is a pure permutation of the plane's bits (and may store tables in the
form its kernels read) and plugs in by the same protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_parts import BlockParts


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One weight matrix: N rows by K columns; ``halves`` is 2 for gate_up, gate rows first."""

    rows: int
    columns: int
    halves: int = 1

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 1 or self.halves not in (1, 2) or self.rows % self.halves:
            raise ValueError(
                "rows and columns must be >= 1 and halves 1 or 2 dividing rows, not "
                f"{self.rows}, {self.columns}, {self.halves}"
            )


class BlockLayout(Protocol):
    """Bytes of planes and tables as the kernels of one device read them."""

    def plane_bytes(self, shape: BlockShape) -> int:
        """Length of the stream of one plane."""

    def table_bytes(self, shape: BlockShape, bits: int) -> int:
        """Length of the stream of the table of width ``bits``."""

    def plane_stream(
        self, words: NDArray[np.uint32], plane: int, shape: BlockShape
    ) -> NDArray[np.uint8]:
        """Stream of one plane, from its canonical words [N, ceil(K / 32)]."""

    def plane_words(
        self, stream: NDArray[np.uint8], plane: int, shape: BlockShape
    ) -> NDArray[np.uint32]:
        """Canonical words of a stream: exactly those it was made from."""

    def table_stream(
        self, table: NDArray[np.float16], bits: int, shape: BlockShape
    ) -> NDArray[np.uint8]:
        """Stream of a table [N, 2**bits] float16."""


class CanonicalLayout:
    """Words row by row, little-endian, and float16 tables: what the kernels on CPUs read."""

    def plane_bytes(self, shape: BlockShape) -> int:
        """4 * N * ceil(K / 32)."""
        return 4 * shape.rows * -(-shape.columns // 32)

    def table_bytes(self, shape: BlockShape, bits: int) -> int:
        """2 * N * 2**bits."""
        return shape.rows << (bits + 1)

    def plane_stream(
        self, words: NDArray[np.uint32], plane: int, shape: BlockShape
    ) -> NDArray[np.uint8]:
        """The words' bytes; a view where they are contiguous."""
        return np.ascontiguousarray(words, dtype="<u4").view(np.uint8).reshape(-1)

    def plane_words(
        self, stream: NDArray[np.uint8], plane: int, shape: BlockShape
    ) -> NDArray[np.uint32]:
        """The words of a stream (a copy)."""
        words = np.array(stream).view("<u4").astype(np.uint32, copy=False)
        return words.reshape(shape.rows, -1)

    def table_stream(
        self, table: NDArray[np.float16], bits: int, shape: BlockShape
    ) -> NDArray[np.uint8]:
        """The entries' bytes; a view where they are contiguous."""
        return np.ascontiguousarray(table, dtype="<f2").view(np.uint8).reshape(-1)

    def table_entries(
        self, stream: NDArray[np.uint8], bits: int, shape: BlockShape
    ) -> NDArray[np.float16]:
        """Table [N, 2**bits] of a stream (a copy)."""
        entries = np.array(stream).view("<f2").astype(np.float16, copy=False)
        return entries.reshape(shape.rows, 1 << bits)


def part_bytes(
    layout: BlockLayout, shape: BlockShape, *, parent_bits: int, min_bits: int
) -> NDArray[np.int64]:
    """[S] int64: bytes of the streams of all planes and tables of one block."""
    planes = [layout.plane_bytes(shape)] * parent_bits
    tables = [layout.table_bytes(shape, bits) for bits in range(min_bits, parent_bits + 1)]
    return np.array(planes + tables, np.int64)


def parts_in_pages(
    stream_bytes: NDArray[np.int64], *, page_bytes: int, parent_bits: int, min_bits: int
) -> BlockParts:
    """Every stream rounded up to whole pages by itself.

    Args:
        stream_bytes: [n, S], see part_bytes.
        page_bytes: Size of a page.
        parent_bits: B.
        min_bits: m.

    Raises:
        ValueError: If the shape is not that of n blocks with B planes.
    """
    pages = -(-stream_bytes // page_bytes)
    return BlockParts(parent_bits, min_bits, pages.astype(np.int32))


def write_stream(
    arena: NDArray[np.uint8], pages: NDArray[np.int32], stream: NDArray[np.uint8]
) -> None:
    """Copy a stream into its pages.

    Args:
        arena: [num_pages, page_bytes] uint8, in host memory.
        pages: Page ids in the order of the stream.
        stream: uint8, longer than all pages but the last.

    Raises:
        ValueError: If the stream does not fill just these pages.
    """
    page_bytes = arena.shape[1]
    if -(-len(stream) // page_bytes) != len(pages):
        raise ValueError(f"a stream of {len(stream)} bytes does not fill {len(pages)} pages")
    whole = len(stream) // page_bytes
    arena[pages[:whole]] = stream[: whole * page_bytes].reshape(whole, page_bytes)
    if whole < len(pages):
        arena[pages[whole], : len(stream) - whole * page_bytes] = stream[whole * page_bytes :]


def read_stream(
    arena: NDArray[np.uint8], pages: NDArray[np.int32], num_bytes: int
) -> NDArray[np.uint8]:
    """The first ``num_bytes`` bytes of pages, one behind the other (a copy)."""
    stream: NDArray[np.uint8] = arena[pages].reshape(-1)[:num_bytes]
    return stream
