"""Dense linear layers whose result for a row does not depend on the rows that share the call.

y[t, n] is one chain of fused multiply-adds over ascending k that starts from the bias: bit for bit
the same whatever T, N, the number of threads, and whether the weights were packed before. The
portable path rounds products before they are added; numba and numpy sum in an order of numpy's.
Weights are float32, or bfloat16 given as uint16 and widened exactly; all else is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.arrays import FloatArray, check_array, check_threads, output_array
from kernels.cpu.backend import Backend, backend
from kernels.cpu.library import MatrixArgument

PANEL_ROWS = 32  # source/linear.h
_CACHE_LINE_BYTES = 64
_TYPES = {
    np.dtype(np.float32): MatrixArgument.FLOAT32,
    np.dtype(np.uint16): MatrixArgument.BFLOAT16,
}
WeightArray = NDArray[Any]


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A weight matrix in the order in which the kernels read it; made once, at load time.

    Args:
        panels: [ceil(N / 32), K, 32], float32 or uint16 (bfloat16): 32 outputs side by side, in
            bfloat16 output i next to 16 + i; missing outputs of the last panel are 0.
        rows: N, outputs.
        columns: K, inputs.

    Raises:
        ValueError: If the array does not fit.
    """

    panels: WeightArray
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 1:
            raise ValueError(f"rows and columns must be >= 1: {self.rows}, {self.columns}")
        _check_type("panels", self.panels)
        shape = (-(-self.rows // PANEL_ROWS), self.columns, PANEL_ROWS)
        check_array("panels", self.panels, self.panels.dtype.type, shape)

    @classmethod
    def pack(cls, weight: WeightArray) -> PackedLinear:
        """Pack weights [N >= 1, K >= 1], float32 or uint16 (bfloat16); rows may have a stride.

        Raises:
            ValueError: If the array does not fit.
        """
        matrix = row_matrix("weight", weight)
        rows, columns = weight.shape
        shape = (-(-rows // PANEL_ROWS), columns, PANEL_ROWS)
        panels = _aligned_empty(shape, weight.dtype)
        library = backend().library
        if library is None:
            panels[...] = _panels_of(weight)
        else:
            library.handle.pack_matrix(matrix, panels.ctypes.data)
        return cls(panels, rows, columns)

    @property
    def bytes(self) -> int:
        """Bytes of the panels."""
        return int(self.panels.nbytes)

    @cached_property
    def argument(self) -> MatrixArgument:
        """What the library takes; valid as long as this object lives."""
        return MatrixArgument(
            data=self.panels.ctypes.data,
            rows=self.rows,
            columns=self.columns,
            row_stride=MatrixArgument.PANELS,
            type=_TYPES[self.panels.dtype],
        )

    def unpacked(self) -> WeightArray:
        """A copy as [N, K], of the type of the panels."""
        steps = self.panels
        if steps.dtype == np.uint16:
            steps = np.concatenate([steps[..., ::2], steps[..., 1::2]], axis=-1)
        rows = steps.transpose(0, 2, 1).reshape(-1, self.columns)
        return np.ascontiguousarray(rows[: self.rows])


def linear(
    x: FloatArray,
    weight: WeightArray | PackedLinear,
    bias: FloatArray | None = None,
    *,
    threads: int = 1,
    path: str | None = None,
    out: FloatArray | None = None,
) -> FloatArray:
    """y[t, n] = bias[n] + sum over k of x[t, k] * weight[n, k].

    Args:
        x: [T >= 0, K], float32, C-contiguous.
        weight: Packed, which is faster, or [N, K], float32 or uint16 (bfloat16), elements of a row
            next to each other.
        bias: [N], float32; None for 0.
        threads: Outputs are shared among this many, 1..256; compiled paths only.
        path: As in `kernels.cpu.backend`.
        out: [T, N], float32, C-contiguous, written and returned; None makes one. Not `x`.

    Returns:
        [T, N], float32.

    Raises:
        ValueError: If an array does not fit.
        MemoryError: If there is no memory for the packed inputs, or no thread can be started.
    """
    matrix = _matrix(weight)
    if x.ndim != 2 or x.shape[1] != matrix.columns:
        raise ValueError(f"x must be float32 [T, {matrix.columns}], found {list(x.shape)}")
    check_array("x", x, np.float32, x.shape)
    if bias is not None:
        check_array("bias", bias, np.float32, (matrix.rows,))
    chosen = backend(path)
    y = output_array(out, (len(x), matrix.rows))
    if out is not None and np.may_share_memory(out, x):
        raise ValueError("out must not share memory with x")
    check_threads(threads)
    if chosen.library is None:
        y[...] = plain_product(x, float_weights(weight), bias)
        return y
    failed = chosen.library.handle.linear(
        path_id(chosen),
        matrix,
        None if bias is None else bias.ctypes.data,
        x.ctypes.data,
        len(x),
        y.ctypes.data,
        threads,
    )
    if failed:
        raise MemoryError("no memory or no threads left")
    return y


def path_id(chosen: Backend) -> int:
    """Number of a compiled path in its library."""
    assert chosen.library is not None
    return chosen.library.path_ids[chosen.name]


def row_matrix(name: str, weight: WeightArray) -> MatrixArgument:
    """What the library takes for [N, K] weights in rows; valid as long as the array lives.

    Raises:
        ValueError: If they are no such thing.
    """
    if weight.ndim != 2 or min(weight.shape) < 1:
        raise ValueError(f"{name} must be [N >= 1, K >= 1], found {list(weight.shape)}")
    _check_type(name, weight)
    row_bytes, element_bytes = weight.strides
    size = weight.itemsize
    if element_bytes != size or row_bytes % size or row_bytes < 0 or not weight.flags.aligned:
        raise ValueError(f"{name} must have contiguous, aligned rows, found {weight.strides}")
    return MatrixArgument(
        data=weight.ctypes.data,
        rows=weight.shape[0],
        columns=weight.shape[1],
        row_stride=row_bytes // size,
        type=_TYPES[weight.dtype],
    )


def float_weights(weight: WeightArray | PackedLinear) -> FloatArray:
    """Weights [N, K] as float32."""
    rows = weight.unpacked() if isinstance(weight, PackedLinear) else weight
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows


def plain_product(x: FloatArray, weights: FloatArray, bias: FloatArray | None) -> FloatArray:
    """The product by numpy, a token at a time, so that tokens do not depend on each other."""
    with np.errstate(over="ignore", invalid="ignore"):
        rows = [weights @ token for token in x]
    y = np.stack(rows) if rows else np.empty((0, len(weights)), np.float32)
    return y if bias is None else y + bias


def _matrix(weight: WeightArray | PackedLinear) -> MatrixArgument:
    if isinstance(weight, PackedLinear):
        return weight.argument
    return row_matrix("weight", weight)


def _check_type(name: str, array: WeightArray) -> None:
    if array.dtype not in _TYPES:
        raise ValueError(f"{name} must be float32 or uint16 (bfloat16), found {array.dtype}")


def _panels_of(weight: WeightArray) -> WeightArray:
    rows, columns = weight.shape
    whole = np.zeros((-(-rows // PANEL_ROWS) * PANEL_ROWS, columns), weight.dtype)
    whole[:rows] = weight
    steps = whole.reshape(-1, PANEL_ROWS, columns).transpose(0, 2, 1)
    if weight.dtype == np.float32:
        return steps
    return np.stack([steps[..., :16], steps[..., 16:]], axis=-1).reshape(steps.shape)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> WeightArray:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _CACHE_LINE_BYTES, np.uint8)
    skip = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[skip : skip + size].view(dtype).reshape(shape)
