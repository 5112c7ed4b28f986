"""Tables that do not shrink the outputs: every quantized row keeps the gain of the exact one.

A cell's centroid lies inside the cell, so a clustered row is shorter than the exact one: its output
is the exact output times 1 - error, plus noise. The noise of many experts averages out; the
shrinking does not, it adds up over experts and layers. A row's table times

    alpha = w H w^T / w H w_q^T

makes the regression of the quantized output on the exact one have slope 1, for inputs of second
moment H. It costs no byte and no instruction; the squared error of a row grows by 1 / (1 - error).
What it is worth is measured in benchmarks/quality.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.nested_kmeans import NestedRows

SMALLEST_GAIN, LARGEST_GAIN = 0.5, 2.0

FloatArray = NDArray[np.float64]


def with_row_gain(
    weights: NDArray[np.floating], nested: NestedRows, moment: FloatArray | None
) -> NestedRows:
    """The same codes with tables of unit gain.

    Args:
        weights: [N, K] exact rows.
        nested: Their clustering.
        moment: [K, K] second moment H of the inputs, [K] its diagonal, None for the identity.

    Returns:
        Tables times alpha, row by row and width by width. A row whose gain cannot be told (no
        input reaches it, or alpha outside 0.5..2) keeps its table.
    """
    exact = np.asarray(weights, dtype=np.float64)
    reached = _reached(exact, moment)
    power = np.einsum("rk,rk->r", reached, exact)
    tables = {}
    for bits, table in nested.tables.items():
        shared = np.einsum("rk,rk->r", reached, nested.reconstruct(bits))
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = power / shared
        sure = (shared > 0.0) & (gain >= SMALLEST_GAIN) & (gain <= LARGEST_GAIN)
        tables[bits] = table * np.where(sure, gain, 1.0)[:, None]
    return NestedRows(nested.codes, tables)


def _reached(exact: FloatArray, moment: FloatArray | None) -> FloatArray:
    """w H, row by row; the product with a full H in float32."""
    if moment is None:
        return exact
    if moment.ndim == 1:
        return exact * moment
    product = exact.astype(np.float32) @ moment.astype(np.float32)
    return np.asarray(product, dtype=np.float64)
