"""What a step of a language model reads and computes: bytes and operations, no seconds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.kv_bytes import KvLayers, kv_layers
from models.llm_parameters import count_parameters, expert_parameters
from models.llm_shape import AttentionShape, LlmShape

FULL_BYTES = 2

Ints = NDArray[np.int64]


class StepCounts:
    """Bytes and operations of one model.

    Attributes:
        kv: Caching layers by equal cache.
        dense_bytes: Weight bytes at 16 bits, experts and input embedding left out.
        token_flops: Of every token, experts, output matrix and attention left out.
        output_flops: Of every token whose next token is asked for.
        expert_flops: Of one token in the routed experts of all layers.
    """

    def __init__(self, shape: LlmShape, *, kv_value_bytes: int = FULL_BYTES) -> None:
        """Count.

        Args:
            shape: The model.
            kv_value_bytes: Bytes per cached number.
        """
        self.kv: tuple[KvLayers, ...] = kv_layers(shape, value_bytes=kv_value_bytes)
        counts = count_parameters(shape)
        matrix = shape.vocab_size * shape.hidden_size
        # one matrix of the embeddings is read as the output matrix; the other is looked up
        read = counts.other - (0 if shape.is_tied else matrix)
        self.dense_bytes = FULL_BYTES * read
        self.token_flops = 2.0 * (read - matrix)
        self.output_flops = 2.0 * matrix
        self.expert_flops = 2.0 * sum(
            moe.experts_per_token * expert_parameters(moe, shape.hidden_size)
            for moe in shape.moe_layers
        )
        self._attention = _attention_flops(shape)

    def attention_flops(self, held: int, added: int) -> float:
        """Operations of attention for ``added`` tokens after ``held`` ones, all layers."""
        total = 0.0
        for pair_flops, window in self._attention:
            total += pair_flops * _pairs(held, added, window)
        return total

    def kv_read_bytes(self, held: Ints, added: Ints) -> float:
        """Bytes of cache that a step reads: every sequence its own, once a layer.

        Args:
            held: [n] tokens cached before the step.
            added: [n] tokens computed in it.
        """
        end = held + added
        total = 0.0
        for group in self.kv:
            seen = end
            if group.window_tokens is not None:
                seen = np.minimum(end, group.window_tokens - 1 + added)
            total += group.num_layers * group.token_bytes * float(seen.sum())
        return total


def _attention_flops(shape: LlmShape) -> list[tuple[float, int | None]]:
    """Operations per (query, key) pair of the layers, by window."""
    by_window: dict[int | None, float] = {}
    for layer in shape.layers:
        attention = layer.attention
        if isinstance(attention, AttentionShape):
            width = 2 * attention.head_dim  # scores and values
        else:  # latent attention with its projections absorbed into queries and outputs
            width = 2 * attention.kv_rank + attention.rope_head_dim
        flops = 2.0 * attention.num_heads * width
        by_window[attention.window_tokens] = by_window.get(attention.window_tokens, 0.0) + flops
    return [(flops, window) for window, flops in by_window.items()]


def _pairs(held: int, added: int, window: int | None) -> float:
    """(query, key) pairs of ``added`` tokens after ``held``: each sees itself and those before."""
    first, last = held + 1, held + added
    if window is None or last <= window:
        return 0.5 * added * (first + last)
    if first >= window:
        return float(added * window)
    inside = window - held
    return 0.5 * inside * (first + window) + (added - inside) * window
