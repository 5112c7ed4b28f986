"""What a block of a named model takes in memory, and what computing it again costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.hardware import Device
from models.kv_bytes import kv_token_bytes
from models.llm_parameters import count_parameters
from models.llm_shape import LatentAttentionShape, LlmShape
from models.prefix_costs import PrefillCost
from models.strict_tables import ScenarioError

WEIGHT_VALUE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """Memory and arithmetic of blocks.

    Attributes:
        prefill: Of the model on one device.
        block_tokens: Tokens of a block.
        token_bytes: Bytes of keys and values of one token, all layers.
    """

    prefill: PrefillCost
    block_tokens: int
    token_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_tokens * self.token_bytes

    def recompute_s(self, depth: int) -> float:
        """Seconds to compute the block at that depth again, its prefix being there."""
        return self.prefill.compute_s(self.block_tokens, depth * self.block_tokens)

    def saved_s(self, hit_tokens: NDArray[np.int64]) -> float:
        """Seconds of arithmetic that these leading tokens [n] of prompts would have cost."""
        lengths, counts = np.unique(hit_tokens, return_counts=True)
        return math.fsum(
            count * self.prefill.compute_s(length)
            for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
        )


def block_costs(
    shape: LlmShape,
    device: Device,
    *,
    mfu: float,
    block_tokens: int,
    token_bytes: int | None = None,
) -> BlockCosts:
    """Costs of a model's blocks on a device.

    Args:
        shape: The model; every layer is taken to keep and to see all tokens, as prefix caches
            of whole blocks do.
        device: Where it runs.
        mfu: Share of the device's peak that prefill reaches, 0 < mfu <= 1.
        block_tokens: Tokens of a block, >= 1.
        token_bytes: Bytes per token in the model's place, >= 1.

    Raises:
        ScenarioError: If a number is out of range, or the model caches nothing.
    """
    if not 0.0 < mfu <= 1.0:
        raise ScenarioError(f"--mfu: must be within 0..1, above 0, found {mfu:g}")
    if token_bytes is not None and token_bytes < 1:
        raise ScenarioError(f"--bytes-per-token: must be >= 1, found {token_bytes}")
    cached = kv_token_bytes(shape).inside if token_bytes is None else token_bytes
    if cached < 1:
        raise ScenarioError(f"--model: {shape.name} keeps no keys and values to cache")
    counts = count_parameters(shape)
    return BlockCosts(
        prefill=PrefillCost(
            parameters=counts.active,
            layers=len(shape.layers),
            heads=1,  # only their product with the head size bears on the cost
            head_dim=round(_attention_width(shape)),
            weight_bytes=counts.total * WEIGHT_VALUE_BYTES,
            flops_per_s=device.flops_per_s,
            mfu=mfu,
            memory_bytes_per_s=device.peak_bytes_per_s,
        ),
        block_tokens=block_tokens,
        token_bytes=cached,
    )


def _attention_width(shape: LlmShape) -> float:
    """d of the cost formula: heads * head size, mean over layers.

    Where queries and values differ in size (latent attention), their mean: a score costs the one,
    its product with the values the other.
    """
    widths = []
    for layer in shape.layers:
        attention = layer.attention
        if isinstance(attention, LatentAttentionShape):
            query = attention.nope_head_dim + attention.rope_head_dim
            widths.append(attention.num_heads * (query + attention.value_head_dim) / 2)
        else:
            widths.append(float(attention.num_heads * attention.head_dim))
    return sum(widths) / len(widths)
