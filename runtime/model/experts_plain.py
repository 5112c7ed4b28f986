"""Routed experts with unquantized weights: by the compiled CPU kernel, or by torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.cpu.backend import backend
from kernels.cpu.plain_experts import PlainExperts, plain_moe_layer
from models.llm_shape import Activation
from runtime.model.activations import gated


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """All experts of a layer, float32 or bfloat16.

    gate_up: [E, 2 I, H], gate rows first.
    down: [E, H, I].
    """

    gate_up: torch.Tensor
    down: torch.Tensor


class TorchExperts:
    """`runtime.model.experts.Experts` by torch, tokens grouped by expert.

    Experts without tokens are not read; a token's experts are added in ascending order. bfloat16
    weights round what they multiply; sums stay float32.

    Args:
        layers: Experts of every layer that has some, by its number.
        activation: Of the gate.
    """

    def __init__(self, layers: Mapping[int, ExpertMatrices], activation: Activation) -> None:
        self._layers, self._activation = dict(layers), activation

    def __call__(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``runtime.model.experts.Experts``."""
        held = self._layers[layer]
        dtype = held.gate_up.dtype
        out = torch.zeros_like(hidden)
        flat, order = experts.flatten().sort(stable=True)
        tokens = order // experts.shape[1]
        gates = weights.flatten()[order]
        counts = torch.bincount(flat, minlength=len(held.gate_up)).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            rows = tokens[start : start + count]
            both = functional.linear(hidden[rows].to(dtype), held.gate_up[expert]).float()
            inner = gated(both, self._activation).to(dtype)
            result = functional.linear(inner, held.down[expert]).float()
            out.index_add_(0, rows, result.mul_(gates[start : start + count, None]))
            start += count
        return out


class KernelExperts:
    """`runtime.model.experts.Experts` by the compiled CPU kernel.

    A token's result has the same bits whatever tokens share the call; bfloat16 weights are widened
    exactly.

    Args:
        layers: Experts of every layer that has some, by its number.
        activation: Of the gate.
        threads: Of the kernel.
    """

    def __init__(
        self, layers: Mapping[int, PlainExperts], activation: Activation, *, threads: int = 1
    ) -> None:
        self._layers, self._activation, self._threads = dict(layers), activation, threads
        self._path = backend().name

    def __call__(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``runtime.model.experts.Experts``."""
        out = plain_moe_layer(
            hidden.contiguous().numpy(),
            experts.to(torch.int32).contiguous().numpy(),
            weights.contiguous().numpy(),
            self._layers[layer],
            self._activation,
            threads=self._threads,
            path=self._path,
        )
        return torch.from_numpy(out)
