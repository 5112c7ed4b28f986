"""The order of a plane's bits on the GPU: a permutation of the canonical planes, and its inverse.

A tile is 16 rows x 128 columns of one plane, 256 bytes: 32 lanes x 2 words. Lane 4g + t of a warp
holds row g in its first word and row g + 8 in its second; the 32 weights of a word are columns

    k = 32 a + 16 (i >> 2) + 4 t + (i & 3),    a = 0..3 (step of an mma), i = 0..7 (nibble)

and plane p keeps that weight at bit 4 i + ((3 - p - a) mod 4): the masks of four planes at one
step a never meet, so that a nibble of each weight is gathered without shifts, and the eight
nibbles select the bytes of the A fragment of mma.m16n8k32.s8.

A unit is two tiles side by side, 256 columns: [lane][tile of the pair][row g, g + 8], 16 bytes a
lane. Order in the stream of a plane:

    [row tile][full unit]  512 bytes each, then [row tile]  256 bytes each of the odd last tile

so no unit straddles a page of a power of two >= 1 KiB, and nothing is padded but rows to 16 and
columns to 128. The rows of a gate_up matrix are two halves: row tile 2j holds gate rows 16j.., row
tile 2j + 1 the up rows 16j.., so that one thread block streams both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernels.planes import PlaneArray, plane_words

TILE_ROWS: Final = 16
TILE_COLUMNS: Final = 128
TILE_BYTES: Final = 256
UNIT_COLUMNS: Final = 2 * TILE_COLUMNS
UNIT_BYTES: Final = 2 * TILE_BYTES
MIN_PAGE_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class TileShape:
    """Tiles of one weight matrix.

    Args:
        rows: N, of both halves together.
        columns: K.
        halves: 2 for gate_up (gate rows first, N even), else 1.

    Raises:
        ValueError: If a number is out of range.
    """

    rows: int
    columns: int
    halves: int = 1

    def __post_init__(self) -> None:
        if self.halves not in (1, 2):
            raise ValueError(f"halves must be 1 or 2, found {self.halves}")
        if self.rows < self.halves or self.rows % self.halves:
            raise ValueError(f"rows must be a positive multiple of {self.halves}: {self.rows}")
        if self.columns < 1:
            raise ValueError(f"columns must be >= 1, found {self.columns}")

    @property
    def half_rows(self) -> int:
        """Rows of one half."""
        return self.rows // self.halves

    @property
    def half_row_tiles(self) -> int:
        """Row tiles of one half."""
        return -(-self.half_rows // TILE_ROWS)

    @property
    def row_tiles(self) -> int:
        """Row tiles, those of both halves interleaved."""
        return self.halves * self.half_row_tiles

    @property
    def column_tiles(self) -> int:
        """Tiles along the columns."""
        return -(-self.columns // TILE_COLUMNS)

    @property
    def full_units(self) -> int:
        """Pairs of tiles along the columns; an odd last tile is kept apart."""
        return self.column_tiles // 2

    @property
    def units(self) -> int:
        """Units along the columns, a last half one included: groups with one activation scale."""
        return -(-self.column_tiles // 2)

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane: 256 for each started tile of 16 rows x 128 columns."""
        return TILE_BYTES * self.row_tiles * self.column_tiles


def check_page_bytes(page_bytes: int) -> int:
    """The shift of a page size the tile kernels can read.

    Raises:
        ValueError: If it is not a power of two >= 1024.
    """
    if page_bytes < MIN_PAGE_BYTES or page_bytes & (page_bytes - 1):
        raise ValueError(f"page_bytes must be a power of two >= {MIN_PAGE_BYTES}: {page_bytes}")
    return page_bytes.bit_length() - 1


