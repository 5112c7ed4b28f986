"""Pages the KV cache will need soon: what running sequences grow by, and admitted prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.kv_bytes import BLOCK_TOKENS, KvLayers, kv_block_pages
from models.plane_bytes import DEFAULT_PAGE_BYTES

HORIZON_STEPS = 64

Ints = NDArray[np.int64]


def forecast_kv_pages(
    layers: Sequence[KvLayers],
    *,
    held_tokens: Ints,
    prompt_tokens_left: Ints,
    decode_tokens_left: Ints,
    horizon_steps: int = HORIZON_STEPS,
    tokens_per_step: int = 1,
    page_bytes: int = DEFAULT_PAGE_BYTES,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Pages to be taken within the horizon, beyond those held now.

    An admitted prompt needs all its pages; decoding adds ``tokens_per_step`` tokens a step.

    Args:
        layers: The model's caching layers, as of ``models.kv_bytes.kv_layers``.
        held_tokens: [num_sequences] tokens whose KV is held now, >= 0.
        prompt_tokens_left: [num_sequences] tokens of the prompt still to be computed, >= 0.
        decode_tokens_left: [num_sequences] most tokens still to be decoded, >= 0.
        horizon_steps: h, >= 0.
        tokens_per_step: Tokens a decoded sequence gains per step, >= 1.
        page_bytes: Bytes of a page.
        block_tokens: Tokens of a KV block.

    Raises:
        ValueError: If the arrays differ in length or a count is negative.
    """
    counts = (held_tokens, prompt_tokens_left, decode_tokens_left)
    if len({len(array) for array in counts}) > 1 or any((array < 0).any() for array in counts):
        raise ValueError(
            "held_tokens, prompt_tokens_left and decode_tokens_left must be >= 0 and equally many"
        )
    decoded = np.minimum(decode_tokens_left, horizon_steps * tokens_per_step)
    grown = held_tokens + prompt_tokens_left + decoded
    total = 0
    for group in layers:
        pages = kv_block_pages(group, page_bytes=page_bytes, block_tokens=block_tokens)
        more = _peak_blocks(grown, group, block_tokens) - _blocks(held_tokens, group, block_tokens)
        total += group.num_layers * pages * int(np.maximum(more, 0).sum())
    return total


def _blocks(tokens: Ints, group: KvLayers, block_tokens: int) -> Ints:
    """Blocks of a sequence now; the first one of a window is kept whole."""
    left_behind = 0 if group.window_tokens is None else tokens - group.window_tokens
    blocks: Ints = -(-tokens // block_tokens) - np.maximum(left_behind, 0) // block_tokens
    return blocks


def _peak_blocks(tokens: Ints, group: KvLayers, block_tokens: int) -> Ints:
    """Most blocks on the way to ``tokens``: a sliding window may touch one block more."""
    blocks: Ints = -(-tokens // block_tokens)
    if group.window_tokens is not None:
        np.minimum(blocks, -(-(group.window_tokens - 1) // block_tokens) + 1, out=blocks)
    return blocks
