"""What Hugging Face checkpoints call expert matrices.

Per-expert matrices are ``...layers.{l}.mlp.experts.{e}.gate_proj.weight`` (Qwen, OLMoE) or
``...layers.{l}.block_sparse_moe.experts.{e}.w1.weight`` (Mixtral); fused ones hold all experts of
a layer, ``...layers.{l}.mlp.experts.gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I], in
Gemma-4 without ``mlp``.

Source:
    ``conversion_mapping.py`` and the modeling files of Hugging Face transformers 5.24.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Part = Literal["gate", "up", "down", "gate_up"]

MODEL_TYPES = ("gemma4", "gemma4_text", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")

_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
_NAME = re.compile(
    r"^(?:model\.|language_model\.)*layers\.(?P<layer>\d+)"
    r"\.(?:mlp\.|block_sparse_moe\.|moe\.)?experts"
    r"(?:\.(?P<expert>\d+))?\.(?P<part>\w+?)(?P<weight>\.weight)?$"
)
_PER_EXPERT: dict[str, Part] = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
_FUSED: dict[str, Part] = {"gate_up_proj": "gate_up", "down_proj": "down"}


@dataclass(frozen=True, slots=True)
class ExpertTensorName:
    """An expert matrix by its place; ``expert`` is None where one tensor holds them all."""

    layer: int
    expert: int | None
    part: Part


def is_expert_tensor(name: str) -> bool:
    """Whether a tensor belongs to routed experts (a shared expert is not one)."""
    return _EXPERTS.search(name) is not None


def parse_expert_tensor(name: str) -> ExpertTensorName | None:
    """Which matrix a tensor name means; None for an expert tensor of no known layout."""
    match = _NAME.match(name)
    if match is None:
        return None
    layer, part = int(match["layer"]), match["part"]
    if match["expert"] is not None:
        if part not in _PER_EXPERT or match["weight"] is None:
            return None
        return ExpertTensorName(layer, int(match["expert"]), _PER_EXPERT[part])
    if part not in _FUSED:
        return None
    return ExpertTensorName(layer, None, _FUSED[part])
