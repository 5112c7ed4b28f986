"""Nested one-dimensional k-means of weight rows: one code per weight that every bit width shares.

A seed of ``2**seed_bits`` cells is an exact weighted k-means of the sorted row; every cell is then
split in two exactly until there are ``2**parent_bits``, and neighbouring pairs are merged down to
``2**min_bits``. The q-bit code is the first q bits of the parent's code.

Source:
    Park et al., "Any-Precision LLM" (ICML 2024): incremental upscaling of a k-means seed.
    Kim et al., "SqueezeLLM" (ICML 2024): sensitivity-weighted k-means per output row.
    Gronlund et al., "Fast exact k-means, k-medians and Bregman divergence clustering in 1D"
    (arXiv 1701.07204): exact seed by divide and conquer over prefix sums.
    Aggarwal, Schieber, Tokuyama, "Finding a minimum-weight k-link path in graphs with the concave
    Monge property" (1994): best cuts of k and k + 1 cells interlace.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runtime.nested_kmeans_rows import nested_rows

Weights = NDArray[np.float32] | NDArray[np.float64]

ROWS_AT_ONCE_BYTES = 8 << 20  # sort keys of one chunk of rows, so that a thread stays in its cache
MAX_PARENT_BITS = 8


class RowError(ValueError):
    """A row that cannot be clustered; ``row`` is its number."""

    def __init__(self, row: int, message: str) -> None:
        self.row = row
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class NestedRows:
    """Codes and centroids of clustered rows.

    codes: [N, K] uint8, the parent's codes; the q-bit code is ``codes >> (parent_bits - q)``.
    tables: by q, [N, 2**q] float64 centroids; those of cells that hold a column
        do not descend along a row.
    """

    codes: NDArray[np.uint8]
    tables: dict[int, NDArray[np.float64]]

    @property
    def parent_bits(self) -> int:
        """Bits of a code."""
        return max(self.tables)

    def reconstruct(self, bits: int) -> NDArray[np.float64]:
        """The rows at ``bits`` bits: [N, K] float64.

        Raises:
            KeyError: If there is no table of that width.
        """
        cells = self.codes >> (self.parent_bits - bits)
        return np.take_along_axis(self.tables[bits], cells.astype(np.intp), axis=1)


def quantize_rows(
    weights: Weights,
    sensitivity: Weights | None = None,
    *,
    parent_bits: int = 8,
    seed_bits: int = 3,
    min_bits: int = 2,
    threads: int = 1,
) -> NestedRows:
    """Cluster every row by itself.

    Rows are independent: any number of threads gives the same result. A row whose sensitivities
    are all zero is clustered with ones. Equal values keep the order of their columns.

    Args:
        weights: [N, K] float32 or float64.
        sensitivity: [K] or [N, K], >= 0, the weight of each squared error; None for ones.
        parent_bits: Bits of a code, 1..8.
        seed_bits: Width that is clustered exactly, 1..parent_bits.
        min_bits: Narrowest table, 1..parent_bits; below the seed by merging pairs of cells.
        threads: Threads over chunks of rows, >= 1.

    Returns:
        Codes and the tables of min_bits..parent_bits.

    Raises:
        RowError: If a weight is not finite, or a sensitivity is not finite or negative.
        ValueError: If shapes or bit widths do not fit.
    """
    _check_bits(parent_bits, seed_bits, min_bits)
    if weights.ndim != 2 or weights.shape[1] < 1:
        raise ValueError(f"weights: shape {weights.shape}, need [rows, columns >= 1]")
    if weights.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(f"weights: dtype {weights.dtype}, need float32 or float64")
    if threads < 1:
        raise ValueError(f"threads: {threads}, need at least 1")
    rows, columns = weights.shape
    weights = np.require(weights, requirements="C")
    per_row = _checked_sensitivity(sensitivity, rows, columns)
    _refuse_not_finite(weights)

    codes = np.empty((rows, columns), np.uint8)
    lowest = min(min_bits, seed_bits)
    tables = np.empty((rows, (2 << parent_bits) - (1 << lowest)), np.float64)
    step = max(1, ROWS_AT_ONCE_BYTES // (8 * columns))
    step = max(1, min(step, -(-rows // threads)))
    cluster = partial(
        _cluster_chunk, weights, per_row, codes, tables, (parent_bits, seed_bits, lowest)
    )
    chunks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    if threads == 1:
        for chunk in chunks:
            cluster(chunk)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(cluster, chunks))
    return NestedRows(codes, _tables_by_bits(tables, lowest, min_bits, parent_bits))


def _check_bits(parent_bits: int, seed_bits: int, min_bits: int) -> None:
    if not 1 <= parent_bits <= MAX_PARENT_BITS:
        raise ValueError(f"parent_bits: {parent_bits}, need 1..{MAX_PARENT_BITS}")
    for name, bits in (("seed_bits", seed_bits), ("min_bits", min_bits)):
        if not 1 <= bits <= parent_bits:
            raise ValueError(f"{name}: {bits}, need 1..{parent_bits} (parent_bits)")


def _checked_sensitivity(
    sensitivity: Weights | None, rows: int, columns: int
) -> NDArray[np.float64]:
    """[1, K] for a shared sensitivity, [N, K] for one per row."""
    if sensitivity is None:
        return np.ones((1, columns))
    if sensitivity.shape not in ((columns,), (rows, columns)):
        raise ValueError(
            f"sensitivity: shape {sensitivity.shape}, need ({columns},) or ({rows}, {columns})"
        )
    table = np.ascontiguousarray(sensitivity, dtype=np.float64).reshape(-1, columns)
    bad = ~(np.isfinite(table) & (table >= 0))
    if bad.any():
        row, column = (int(place) for place in np.argwhere(bad)[0])
        raise RowError(
            row,
            f"sensitivity of row {row}, column {column}: {table[row, column]},"
            " need a finite number >= 0",
        )
    return table


def _refuse_not_finite(weights: Weights) -> None:
    finite = np.isfinite(weights)
    if not finite.all():
        row, column = (int(place) for place in np.argwhere(~finite)[0])
        raise RowError(
            row, f"row {row}, column {column}: {weights[row, column]}, need a finite weight"
        )


def _cluster_chunk(
    weights: Weights,
    sensitivity: NDArray[np.float64],
    codes: NDArray[np.uint8],
    tables: NDArray[np.float64],
    bits: tuple[int, int, int],
    chunk: slice,
) -> None:
    own = sensitivity if len(sensitivity) == 1 else sensitivity[chunk]
    order = sorted_columns(weights[chunk])
    nested_rows(weights[chunk], own, order, *bits, codes[chunk], tables[chunk])


def sorted_columns(weights: Weights) -> NDArray[np.uint32]:
    """Columns of every row by ascending weight, equal weights by column: [N, K] uint32.

    A float32 row is sorted as integers, weight above and column below in one key: no two keys
    are equal, so the fast sort, which keeps no order among equals, gives one answer. Weights that
    come from bfloat16 leave room for the column in 32 bits.
    """
    if weights.dtype == np.float64:
        return np.argsort(weights, axis=1, kind="stable").astype(np.uint32)
    bits = (weights + np.float32(0.0)).view(np.uint32)  # -0.0 + 0.0 is 0.0
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    columns = np.arange(weights.shape[1], dtype=np.uint32)
    if weights.shape[1] <= 1 << 16 and not (bits & 0xFFFF).any():
        keys = (ascending & np.uint32(0xFFFF0000)) | columns
        keys.sort(axis=1)
        return keys & np.uint32(0xFFFF)
    wide = (ascending.astype(np.uint64) << np.uint64(32)) | columns
    wide.sort(axis=1)
    return wide.astype(np.uint32)


def _tables_by_bits(
    tables: NDArray[np.float64], lowest: int, min_bits: int, parent_bits: int
) -> dict[int, NDArray[np.float64]]:
    """Cut the tables of one row after the other into one array per width."""
    first = 1 << lowest
    return {
        bits: np.ascontiguousarray(tables[:, (1 << bits) - first : (2 << bits) - first])
        for bits in range(min_bits, parent_bits + 1)
    }
