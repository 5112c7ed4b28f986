"""A mixture-of-experts layer with float32 or bfloat16 experts, in one call.

Tokens are sorted by expert and every expert that has some is read once. A token's result is bit
for bit the same whatever other tokens share the call and whatever the number of threads: products
as in `kernels.cpu.linear`, experts added in ascending order of their index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.arrays import FloatArray, check_threads, output_array
from kernels.cpu.backend import backend
from kernels.cpu.library import MatrixArgument
from kernels.cpu.linear import (
    PackedLinear,
    WeightArray,
    float_weights,
    path_id,
    plain_product,
    row_matrix,
)
from kernels.cpu.matmul import ACTIVATION_IDS, check_routing
from kernels.reference import ACTIVATIONS, Activation


@dataclass(frozen=True, eq=False)
class PlainExperts:
    """The experts of one layer.

    Args:
        gate_up: E >= 1 matrices [2I, H], gate rows first: packed, or float32 or uint16 (bfloat16)
            with elements of a row next to each other. An array [E, 2I, H] is such a sequence.
        down: E matrices [H, I].

    Raises:
        ValueError: If a matrix does not fit.
    """

    gate_up: Sequence[WeightArray | PackedLinear] | WeightArray
    down: Sequence[WeightArray | PackedLinear] | WeightArray

    def __post_init__(self) -> None:
        if len(self.gate_up) != len(self.down) or not len(self.down):
            raise ValueError(
                "gate_up and down must have one matrix per expert and at least one, found "
                f"{len(self.gate_up)} and {len(self.down)}"
            )
        matrices = self.argument
        hidden, inner = self.hidden, self.inner
        for i, matrix in enumerate(matrices):
            shape = [hidden, inner] if i % 2 else [2 * inner, hidden]
            if [matrix.rows, matrix.columns] != shape:
                name = "down" if i % 2 else "gate_up"
                raise ValueError(
                    f"{name}[{i // 2}] must be {shape}, found {[matrix.rows, matrix.columns]}"
                )

    @classmethod
    def pack(cls, gate_up: Sequence[WeightArray], down: Sequence[WeightArray]) -> PlainExperts:
        """Pack every matrix; the originals are not needed afterwards.

        Raises:
            ValueError: If a matrix does not fit.
        """
        return cls([PackedLinear.pack(w) for w in gate_up], [PackedLinear.pack(w) for w in down])

    @property
    def experts(self) -> int:
        """E."""
        return len(self.down)

    @property
    def hidden(self) -> int:
        """H, the width of a token."""
        return int(self.argument[0].columns)

    @property
    def inner(self) -> int:
        """I, the width between the two matrices."""
        return int(self.argument[1].columns)

    @cached_property
    def argument(self) -> Any:
        """What the library takes; valid as long as this object lives."""
        matrices = []
        for expert, pair in enumerate(zip(self.gate_up, self.down, strict=True)):
            for name, weight in zip(("gate_up", "down"), pair, strict=True):
                if isinstance(weight, PackedLinear):
                    matrices.append(weight.argument)
                else:
                    matrices.append(row_matrix(f"{name}[{expert}]", weight))
        return (MatrixArgument * len(matrices))(*matrices)


def plain_moe_layer(
    tokens: FloatArray,
    expert_index: NDArray[np.int32],
    gate_weight: FloatArray,
    experts: PlainExperts,
    activation: Activation,
    *,
    expert_scale: FloatArray | None = None,
    threads: int = 1,
    path: str | None = None,
    out: FloatArray | None = None,
) -> FloatArray:
    """Sum over a token's experts of gate weight * down @ (act(gate @ x) * (up @ x)).

    Args:
        tokens: [T >= 0, H], float32, C-contiguous.
        expert_index: [T, k], int32, C-contiguous, in [0, E).
        gate_weight: [T, k], float32, C-contiguous.
        experts: The layer's weights; experts without tokens are not read.
        activation: "silu" or "gelu_tanh".
        expert_scale: [E], float32, extra factor of an expert's output; None for 1.
        threads: Outputs are shared among this many, 1..256; compiled paths only.
        path: As in `kernels.cpu.backend`.
        out: [T, H], float32, C-contiguous, written and returned; None makes one. Not `tokens`.

    Returns:
        [T, H], float32.

    Raises:
        ValueError: If an array or index does not fit.
        MemoryError: If there is no memory for intermediate results, or no thread can be started.
    """
    check_routing(
        tokens,
        expert_index,
        gate_weight,
        experts.experts,
        experts.hidden,
        activation,
        expert_scale,
    )
    chosen = backend(path)
    y = output_array(out, tokens.shape)
    if np.may_share_memory(y, tokens):
        raise ValueError("out must not share memory with tokens")
    check_threads(threads)
    if chosen.library is None:
        return _layer_by_experts(
            tokens, expert_index, gate_weight, experts, activation, expert_scale, y
        )
    failed = chosen.library.handle.plain_moe_layer(
        path_id(chosen),
        experts.argument,
        experts.experts,
        experts.hidden,
        experts.inner,
        ACTIVATION_IDS[activation],
        tokens.ctypes.data,
        len(tokens),
        expert_index.shape[1],
        expert_index.ctypes.data,
        gate_weight.ctypes.data,
        None if expert_scale is None else expert_scale.ctypes.data,
        y.ctypes.data,
        threads,
    )
    if failed:
        raise MemoryError("no memory or no threads left")
    return y


def _layer_by_experts(
    tokens: FloatArray,
    expert_index: NDArray[np.int32],
    gate_weight: FloatArray,
    experts: PlainExperts,
    activation: Activation,
    expert_scale: FloatArray | None,
    out: FloatArray,
) -> FloatArray:
    act = ACTIVATIONS[activation]
    out[...] = 0
    for expert in range(experts.experts):
        token_ids, positions = np.nonzero(expert_index == expert)
        if not len(token_ids):
            continue
        both = plain_product(tokens[token_ids], float_weights(experts.gate_up[expert]), None)
        gate, up = np.split(both.astype(np.float64), 2, axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            hidden = (act(gate) * up).astype(np.float32)
            result = plain_product(hidden, float_weights(experts.down[expert]), None)
            weight = gate_weight[token_ids, positions]
            if expert_scale is not None:
                weight = weight * expert_scale[expert]
            np.add.at(out, token_ids, weight[:, None] * result)
    return out
