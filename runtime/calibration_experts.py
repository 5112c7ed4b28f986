"""The expert layers of a transformers model: where they are, what they hold, what is refused.

transformers >= 5 keeps the experts of a layer in one module with two stacked parameters,
gate_up_proj [E, 2I, H] (gate rows first) and down_proj [E, H, I], called with the tokens, the
chosen experts and their gate weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from models.quality import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class UnsupportedModelError(ValueError):
    """A model whose experts cannot be calibrated; says which module and why."""


@dataclass(frozen=True)
class ExpertsLayer:
    """The experts of one decoder layer.

    Attributes:
        layer: Number among the MoE layers, from 0: the l of block ids.
        decoder_layer: Number of the decoder layer in the model.
        name: Name of the experts module.
        module: The module, called with (hidden_states, top_k_index, top_k_weights).
        activation: Activation of the gate rows.
    """

    layer: int
    decoder_layer: int
    name: str
    module: torch.nn.Module
    activation: Activation

    @property
    def gate_up(self) -> torch.Tensor:
        """[E, 2I, H], gate rows first."""
        return self._parameter("gate_up_proj")

    @property
    def down(self) -> torch.Tensor:
        """[E, H, I]."""
        return self._parameter("down_proj")

    def _parameter(self, name: str) -> torch.Tensor:
        parameter = getattr(self.module, name)
        assert isinstance(parameter, torch.Tensor)
        return parameter.detach()

    @property
    def experts(self) -> int:
        """E."""
        return int(self.gate_up.shape[0])

    @property
    def hidden(self) -> int:
        """H: columns of gate_up."""
        return int(self.gate_up.shape[2])

    @property
    def intermediate(self) -> int:
        """I: columns of down."""
        return int(self.down.shape[2])


def find_experts(model: torch.nn.Module) -> tuple[ExpertsLayer, ...]:
    """All expert layers of a model, by decoder layer.

    Raises:
        UnsupportedModelError: If there is none, or one has biases, transposed or interleaved
            weights, other shapes, or an activation that is not supported.
    """
    found = []
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            parameter = module.gate_up_proj
            if isinstance(parameter, torch.Tensor) and parameter.ndim == 3:
                found.append((name, module))
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no module with stacked gate_up_proj [E, 2I, H] and "
            "down_proj [E, H, I]: not a mixture of experts of a known form"
        )
    numbered = sorted((_decoder_layer(name), name, module) for name, module in found)
    layers = tuple(
        ExpertsLayer(i, decoder_layer, name, module, _checked(name, module, model))
        for i, (decoder_layer, name, module) in enumerate(numbered)
    )
    for experts in layers[1:]:
        if experts.gate_up.shape != layers[0].gate_up.shape:
            raise UnsupportedModelError(
                f"{experts.name}: gate_up_proj {tuple(experts.gate_up.shape)} differs from "
                f"{layers[0].name}'s {tuple(layers[0].gate_up.shape)}"
            )
    return layers


def _decoder_layer(name: str) -> int:
    match = _LAYER.search(name)
    if match is None:
        raise UnsupportedModelError(f"{name}: no layer number in the name of an experts module")
    return int(match.group(1))


def _checked(name: str, module: Any, model: Any) -> Activation:
    for attribute, allowed in (
        ("has_bias", False),
        ("is_transposed", False),
        ("is_concatenated", True),
        ("has_gate", True),
    ):
        value = getattr(module, attribute, allowed)
        if value != allowed:
            raise UnsupportedModelError(f"{name}: {attribute} is {value}, must be {allowed}")
    experts, rows, hidden = module.gate_up_proj.shape
    if tuple(module.down_proj.shape) != (experts, hidden, rows // 2) or rows % 2:
        raise UnsupportedModelError(
            f"{name}: gate_up_proj {tuple(module.gate_up_proj.shape)} and down_proj "
            f"{tuple(module.down_proj.shape)} are not [E, 2I, H] and [E, H, I]"
        )
    config = getattr(model.config, "text_config", None) or model.config
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{name}: activation {activation!r}, must be one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[activation]