def tile_planes(
    planes: PlaneArray, shape: TileShape, *, first_plane: int = 0
) -> NDArray[np.uint32]:
    """Canonical planes in the order of the device.

    Args:
        planes: [P, N, ceil(K/32)], uint32, canonical: planes first_plane, first_plane + 1, ...
        shape: N, K and halves.
        first_plane: Index of the first plane given (the order of bits depends on it).

    Returns:
        [P, plane_bytes / 4], uint32 (little-endian words of the byte stream).

    Raises:
        ValueError: If dtype or shape do not fit.
    """
    words = plane_words(shape.columns)
    if planes.dtype != np.uint32 or planes.ndim != 3 or planes.shape[1:] != (shape.rows, words):
        raise ValueError(
            f"planes must be uint32 [P, {shape.rows}, {words}], "
            f"found {planes.dtype} {list(planes.shape)}"
        )
    out = np.empty((len(planes), shape.plane_bytes // 4), np.uint32)
    for row, plane in enumerate(planes):
        tiles = _interleave_halves(_pad(plane, shape), shape)
        out[row] = _stream(_rotate_bits(tiles, first_plane + row), shape)
    return out


def untile_planes(
    words: NDArray[np.uint32], shape: TileShape, *, first_plane: int = 0
) -> PlaneArray:
    """The inverse of `tile_planes`; padding is dropped.

    Args:
        words: [P, plane_bytes / 4], uint32.
        shape: As in `tile_planes`.
        first_plane: As in `tile_planes`.

    Returns:
        [P, N, ceil(K/32)], uint32.

    Raises:
        ValueError: If dtype or shape do not fit.
    """
    size = shape.plane_bytes // 4
    if words.dtype != np.uint32 or words.ndim != 2 or words.shape[1] != size:
        raise ValueError(
            f"words must be uint32 [P, {size}], found {words.dtype} {list(words.shape)}"
        )
    kept = plane_words(shape.columns)
    out = np.empty((len(words), shape.rows, kept), np.uint32)
    for row, stream in enumerate(words):
        tiles = _unrotate_bits(_unstream(stream, shape), first_plane + row)
        out[row] = _separate_halves(tiles, shape)[:, :kept]
    return out


def _pad(plane: NDArray[np.uint32], shape: TileShape) -> NDArray[np.uint32]:
    """[halves, padded rows of a half, column_tiles * 4]."""
    rows = shape.half_row_tiles * TILE_ROWS
    padded = np.zeros((shape.halves, rows, shape.column_tiles * 4), np.uint32)
    halves = plane.reshape(shape.halves, shape.half_rows, -1)
    padded[:, : shape.half_rows, : plane.shape[1]] = halves
    return padded


def _interleave_halves(padded: NDArray[np.uint32], shape: TileShape) -> NDArray[np.uint32]:
    """[row_tiles, row of a word pair 2, g 8, column tile, a 4]."""
    grid = padded.reshape(shape.halves, shape.half_row_tiles, 2, 8, shape.column_tiles, 4)
    return grid.swapaxes(0, 1).reshape(shape.row_tiles, 2, 8, shape.column_tiles, 4)


def _separate_halves(tiles: NDArray[np.uint32], shape: TileShape) -> NDArray[np.uint32]:
    """[N, column_tiles * 4] from the result of `_interleave_halves`."""
    grid = tiles.reshape(shape.half_row_tiles, shape.halves, TILE_ROWS, shape.column_tiles * 4)
    rows = grid.swapaxes(0, 1).reshape(shape.halves, -1, shape.column_tiles * 4)
    return rows[:, : shape.half_rows].reshape(shape.rows, -1)


@cache
def _spread() -> NDArray[np.uint64]:
    """Of every 16 columns (4 t + i): four 16-bit fields, field t has column i at bit 4 i."""
    halves = np.arange(1 << 16, dtype=np.uint64)
    out = np.zeros(1 << 16, np.uint64)
    for t in range(4):
        for i in range(4):
            bit = (halves >> np.uint64(4 * t + i)) & np.uint64(1)
            out |= bit << np.uint64(16 * t + 4 * i)
    return out


@cache
def _gather() -> NDArray[np.uint16]:
    """Of every 16-bit field: its bits 0, 4, 8, 12 as a nibble."""
    fields = np.arange(1 << 16, dtype=np.uint32)
    out = np.zeros(1 << 16, np.uint32)
    for i in range(4):
        out |= ((fields >> (4 * i)) & 1) << i
    return out.astype(np.uint16)


def _rotate_bits(tiles: NDArray[np.uint32], plane: int) -> NDArray[np.uint32]:
    """[..., a] canonical words to [..., t] words of lanes."""
    halves = np.ascontiguousarray(tiles, "<u4").view("<u2")  # [..., (a, upper half of the word)]
    fields = _spread()[halves].view(np.uint16).reshape(*tiles.shape, 2, 4)  # [..., a, half, t]
    out = np.zeros((*tiles.shape[:-1], 4, 2), "<u2")
    for a in range(4):
        out |= fields[..., a, :, :].swapaxes(-1, -2) << np.uint16((3 - plane - a) % 4)
    return out.view("<u4").reshape(*tiles.shape[:-1], 4).astype(np.uint32, copy=False)


def _unrotate_bits(tiles: NDArray[np.uint32], plane: int) -> NDArray[np.uint32]:
    """[..., t] words of lanes to [..., a] canonical words."""
    fields = np.ascontiguousarray(tiles, "<u4").view("<u2").reshape(*tiles.shape, 2)
    out = np.zeros((*tiles.shape[:-1], 4, 2), "<u2")
    for a in range(4):
        nibbles = _gather()[fields >> np.uint16((3 - plane - a) % 4)]
        for t in range(4):
            out[..., a, :] |= nibbles[..., t, :] << np.uint16(4 * t)
    return out.view("<u4").reshape(*tiles.shape[:-1], 4).astype(np.uint32, copy=False)


def _stream(tiles: NDArray[np.uint32], shape: TileShape) -> NDArray[np.uint32]:
    """[row tile, row of a pair, g, column tile, t] to the byte stream's words."""
    even = 2 * shape.full_units
    pairs = tiles[:, :, :, :even].reshape(shape.row_tiles, 2, 8, shape.full_units, 2, 4)
    full = pairs.transpose(0, 3, 2, 5, 4, 1)  # [row tile, unit, g, t, tile of the pair, row]
    tail = tiles[:, :, :, even:].transpose(0, 3, 2, 4, 1)  # [row tile, tile, g, t, row]
    return np.concatenate([full.reshape(-1), tail.reshape(-1)])


def _unstream(words: NDArray[np.uint32], shape: TileShape) -> NDArray[np.uint32]:
    """[row tile, row of a pair, g, column tile, t] from the byte stream's words."""
    even = 2 * shape.full_units
    size = shape.row_tiles * shape.full_units * UNIT_BYTES // 4
    full = words[:size].reshape(shape.row_tiles, shape.full_units, 8, 4, 2, 2)
    pairs = full.transpose(0, 5, 2, 1, 4, 3).reshape(shape.row_tiles, 2, 8, even, 4)
    tail = words[size:].reshape(shape.row_tiles, shape.column_tiles - even, 8, 4, 2)
    return np.concatenate([pairs, tail.transpose(0, 4, 2, 1, 3)], axis=3)
