"""Plain numpy, in float64: what every other kernel is compared with.

Nothing here is fast. Sums run over float64 whatever the inputs are, so the reference's own error
is far below that of any float32 kernel. NaN and infinities pass through as numpy passes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kernels.planes import PlaneArray, check_planes, unpack_codes

Activation = Literal["silu", "gelu_tanh"]
FloatArray = NDArray[np.float64]
AnyFloat = NDArray[np.floating[Any]]
TableArray = NDArray[np.float16] | NDArray[np.float32] | NDArray[np.float64]


def dequantize(
    planes: PlaneArray, table: TableArray, bits: int, columns: int
) -> NDArray[np.float32]:
    """The weights a block has at ``bits`` bits.

    Args:
        planes: [>= bits, N, ceil(columns/32)], uint32, canonical; further planes are not read.
        table: [N, 2**bits], floating: the value of every code of every row.
        bits: 2..8 (1 is accepted).
        columns: K, weights in a row.

    Returns:
        [N, K], float32.

    Raises:
        ValueError: If shapes and dtypes do not fit each other.
    """
    check_planes(planes, bits, columns, lowest_bits=1)
    rows = planes.shape[1]
    if table.shape != (rows, 1 << bits) or table.dtype.kind != "f":
        raise ValueError(
            f"table of {bits} bits and {rows} rows must be floating [{rows}, {1 << bits}], "
            f"found {table.dtype} {list(table.shape)}"
        )
    codes = unpack_codes(planes[:bits], columns)
    return np.take_along_axis(table, codes.astype(np.intp), axis=1).astype(np.float32)


def block_matmul(
    x: AnyFloat, planes: PlaneArray, table: TableArray, bits: int, columns: int
) -> FloatArray:
    """y[t, n] = sum over k of x[t, k] * weights[n, k].

    Args:
        x: [T, K], floating.
        planes: As in `dequantize`.
        table: As in `dequantize`.
        bits: As in `dequantize`.
        columns: K.

    Returns:
        [T, N], float64.

    Raises:
        ValueError: If shapes and dtypes do not fit each other.
    """
    weights = dequantize(planes, table, bits, columns)
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"x must be [T, {columns}], found {list(x.shape)}")
    return _product(np.asarray(x, np.float64), np.asarray(weights, np.float64))


def silu(z: FloatArray) -> FloatArray:
    """z * sigmoid(z); NaN at minus infinity, as in torch."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(z / (1.0 + np.exp(-z)))


def gelu_tanh(z: FloatArray) -> FloatArray:
    """The tanh form of GELU.

    Source:
        D. Hendrycks and K. Gimpel, arXiv 1606.08415, section 2.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        inner = math.sqrt(2.0 / math.pi) * (z + 0.044715 * (z * z * z))
        return np.asarray(0.5 * z * (1.0 + np.tanh(inner)))


ACTIVATIONS: dict[str, Callable[[FloatArray], FloatArray]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
}


def moe_layer(
    tokens: AnyFloat,
    expert_index: NDArray[np.integer[Any]],
    gate_weight: AnyFloat,
    gate_up: Sequence[AnyFloat],
    down: Sequence[AnyFloat],
    activation: Activation,
    *,
    expert_scale: AnyFloat | None = None,
) -> FloatArray:
    """Sum over a token's experts of gate weight * down @ (act(gate @ x) * (up @ x)).

    Args:
        tokens: [T, H], floating.
        expert_index: [T, k], whole numbers in [0, E).
        gate_weight: [T, k], floating.
        gate_up: E matrices [2I, H], gate rows first; I may differ between experts.
        down: E matrices [H, I].
        activation: "silu" or "gelu_tanh".
        expert_scale: [E] extra factor of an expert's output, or None for 1.

    Returns:
        [T, H], float64; 0 for a token without experts (k = 0).

    Raises:
        ValueError: If shapes do not fit, an index is outside [0, E) or the activation is unknown.
    """
    _check_layer(tokens, expert_index, gate_weight, gate_up, down, activation, expert_scale)
    act = ACTIVATIONS[activation]
    x = np.asarray(tokens, np.float64)
    scale = np.ones(len(gate_up)) if expert_scale is None else np.asarray(expert_scale, np.float64)
    out = np.zeros(x.shape)
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        token_ids, slots = np.nonzero(expert_index == expert)
        if not len(token_ids):
            continue
        both = _product(x[token_ids], np.asarray(first, np.float64))
        gate, up = np.split(both, 2, axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            hidden = act(gate) * up
            weight = np.asarray(gate_weight[token_ids, slots], np.float64) * scale[expert]
            share = weight[:, None] * _product(hidden, np.asarray(second, np.float64))
            np.add.at(out, token_ids, share)
    return out


def _product(x: FloatArray, weights: FloatArray) -> FloatArray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x @ weights.T)


def _check_layer(
    tokens: AnyFloat,
    expert_index: NDArray[np.integer[Any]],
    gate_weight: AnyFloat,
    gate_up: Sequence[AnyFloat],
    down: Sequence[AnyFloat],
    activation: str,
    expert_scale: AnyFloat | None,
) -> None:
    experts = len(gate_up)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, found {activation!r}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [T, H], found {list(tokens.shape)}")
    count, hidden = tokens.shape
    if expert_index.ndim != 2 or len(expert_index) != count or expert_index.dtype.kind not in "iu":
        raise ValueError(
            f"expert_index must be whole numbers [{count}, k], "
            f"found {expert_index.dtype} {list(expert_index.shape)}"
        )
    if gate_weight.shape != expert_index.shape:
        raise ValueError(
            f"gate_weight must be {list(expert_index.shape)}, found {list(gate_weight.shape)}"
        )
    if expert_index.size and not (expert_index.min() >= 0 and expert_index.max() < experts):
        raise ValueError(
            f"expert_index must be in [0, {experts}), "
            f"found {expert_index.min()}..{expert_index.max()}"
        )
    if expert_scale is not None and expert_scale.shape != (experts,):
        raise ValueError(f"expert_scale must be [{experts}], found {list(expert_scale.shape)}")
    if len(down) != experts:
        raise ValueError(f"down must have {experts} matrices like gate_up, found {len(down)}")
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        inner = first.shape[0] // 2
        if first.shape != (2 * inner, hidden) or second.shape != (hidden, inner):
            raise ValueError(
                f"expert {expert}: gate_up [2I, {hidden}] and down [{hidden}, I] expected, "
                f"found {list(first.shape)} and {list(second.shape)}"
            )
