"""Attention by torch over keys and values gathered from their pages, sequence by sequence.

Right for every model, device and type; the compiled attention of attention_cpu.py is measured and
tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from runtime.model.kv_cache import KvCache
from runtime.model.step import StepBatch


@dataclass(slots=True, eq=False)
class _Step:
    """A batch with what its layers share."""

    batch: StepBatch
    rows: NDArray[np.int32]  # [T, block_pages] pages of the block of every new token
    positions: NDArray[np.int64]  # [T]
    # of a number of tokens per page: page within the block and token within the page, [T] each
    places: dict[int, tuple[NDArray[np.int64], torch.Tensor]] = field(default_factory=dict)


class TorchAttention:
    """`runtime.model.attention.Attention` in torch."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._step: _Step | None = None
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}

    def begin(self, batch: StepBatch) -> None:
        """A step starts.

        Raises:
            ValueError: If a sequence has no pages for its new tokens.
        """
        require_room(self._cache, batch)
        positions = batch.positions
        blocks = positions // self._cache.layout.block_tokens
        rows = [
            self._cache.table(sequence)[blocks[first:stop]]
            for sequence, first, stop in zip(
                batch.sequences, batch.first[:-1], batch.first[1:], strict=True
            )
        ]
        self._step = _Step(batch, np.concatenate(rows), positions)

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor | None,
        values: torch.Tensor | None,
        *,
        scale: float,
    ) -> torch.Tensor:
        """See `runtime.model.attention.Attention`."""
        step = self._step
        if step is None:
            raise RuntimeError("attention of a step that has not begun")
        if keys is not None and values is not None:
            self._write(step, layer, keys, values)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        batch = step.batch
        for at, sequence in enumerate(batch.sequences):
            rows = slice(int(batch.first[at]), int(batch.first[at + 1]))
            out[rows] = self._attend(layer, sequence, queries[rows], int(batch.starts[at]), scale)
        return out.flatten(1)

    def _attend(
        self, layer: int, sequence: int, queries: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        """[count, heads, head_dim] of one sequence's new tokens."""
        layout = self._cache.layout
        count, heads, _ = queries.shape
        tokens, window = start + count, layout.kv(layer).window_tokens
        first = 0 if window is None else max(start + 1 - window, 0)
        per_page = layout.tokens_per_page[layer]
        pages = self._cache.page_table(layer, sequence)[first // per_page : -(-tokens // per_page)]
        stored = self._slots(layer)[self._index(pages)].flatten(0, 1)
        skipped = first % per_page
        both = stored[skipped : skipped + tokens - first].to(queries.dtype).permute(1, 2, 0, 3)
        groups = heads // layout.kv(layer).kv_heads
        keys, values = both.repeat_interleave(groups, 1) if groups > 1 else both
        mask = None
        if count > 1:
            at = torch.arange(start, tokens, device=queries.device)[:, None]
            seen = torch.arange(first, tokens, device=queries.device)[None]
            mask = seen <= at
            if window is not None:
                mask &= seen > at - window
        attended = scaled_dot_product_attention(
            queries.transpose(0, 1), keys, values, attn_mask=mask, scale=scale
        )
        return attended.transpose(0, 1)

    def _write(self, step: _Step, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        layout = self._cache.layout
        per_page = layout.tokens_per_page[layer]
        if per_page not in step.places:
            within = step.positions % layout.block_tokens
            step.places[per_page] = within // per_page, self._index(within % per_page)
        page, offset = step.places[per_page]
        pages = step.rows[np.arange(len(page)), layout.first_page[layer] + page]
        slots = self._slots(layer)
        slots[self._index(pages), offset] = torch.stack((keys, values), 1).to(slots.dtype)

    def _index(self, array: NDArray[np.int32] | NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._pages.device)

    @cached_property
    def _pages(self) -> torch.Tensor:
        """[pages, page_bytes] uint8: the arena."""
        array = self._cache.arena.buffer.array
        return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)

    def _slots(self, layer: int) -> torch.Tensor:
        """[pages, tokens_per_page, 2, kv_heads, head_dim]: the arena as pages of a layer."""
        layout = self._cache.layout
        kv, per_page = layout.kv(layer), layout.tokens_per_page[layer]
        key = per_page, kv.kv_heads, kv.head_dim
        if key not in self._views:
            numbers = self._pages.view(layout.dtype)
            used = numbers[:, : layout.used_page_bytes(layer) // layout.dtype.itemsize]
            self._views[key] = used.view(-1, per_page, 2, kv.kv_heads, kv.head_dim)
        return self._views[key]


def require_room(cache: KvCache, batch: StepBatch) -> None:
    """Refuse a step whose tokens have no pages or do not follow those held.

    Raises:
        ValueError: Naming the sequence.
    """
    stops = (batch.starts + batch.counts).tolist()
    for sequence, start, stop in zip(batch.sequences, batch.starts.tolist(), stops, strict=True):
        held, room = cache.tokens(sequence), cache.room_tokens(sequence)
        if start > held or stop > room:
            raise ValueError(
                f"sequence {sequence}: a step computes tokens {start} to {stop - 1}, "
                f"{held} are held and pages are there for {room}"
            )
