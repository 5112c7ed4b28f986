"""Feed-forward parts: a dense one, and experts with what stands beside them."""

from __future__ import annotations

import torch

from models.llm_shape import Activation
from runtime.model.activations import gated, sigmoid
from runtime.model.experts import Experts
from runtime.model.linear import LinearLayer
from runtime.model.router import Router
from runtime.model.spec import ModelSpec, MoeSpec
from runtime.model.weights import Weights


class GatedMlp:
    """down(act(gate(x)) * up(x)), gate and up in one product.

    Args:
        weights: Names beginning with the part's own.
        hidden: H.
        width: Columns of the down matrix.
        activation: Of the gate.
        has_bias: Whether all three have biases.
    """

    def __init__(
        self,
        weights: Weights,
        hidden: int,
        width: int,
        activation: Activation,
        *,
        has_bias: bool = False,
    ) -> None:
        self._gate_up = weights.linear(
            ["gate_proj", "up_proj"], [width, width], hidden, has_bias=has_bias
        )
        self._down = weights.linear(["down_proj"], [hidden], width, has_bias=has_bias)
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] float32 -> [T, H]."""
        return self._down(gated(self._gate_up(x), self._activation))


class SparseMlp:
    """Router, routed experts, and the shared expert where there is one.

    Args:
        number: Of the layer.
        model: Its sizes.
        moe: Of the layer.
        weights: Of the layer.
    """

    def __init__(self, number: int, model: ModelSpec, moe: MoeSpec, weights: Weights) -> None:
        self._number = number
        self._router = Router(model, moe, weights)
        self._shared: GatedMlp | None = None
        self._shared_gate: LinearLayer | None = None
        if moe.shared_width:
            self._shared = GatedMlp(
                weights.under("mlp.shared_expert."),
                model.hidden,
                moe.shared_width,
                model.activation,
            )
            self._shared_gate = weights.linear(["mlp.shared_expert_gate"], [1], model.hidden)

    def __call__(
        self, x: torch.Tensor, experts: Experts, router_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, H] float32 -> [T, H]; the router sees ``router_input``, or ``x`` without it."""
        chosen, weights = self._router(x if router_input is None else router_input)
        out = experts(self._number, x, chosen, weights)
        if self._shared is not None and self._shared_gate is not None:
            out = out.add_(self._shared(x).mul_(sigmoid(self._shared_gate(x))))
        return out
