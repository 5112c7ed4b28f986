"""Bytes of the key/value cache: per token, per sequence, in pages, and tokens that fit.

Layers with a sliding window keep their window's last tokens only, so a sequence grows by all
layers' bytes at first and by those of the layers without a window later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from models.llm_shape import LlmShape
from models.plane_bytes import DEFAULT_PAGE_BYTES, pages_of

BLOCK_TOKENS = 16
VALUE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayers:
    """Layers with the same cache.

    Attributes:
        num_layers: How many.
        token_bytes: Bytes per token and layer.
        window_tokens: Tokens that stay cached; None where all do.
    """

    num_layers: int
    token_bytes: int
    window_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTokenBytes:
    """What one more token of a sequence adds.

    Attributes:
        unbounded: In layers without a window: every token.
        windowed: In layers with one: only while the sequence is inside.
    """

    unbounded: int
    windowed: int

    @property
    def inside(self) -> int:
        """While the sequence is inside every window."""
        return self.unbounded + self.windowed


def kv_layers(shape: LlmShape, *, value_bytes: int = VALUE_BYTES) -> tuple[KvLayers, ...]:
    """The model's caching layers by equal cache, in order of first appearance.

    Args:
        shape: The model.
        value_bytes: Bytes per cached number, >= 1.

    Raises:
        ValueError: If ``value_bytes`` is below 1.
    """
    if value_bytes < 1:
        raise ValueError(f"value_bytes must be >= 1, found {value_bytes}")
    counts: Counter[tuple[int, int | None]] = Counter()
    for layer in shape.layers:
        if values := layer.attention.kv_values_per_token:
            counts[values * value_bytes, layer.attention.window_tokens] += 1
    return tuple(
        KvLayers(num_layers=count, token_bytes=token_bytes, window_tokens=window)
        for (token_bytes, window), count in counts.items()
    )


def kv_token_bytes(shape: LlmShape, *, value_bytes: int = VALUE_BYTES) -> KvTokenBytes:
    """Bytes that one more token of one sequence adds; arguments as for ``kv_layers``."""
    groups = kv_layers(shape, value_bytes=value_bytes)
    sums = {True: 0, False: 0}
    for group in groups:
        sums[group.window_tokens is None] += group.num_layers * group.token_bytes
    return KvTokenBytes(unbounded=sums[True], windowed=sums[False])


def kv_sequence_bytes(shape: LlmShape, tokens: int, *, value_bytes: int = VALUE_BYTES) -> int:
    """Bytes of one sequence's cache.

    Args:
        shape: The model.
        tokens: Length of the sequence, >= 0.
        value_bytes: Bytes per cached number, >= 1.

    Raises:
        ValueError: If an argument is out of range.
    """
    _require_not_negative("tokens", tokens)
    return sum(
        group.num_layers * group.token_bytes * _kept(tokens, group.window_tokens)
        for group in kv_layers(shape, value_bytes=value_bytes)
    )


def kv_tokens_in(
    shape: LlmShape, num_bytes: int, *, num_sequences: int = 1, value_bytes: int = VALUE_BYTES
) -> int | None:
    """Tokens of all sequences together that fit into ``num_bytes``.

    The sequences are equally long, up to one token: as long as they can be.

    Args:
        shape: The model.
        num_bytes: Memory for the cache, >= 0.
        num_sequences: Sequences that share it, >= 1.
        value_bytes: Bytes per cached number, >= 1.

    Returns:
        Tokens; None where there is no limit, because every layer has a window and all windows fit.

    Raises:
        ValueError: If an argument is out of range.
    """
    _require_not_negative("num_bytes", num_bytes)
    if num_sequences < 1:
        raise ValueError(f"num_sequences must be >= 1, found {num_sequences}")
    costs = [
        (group.num_layers * group.token_bytes, group.window_tokens)
        for group in kv_layers(shape, value_bytes=value_bytes)
    ]
    return _units_in(costs, num_bytes, num_sequences)


def kv_tokens_in_pages(
    shape: LlmShape,
    num_pages: int,
    *,
    num_sequences: int = 1,
    page_bytes: int = DEFAULT_PAGE_BYTES,
    block_tokens: int = BLOCK_TOKENS,
    value_bytes: int = VALUE_BYTES,
) -> int | None:
    """Tokens of all sequences together whose blocks fit into ``num_pages``.

    The sequences are equally long, up to one block. A window that does not end at the edge of a
    block takes one block more, so every window is given that one.

    Args:
        shape: The model.
        num_pages: Pages for the cache, >= 0.
        num_sequences: Sequences that share it, >= 1.
        page_bytes: A power of two, >= 1,024.
        block_tokens: Tokens of a block, >= 1.
        value_bytes: Bytes per cached number, >= 1.

    Returns:
        Tokens, a multiple of ``block_tokens``; None where there is no limit.

    Raises:
        ValueError: If an argument is out of range.
    """
    _require_not_negative("num_pages", num_pages)
    if num_sequences < 1:
        raise ValueError(f"num_sequences must be >= 1, found {num_sequences}")
    costs = []
    for group in kv_layers(shape, value_bytes=value_bytes):
        pages = kv_block_pages(group, page_bytes=page_bytes, block_tokens=block_tokens)
        window = group.window_tokens
        most = None if window is None else -(-(window - 1) // block_tokens) + 1
        costs.append((group.num_layers * pages, most))
    num_blocks = _units_in(costs, num_pages, num_sequences)
    return None if num_blocks is None else num_blocks * block_tokens


def kv_tokens_per_sequence(
    shape: LlmShape,
    num_pages: int,
    *,
    num_sequences: int,
    page_bytes: int = DEFAULT_PAGE_BYTES,
    block_tokens: int = BLOCK_TOKENS,
    value_bytes: int = VALUE_BYTES,
) -> int | None:
    """Tokens that each of ``num_sequences`` sequences can have, all of the same length.

    Arguments and errors as for ``kv_tokens_in_pages``, which also counts the blocks that are left
    when not every sequence can have one more.

    Returns:
        Tokens, a multiple of ``block_tokens``; 0 where not every sequence has a block; None where
        there is no limit.
    """
    tokens = kv_tokens_in_pages(
        shape,
        num_pages,
        num_sequences=num_sequences,
        page_bytes=page_bytes,
        block_tokens=block_tokens,
        value_bytes=value_bytes,
    )
    return None if tokens is None else tokens // block_tokens // num_sequences * block_tokens


def kv_growth_tokens(
    shape: LlmShape,
    num_pages: int,
    *,
    page_bytes: int = DEFAULT_PAGE_BYTES,
    block_tokens: int = BLOCK_TOKENS,
    value_bytes: int = VALUE_BYTES,
) -> int:
    """Tokens by which running sequences can grow with ``num_pages`` more.

    They are beyond their sliding windows; where every layer has a window, inside it.

    Args:
        shape: The model.
        num_pages: Pages given to the cache, >= 0.
        page_bytes: A power of two, >= 1,024.
        block_tokens: Tokens of a block, >= 1.
        value_bytes: Bytes per cached number, >= 1.

    Raises:
        ValueError: If an argument is out of range.
    """
    _require_not_negative("num_pages", num_pages)
    groups = kv_layers(shape, value_bytes=value_bytes)
    growing = [group for group in groups if group.window_tokens is None] or groups
    block_pages = sum(
        group.num_layers * kv_block_pages(group, page_bytes=page_bytes, block_tokens=block_tokens)
        for group in growing
    )
    return num_pages // block_pages * block_tokens


def kv_block_pages(
    group: KvLayers, *, page_bytes: int = DEFAULT_PAGE_BYTES, block_tokens: int = BLOCK_TOKENS
) -> int:
    """Pages of one block of tokens in one layer of the group.

    Args:
        group: Layers with the same cache.
        page_bytes: A power of two, >= 1,024.
        block_tokens: Tokens of a block, >= 1.

    Raises:
        ValueError: If an argument is out of range.
    """
    _require_block(block_tokens)
    return pages_of(group.token_bytes * block_tokens, page_bytes)


def kv_sequence_pages(
    shape: LlmShape,
    tokens: int,
    *,
    page_bytes: int = DEFAULT_PAGE_BYTES,
    block_tokens: int = BLOCK_TOKENS,
    value_bytes: int = VALUE_BYTES,
) -> int:
    """Pages of one sequence: its last block is kept whole, and so is the first one of a window.

    Args:
        shape: The model.
        tokens: Length of the sequence, >= 0.
        page_bytes: A power of two, >= 1,024.
        block_tokens: Tokens of a block, >= 1.
        value_bytes: Bytes per cached number, >= 1.

    Raises:
        ValueError: If an argument is out of range.
    """
    _require_not_negative("tokens", tokens)
    _require_block(block_tokens)
    total = 0
    for group in kv_layers(shape, value_bytes=value_bytes):
        first = (tokens - _kept(tokens, group.window_tokens)) // block_tokens
        num_blocks = -(-tokens // block_tokens) - first
        pages = kv_block_pages(group, page_bytes=page_bytes, block_tokens=block_tokens)
        total += group.num_layers * num_blocks * pages
    return total


def _units_in(
    costs: Sequence[tuple[int, int | None]], capacity: int, num_sequences: int
) -> int | None:
    """Units (tokens or blocks) of equally long sequences that fit.

    Args:
        costs: Per group of layers, what a unit costs and how many are kept at most.
        capacity: What all units may cost.
        num_sequences: Sequences.

    Returns:
        Units of all sequences; None without a limit.
    """
    length, left = 0, capacity
    for end in (*sorted({most for _, most in costs if most is not None}), None):
        unit_cost = sum(cost for cost, most in costs if most is None or most > length)
        if not unit_cost:
            return None
        fitting = left // unit_cost
        if end is None or fitting < (end - length) * num_sequences:
            return length * num_sequences + fitting
        left -= (end - length) * num_sequences * unit_cost
        length = end
    raise AssertionError("the last stretch has no end")


def _kept(tokens: int, window_tokens: int | None) -> int:
    return tokens if window_tokens is None else min(tokens, window_tokens)


def _require_not_negative(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must be >= 0, found {value}")


def _require_block(block_tokens: int) -> None:
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be >= 1, found {block_tokens}")
