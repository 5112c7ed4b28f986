"""Weighted squared errors of quantized rows at every width, in one pass over their codes."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.quantize_settings import QuantizeSettings

FloatArray = NDArray[np.float64]


def diagonal_errors(
    weights: NDArray[np.float32],
    codes: NDArray[np.uint8],
    tables: NDArray[np.float16],
    settings: QuantizeSettings,
    moment: FloatArray | None,
) -> FloatArray:
    """sum_k h_k (w_rk - w'_rk)^2: [N, levels].

    Args:
        weights: [N, K].
        codes: [N, K], the parent's codes.
        tables: [N, sum of 2**q], the tables of all levels side by side.
        settings: Bit widths.
        moment: [K] h; None for ones.
    """
    rows, columns = weights.shape
    result = np.zeros((rows, len(settings.levels)))
    h = np.ones(columns) if moment is None else np.ascontiguousarray(moment, dtype=np.float64)
    _diagonal_errors(
        weights,
        codes,
        tables.astype(np.float32),
        settings.parent_bits,
        settings.min_bits,
        h,
        result,
    )
    return result


def full_errors(
    weights: NDArray[np.float32],
    codes: NDArray[np.uint8],
    tables: NDArray[np.float16],
    settings: QuantizeSettings,
    moment: FloatArray,
) -> FloatArray:
    """d_r H d_r^T with d = w - w': [N, levels]; products in float32, sums in float64.

    Args:
        weights: [N, K].
        codes: [N, K], the parent's codes.
        tables: [N, sum of 2**q], the tables of all levels side by side.
        settings: Bit widths.
        moment: [K, K] H.
    """
    result = np.empty((len(weights), len(settings.levels)))
    h = moment.astype(np.float32)
    first = 0
    for level, bits in enumerate(settings.levels):
        table = tables[:, first : first + (1 << bits)].astype(np.float32)
        cells = (codes >> (settings.parent_bits - bits)).astype(np.intp)
        error = weights - np.take_along_axis(table, cells, axis=1)
        result[:, level] = np.einsum("rk,rk->r", error @ h, error, dtype=np.float64)
        first += 1 << bits
    return result


@njit(nogil=True, cache=True, error_model="numpy")
def _diagonal_errors(
    weights: NDArray[np.float32],
    codes: NDArray[np.uint8],
    tables: NDArray[np.float32],
    parent_bits: int,
    min_bits: int,
    h: FloatArray,
    result: FloatArray,
) -> None:
    for row in range(weights.shape[0]):
        first = 0
        for level in range(parent_bits - min_bits + 1):
            shift = parent_bits - min_bits - level
            total = 0.0
            for k in range(weights.shape[1]):
                cell = first + (codes[row, k] >> shift)
                error = np.float64(weights[row, k]) - np.float64(tables[row, cell])
                total += h[k] * error * error
            result[row, level] = total
            first += 1 << (min_bits + level)
