"""Block product without a C++ compiler: numba where it is installed, else plain numpy.

Slower than the compiled library by 5 to 50 times, and never taken silently. Tokens are multiplied
one at a time, so that here too a token's result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.blocks import ContiguousBlock
from kernels.reference import dequantize

FloatArray = NDArray[np.float32]
BlockProduct = Callable[[FloatArray, ContiguousBlock], FloatArray]


def numpy_product(x: FloatArray, block: ContiguousBlock) -> FloatArray:
    """y[T, N] = x[T, K] times the transposed weights; float32."""
    weights = dequantize(block.planes, block.table, block.bits, block.columns)
    with np.errstate(over="ignore", invalid="ignore"):
        rows = [weights @ token for token in x]
    return np.stack(rows) if rows else np.empty((0, block.rows), np.float32)


def numba_product(x: FloatArray, block: ContiguousBlock) -> FloatArray:
    """The same, a row at a time, without the whole matrix of weights."""
    y = np.empty((len(x), block.rows), np.float32)
    _numba_rows()(x, block.planes, block.table.astype(np.float32), block.bits, block.columns, y)
    return y


def numba_is_here() -> bool:
    """Whether numba can be imported."""
    try:
        import numba  # noqa: F401
    except Exception:  # a numba that does not fit its numpy raises anything
        return False
    return True


@cache
def _numba_rows() -> Any:
    import numba

    @numba.njit(nogil=True, fastmath={"reassoc", "contract"})
    def rows(x, planes, table, bits, columns, y):  # type: ignore[no-untyped-def] # pragma: no cover
        weights = np.empty(columns, np.float32)
        for row in range(planes.shape[1]):
            for word in range(planes.shape[2]):
                first = word * 32
                for k in range(first, min(first + 32, columns)):
                    code = 0
                    for plane in range(bits):
                        code = code << 1 | (planes[plane, row, word] >> (k - first)) & 1
                    weights[k] = table[row, code]
            for token in range(x.shape[0]):
                total = np.float32(0.0)
                for k in range(columns):
                    total += weights[k] * x[token, k]
                y[token, row] = total

    return rows


PRODUCTS: dict[str, BlockProduct] = {"numba": numba_product, "numpy": numpy_product}
