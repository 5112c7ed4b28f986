"""What single prompts do to the blocks: features, routing and damage from one prefill each.

These are the observations that prompt heads are fitted on; at run time only the features and the
routing are taken, both of which the prefill computes anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.prompt_heads import raw_features
from runtime.calibration_experts import ExpertsLayer
from runtime.calibration_pass import watched
from runtime.calibration_sums import activation_and_slope

FloatArray = NDArray[np.float64]
BlockArray = Callable[[int], NDArray[np.floating]]


@dataclass(frozen=True)
class PromptStatistics:
    """One row per prompt.

    Attributes:
        mean_input: [n, L H] mean router-side input of every MoE layer.
        routed_tokens: [n, L, E] tokens sent to each expert.
        gate_sum: [n, L, E] sum of g.
        squared_gate_sum: [n, L, E] sum of g^2.
        tokens: [n] prompt lengths.
        damage: [n, blocks] conditional damage D at the reference width; nan where no token of the
            prompt reached the expert, or where no reference was given.
    """

    mean_input: FloatArray
    routed_tokens: FloatArray
    gate_sum: FloatArray
    squared_gate_sum: FloatArray
    tokens: NDArray[np.int64]
    damage: FloatArray

    def raw_features(self) -> FloatArray:
        """[n, L H + L E + 1] features before the reduction to principal components."""
        shares = self.routed_tokens / np.maximum(self.routed_tokens.sum(2, keepdims=True), 1.0)
        return raw_features(self.mean_input, shares, self.tokens)


@torch.inference_mode()
def prompt_statistics(
    model: Any,
    layers: Sequence[ExpertsLayer],
    prompts: Sequence[torch.Tensor],
    *,
    weight_error: BlockArray | None = None,
    row_weight: BlockArray | None = None,
    progress: Callable[[int], None] = lambda prompt: None,
) -> PromptStatistics:
    """Run every prompt by itself and keep what it did to the expert layers.

    Args:
        model: A transformers causal language model at full precision.
        layers: All its expert layers.
        prompts: One [T] row of token ids per prompt, T >= 1.
        weight_error: Block id -> [N, K] weights minus their reconstruction at the reference width.
        row_weight: Block id -> [N] a_r.
        progress: Told every prompt that is done.

    Raises:
        ValueError: If only one of ``weight_error`` and ``row_weight`` is given.
    """
    if (weight_error is None) != (row_weight is None):
        raise ValueError("weight_error and row_weight must be given together")
    count, experts, hidden = layers[0].experts, len(layers), layers[0].hidden
    shape = (len(prompts), experts, count)
    routed, first, second = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    mean_input = np.zeros((len(prompts), experts, hidden))
    damage = np.full((*shape, 2), np.nan)
    row = 0

    def seen(
        i: int, x: torch.Tensor, index: torch.Tensor, gate: torch.Tensor, *_: torch.Tensor | None
    ) -> None:
        mean_input[row, i] = x.double().mean(0).numpy()
        flat, gates = index.flatten().numpy(), gate.flatten().double().numpy()
        routed[row, i] = np.bincount(flat, minlength=count)[:count]
        first[row, i] = np.bincount(flat, gates, count)[:count]
        second[row, i] = np.bincount(flat, gates**2, count)[:count]
        if weight_error is None or row_weight is None:
            return
        for e in np.unique(flat[flat < count]).tolist():
            token, position = torch.where(index == e)
            g2 = gate[token, position].float().square()
            if float(g2.sum()) == 0.0:
                continue
            inputs = x[token].float()
            z, u = (inputs @ layers[i].gate_up[e].float().T).chunk(2, dim=-1)
            inner = activation_and_slope(z, layers[i].activation)[0] * u
            for module, block_input in enumerate((inputs, inner)):
                block = (i * count + e) * 2 + module
                error = torch.from_numpy(np.asarray(weight_error(block), dtype=np.float32))
                a = torch.from_numpy(np.asarray(row_weight(block), dtype=np.float32))
                by_token = (block_input @ error.T).square() @ a
                damage[row, i, e, module] = float((g2 @ by_token) / g2.sum())

    model.eval()
    with watched(layers, seen, gradients=False):
        for row, prompt in enumerate(prompts):
            model(input_ids=prompt[None], use_cache=False)
            progress(row)
    return PromptStatistics(
        mean_input.reshape(len(prompts), -1),
        routed,
        first,
        second,
        np.array([len(p) for p in prompts], dtype=np.int64),
        damage.reshape(len(prompts), -1),
    )
