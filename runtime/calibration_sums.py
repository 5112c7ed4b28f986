"""Sums over routed tokens from which one layer's damage statistics follow, added up batch by batch.

Two ways to weigh a token. ``gate``: by the squared gate weight, errors carried to the MoE output
through activation and down matrix. ``gradient``: by the squared loss gradient at the block's
outputs, which holds gate, activation, down matrix and the layer's importance for that token at
once (the squared gradients of SqueezeLLM, arXiv 2306.07629, factored as in K-FAC, Martens and
Grosse, arXiv 1503.05671, into rows and inputs).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from models.quality import Activation, routed_mass
from runtime.calibration_experts import ExpertsLayer

Weighting = Literal["gate", "gradient"]
FloatArray = NDArray[np.float64]

_GELU_LINEAR = (2.0 / np.pi) ** 0.5
_GELU_CUBIC = 0.044715


def activation_and_slope(
    z: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """act(z) and d act/dz, elementwise."""
    if activation == "silu":
        sigmoid = torch.sigmoid(z)
        return z * sigmoid, sigmoid * (1.0 + z * (1.0 - sigmoid))
    tanh = torch.tanh(_GELU_LINEAR * (z + _GELU_CUBIC * z**3))
    inner_slope = _GELU_LINEAR * (1.0 + 3.0 * _GELU_CUBIC * z**2)
    half = 0.5 * (1.0 + tanh)
    return z * half, half + 0.5 * z * (1.0 - tanh**2) * inner_slope


def moment_bytes(columns: int, full: bool) -> int:
    """Bytes of one accumulated second moment, float64."""
    return 8 * columns * (columns if full else 1)


class LayerSums:
    """Accumulators of one layer; float64, products of a batch in the model's float32.

    Args:
        experts: The layer.
        weighting: How a token counts.
        max_full_columns: A block with more columns keeps the diagonal of its moment only.
    """

    def __init__(
        self, experts: ExpertsLayer, *, weighting: Weighting, max_full_columns: int
    ) -> None:
        self._experts = experts
        self._weighting = weighting
        count, hidden, inner = experts.experts, experts.hidden, experts.intermediate
        self.tokens = 0
        self.routed_tokens = np.zeros(count, dtype=np.int64)
        self.gate_sum = np.zeros(count)
        self.squared_gate_sum = np.zeros(count)
        self.output_square = 0.0
        self.gradient_square = 0.0
        self.gradient_tokens = 0
        self._is_full = (hidden <= max_full_columns, inner <= max_full_columns)
        self._moment_weight = np.zeros((count, 2))
        self._moments = tuple(
            torch.zeros((count, k, k) if full else (count, k), dtype=torch.float64)
            for k, full in zip((hidden, inner), self._is_full, strict=True)
        )
        self._row_sums = tuple(
            torch.zeros((count, rows), dtype=torch.float64) for rows in (2 * inner, hidden)
        )

    def add(
        self,
        inputs: torch.Tensor,
        expert_index: torch.Tensor,
        gate_weight: torch.Tensor,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> None:
        """Count one batch.

        Args:
            inputs: [T, H] what the experts read.
            expert_index: [T, k].
            gate_weight: [T, k].
            output: [T, H] sum of the experts' outputs.
            output_gradient: [T, H] d(summed loss)/d output; required for ``gradient``.

        Raises:
            ValueError: If gradients are required and absent.
        """
        if self._weighting == "gradient" and output_gradient is None:
            raise ValueError("weighting 'gradient' needs the gradient at the MoE output")
        self.tokens += len(inputs)
        self.output_square += float(output.double().square().sum())
        if output_gradient is not None:
            self.gradient_square += float(output_gradient.double().square().sum())
            self.gradient_tokens += len(inputs)
        for expert in torch.unique(expert_index).tolist():
            if expert >= self._experts.experts:  # padding of expert-parallel runs
                continue
            token, position = torch.where(expert_index == expert)
            gradient = None if output_gradient is None else output_gradient[token].float()
            gate = gate_weight[token, position].float()
            self._add_expert(expert, inputs[token].float(), gate, gradient)

    def _add_expert(
        self, e: int, x: torch.Tensor, gate: torch.Tensor, gradient: torch.Tensor | None
    ) -> None:
        self.routed_tokens[e] += len(x)
        self.gate_sum[e] += float(gate.double().sum())
        g2 = gate.double().square()
        self.squared_gate_sum[e] += float(g2.sum())
        z, u = (x @ self._experts.gate_up[e].float().T).chunk(2, dim=-1)
        act, slope = activation_and_slope(z, self._experts.activation)
        if self._weighting == "gate":
            weight = g2.float()
            rows = weight @ torch.cat([slope * u, act], dim=-1).square()
            self._row_sums[0][e] += rows
            self._add_moment(0, e, x, weight)
            self._add_moment(1, e, act * u, weight)
            return
        assert gradient is not None
        at_output = gate[:, None] * gradient
        at_inner = at_output @ self._experts.down[e].float()
        at_rows = torch.cat([at_inner * slope * u, at_inner * act], dim=-1).square()
        at_output = at_output.square()
        self._row_sums[0][e] += at_rows.sum(0)
        self._row_sums[1][e] += at_output.sum(0)
        self._add_moment(0, e, x, at_rows.sum(1))
        self._add_moment(1, e, act * u, at_output.sum(1))

    def _add_moment(self, module: int, e: int, x: torch.Tensor, weight: torch.Tensor) -> None:
        self._moment_weight[e, module] += float(weight.double().sum())
        if self._is_full[module]:
            self._moments[module][e] += (x * weight[:, None]).T @ x
        else:
            self._moments[module][e] += weight @ x.square()

    def scale(self) -> float:
        """c_l: mean squared gradient per output coordinate, or 1/E||y||^2 without gradients."""
        if self.gradient_tokens:
            return self.gradient_square / (self.gradient_tokens * self._experts.hidden)
        return self.tokens / self.output_square if self.output_square else 0.0

    def mass(self) -> FloatArray:
        """[E] M2 per token seen."""
        return routed_mass(self.squared_gate_sum, self.routed_tokens, self.tokens)

    def moment(self, module: int) -> FloatArray:
        """[E, K, K] or [E, K]: conditional second moments; 0 for an expert without tokens."""
        total = self._moment_weight[:, module]
        shape = (-1,) + (1,) * (self._moments[module].ndim - 1)
        safe = np.where(total > 0.0, total, 1.0).reshape(shape)
        return np.asarray(self._moments[module].numpy() / safe)

    def row_weight(self, module: int) -> FloatArray:
        """[E, N]: a_r, so that M2_e c_l sum_r a_r e_r H e_r^T is the block's damage."""
        g2 = np.where(self.squared_gate_sum > 0.0, self.squared_gate_sum, 1.0)[:, None]
        sums = self._row_sums[module].numpy()
        if self._weighting == "gradient":
            scale = self.scale()
            return np.asarray(sums / (g2 * scale)) if scale > 0.0 else np.zeros_like(sums)
        if module == 1:
            return np.ones_like(sums)
        column_norm = self._experts.down.double().square().sum(1).numpy()
        return np.asarray(sums / g2 * np.concatenate([column_norm, column_norm], axis=1))
