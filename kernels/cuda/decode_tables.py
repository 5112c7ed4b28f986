"""Lookup tables as the tile kernels read them: whole numbers and one scale per row.

The tensor cores multiply int8. Up to 5 bits an entry is one int8; from 6 bits on it is two, high
and low, which together hold 15 bits: value = 128 high + low. Order of the stream of one table:

    [row tile][row 0..15][code]  1 byte an entry, or 2: low, high      (16 * entries * size a tile)
    [row tile][row 0..15]        float32 scale                          (64 bytes a tile)

A row has a power of two of bytes, at most 512, and so never straddles a page. Row tiles come in
the order of the planes (`TileShape`). Rows added by padding are 0.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.cuda.tile_layout import TILE_ROWS, TileShape

TWO_TERM_BITS: Final = 6  # from this width on an entry is high and low
ONE_TERM_MAX: Final = 127
TWO_TERM_MAX: Final = 127 * 128  # so that the rounded high part stays in int8


def entry_bytes(bits: int) -> int:
    """Bytes of one table entry on the device: 1 up to 5 bits, then 2.

    Raises:
        ValueError: If bits is outside 2..8.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be 2..8, found {bits}")
    return 2 if bits >= TWO_TERM_BITS else 1


def device_table_bytes(shape: TileShape, bits: int) -> int:
    """Bytes of the stream of one table, scales included."""
    return shape.row_tiles * TILE_ROWS * ((1 << bits) * entry_bytes(bits) + 4)


def round_table(
    table: NDArray[np.floating[Any]], bits: int
) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Whole numbers and row scales nearest to a table.

    The largest magnitude of a row becomes 127 (up to 5 bits) or 16256. An entry is off by at most
    half a scale: 0.4 % of the row's largest entry, or 0.003 % in two terms.

    Args:
        table: [N, 2**bits], floating, finite.
        bits: 2..8.

    Returns:
        values: [N, 2**bits], int16, |value| <= 127 or 16256; scales: [N], float32, 0 for a row of
        zeros (and for one below 1e-30, which float32 arithmetic would lose).

    Raises:
        ValueError: If the shape does not fit or an entry is not finite.
    """
    entry_bytes(bits)
    if table.ndim != 2 or table.shape[1] != 1 << bits or table.dtype.kind != "f":
        raise ValueError(
            f"table of {bits} bits must be floating [N, {1 << bits}], "
            f"found {table.dtype} {list(table.shape)}"
        )
    exact = np.asarray(table, np.float64)
    if not np.isfinite(exact).all():
        row = int(np.flatnonzero(~np.isfinite(exact).all(axis=1))[0])
        raise ValueError(f"table of {bits} bits: row {row} has an entry that is not finite")
    largest = np.abs(exact).max(axis=1)
    limit = TWO_TERM_MAX if bits >= TWO_TERM_BITS else ONE_TERM_MAX
    scales = np.where(largest > 1e-30, largest / limit, 0.0).astype(np.float32)
    divisor = np.where(scales > 0, scales, 1).astype(np.float64)
    values = np.clip(np.rint(exact / divisor[:, None]), -limit, limit)
    return np.where(scales[:, None] > 0, values, 0).astype(np.int16), scales


def rounded_table(table: NDArray[np.floating[Any]], bits: int) -> NDArray[np.float32]:
    """[N, 2**bits], float32: the weights the kernels really multiply by (see `round_table`)."""
    values, scales = round_table(table, bits)
    return values.astype(np.float32) * scales[:, None]


def device_table(
    table: NDArray[np.floating[Any]], bits: int, shape: TileShape
) -> NDArray[np.uint8]:
    """The byte stream of one table.

    Args:
        table: [N, 2**bits], floating: as stored with the model.
        bits: 2..8.
        shape: The tiles of the block.

    Returns:
        [device_table_bytes(shape, bits)], uint8.

    Raises:
        ValueError: If the table does not fit (see `round_table`).
    """
    values, scales = round_table(table, bits)
    if len(values) != shape.rows:
        raise ValueError(f"table of {bits} bits must have {shape.rows} rows, found {len(values)}")
    low = ((values.astype(np.int32) + 64) & 127) - 64
    if entry_bytes(bits) == 2:
        terms = np.stack([low, (values - low) >> 7], axis=-1).astype(np.int8)
    else:
        terms = values.astype(np.int8)[:, :, None]
    entries = _row_tiles(terms.view(np.uint8).reshape(shape.rows, -1), shape)
    row_scales = _row_tiles(scales.astype("<f4").view(np.uint8).reshape(shape.rows, 4), shape)
    return np.concatenate([entries.reshape(-1), row_scales.reshape(-1)])


def _row_tiles(rows: NDArray[np.uint8], shape: TileShape) -> NDArray[np.uint8]:
    """[N, bytes] padded and in the order of the row tiles."""
    size = rows.shape[1]
    padded = np.zeros((shape.halves, shape.half_row_tiles * TILE_ROWS, size), np.uint8)
    padded[:, : shape.half_rows] = rows.reshape(shape.halves, shape.half_rows, size)
    grid = padded.reshape(shape.halves, shape.half_row_tiles, TILE_ROWS, size)
    return np.ascontiguousarray(grid.swapaxes(0, 1))
