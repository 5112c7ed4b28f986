"""One layer of the decoder, in the plain arrangement and in Gemma-4's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.model.activations import activate
from runtime.model.attention import Attention
from runtime.model.attention_block import AttentionBlock
from runtime.model.experts import Experts
from runtime.model.feed_forward import GatedMlp, SparseMlp
from runtime.model.norms import RmsNorm
from runtime.model.spec import ModelSpec
from runtime.model.weights import Weights

_NormMaker = Callable[[str], RmsNorm]


class DecoderLayer:
    """Attention and feed-forward, each added to the residual stream.

    Args:
        number: Of the layer.
        model: Its specification.
        weights: Names beginning with the layer's.
    """

    def __init__(self, number: int, model: ModelSpec, weights: Weights) -> None:
        self._weights, self._model = weights, model
        spec = model.layers[number]
        self._attention = AttentionBlock(number, model, spec.attention, weights)
        self._input_norm = self._norm("input_layernorm")
        self._after_attention = self._norm("post_attention_layernorm")
        self._mlp: GatedMlp | None = None
        if spec.mlp is not None:
            self._mlp = GatedMlp(
                weights.under("mlp."),
                model.hidden,
                spec.mlp.width,
                model.activation,
                has_bias=spec.mlp.has_bias,
            )
        self._sparse = None if spec.moe is None else SparseMlp(number, model, spec.moe, weights)
        self._sandwich: _Sandwich | None = None
        if model.sandwich_norms:
            self._sandwich = _Sandwich(self._norm, self._sparse is not None)
            self._scalar = float(weights.vector("layer_scalar", 1))
        self._layer_input: _LayerInput | None = None
        if model.layer_input_width:
            self._layer_input = _LayerInput(model, weights, self._norm("post_per_layer_input_norm"))

    def _norm(self, name: str) -> RmsNorm:
        weight = self._weights.vector(f"{name}.weight", self._model.hidden)
        return RmsNorm(weight, self._model.norm_epsilon)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
        experts: Experts | None,
        layer_input: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H] float32 -> [T, H], or [m, H] where only some rows are wanted.

        Args:
            x: The residual stream; written.
            rotary: The step's cosines and sines.
            attention: Keeps keys and values.
            experts: Of all layers; None in a model without.
            layer_input: [T, width], this layer's part of the per-layer embedding.
            rows: [m] int64, rows that are wanted of the result; None: all.
        """
        attended = self._attention(self._input_norm(x), rotary, attention)
        if rows is not None:
            x, attended = x[rows], attended[rows]
            layer_input = None if layer_input is None else layer_input[rows]
        if self._sandwich is None:
            x = x.add_(attended)
            return x.add_(self._feed_forward(self._after_attention(x), experts))
        x = x.add_(self._after_attention(attended))
        x = x.add_(self._gemma_feed_forward(x, experts, self._sandwich))
        if self._layer_input is not None and layer_input is not None:
            x = x.add_(self._layer_input(x, layer_input))
        return x.mul_(self._scalar)

    def _feed_forward(self, h: torch.Tensor, experts: Experts | None) -> torch.Tensor:
        if self._sparse is None:
            assert self._mlp is not None  # a layer has one or the other
            return self._mlp(h)
        return self._sparse(h, _given(experts))

    def _gemma_feed_forward(
        self, x: torch.Tensor, experts: Experts | None, norms: _Sandwich
    ) -> torch.Tensor:
        assert self._mlp is not None  # every layer of Gemma-4 has one
        out = self._mlp(norms.before(x))
        if self._sparse is not None:
            routed = self._sparse(norms.before_experts(x), _given(experts), x)
            out = norms.after_mlp(out).add_(norms.after_experts(routed))
        return norms.after(out)


def _given(experts: Experts | None) -> Experts:
    if experts is None:
        raise ValueError("experts: the model has routed experts, none were given")
    return experts


class _Sandwich:
    """Gemma-4's norms around the feed-forward parts."""

    def __init__(self, norm: _NormMaker, has_experts: bool) -> None:
        self.before = norm("pre_feedforward_layernorm")
        self.after = norm("post_feedforward_layernorm")
        if has_experts:
            self.after_mlp = norm("post_feedforward_layernorm_1")
            self.after_experts = norm("post_feedforward_layernorm_2")
            self.before_experts = norm("pre_feedforward_layernorm_2")


class _LayerInput:
    """Gates the per-layer embedding into the stream."""

    def __init__(self, model: ModelSpec, weights: Weights, norm: RmsNorm) -> None:
        width = model.layer_input_width
        self._activation = model.activation
        self._gate = weights.linear(["per_layer_input_gate"], [width], model.hidden)
        self._back = weights.linear(["per_layer_projection"], [model.hidden], width)
        self._norm = norm

    def __call__(self, x: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        inner = activate(self._gate(x), self._activation).mul_(layer_input)
        return self._norm(self._back(inner))
