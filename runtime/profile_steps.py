"""Steps of a real model, timed: decode and prefill at any batch, context and width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from models.measurements import MIN_SECONDS
from models.plane_bytes import block_bytes
from runtime.engine.weight_pages import checkpoint_tables, weights_in_pages
from runtime.model.attention_cpu import attention_for
from runtime.model.experts import Experts
from runtime.model.kv_cache import KvCache
from runtime.model.kv_layout import KvLayout, default_page_bytes
from runtime.model.load import LoadedModel
from runtime.model.quantized_experts import QuantizedExperts
from runtime.model.step import StepBatch
from runtime.page_arena import PageArena
from runtime.page_movement import PageMover
from runtime.profile_clock import Clock, ProfileError
from runtime.profile_layers import LayerSeconds, TimedAttention, TimedExperts, timed_layers

PLAIN_BYTES: Final = 2
"""Of a plain weight: the twin counts at 16 bits, however they are stored."""
_SOURCE: Final = -1
"""Number of the sequence whose pages the others are copies of."""


@dataclass(frozen=True, slots=True, order=True)
class StepPoint:
    """What is to be measured.

    Attributes:
        sequences, added, held: Sequences, and of each the new tokens and those cached before.
        bits: Width of the experts; 0: as they are.
    """

    sequences: int
    added: int
    held: int
    bits: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of the step."""
        return self.sequences * self.added


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """What a step took; see ``models.engine_profile.StepMeasured``."""

    seconds: float
    attention_s: float
    experts_s: float
    attention_block_s: float
    ffn_s: float
    expert_bytes: float


class ModelSteps:
    """A loaded model with room for keys and values; runs one step as often as asked.

    Keys and values of the cached tokens are real: one sequence is prefilled, and its pages are
    copied to the others.

    Attributes:
        bits: Widths that can be asked for; ``(0,)`` where experts are not quantized.
        mover: Of quantized experts; None without.
        arena: Pages of weights and KV.
        cache: Of keys and values.
    """

    def __init__(
        self, model: LoadedModel, *, kv_tokens: int, held: int, threads: int, clock: Clock
    ) -> None:
        """Make an arena for all.

        Args:
            model: Loaded.
            kv_tokens: Most tokens of all sequences of a step.
            held: Most tokens of one that are cached before it.
            threads: Of kernels.
            clock: Seconds.
        """
        self._model, self._clock, self._threads = model, clock, threads
        layers = model.spec.kv_layers
        page_bytes = default_page_bytes(layers, model.dtype)
        layout = KvLayout(layers, model.dtype, page_bytes)
        blocks = -(-(kv_tokens + held) // layout.block_tokens) + 300
        pages = blocks * layout.block_pages
        checkpoint = model.checkpoint
        if checkpoint is not None:
            widest = checkpoint_tables(checkpoint, page_bytes).bytes_[:, -1]
            pages += int(widest.sum()) // page_bytes + len(widest)
        self.arena = PageArena(pages, page_bytes=page_bytes)
        self.cache = KvCache(self.arena, layout)
        self._attention = attention_for(self.cache, threads=threads)
        self._experts: Experts | None = model.experts
        self.mover: PageMover | None = None
        self.bits: tuple[int, ...] = (0,)
        self._block_bytes: dict[int, NDArray[np.float64]] = {}
        if checkpoint is not None:
            self.bits = checkpoint.levels
            widths = np.full(len(checkpoint.blocks), checkpoint.levels[-1], dtype=np.int64)
            self.mover = weights_in_pages(checkpoint, self.arena, widths)
            self._experts = QuantizedExperts(
                model.spec, self.arena, self.mover.tables, threads=threads
            )
            for bits in checkpoint.levels:
                sizes = [block_bytes(b.rows, b.columns, bits) for b in checkpoint.blocks]
                self._block_bytes[bits] = np.array(sizes, dtype=np.float64)
        self._random = np.random.default_rng(0)
        self._hold_source(held)

    @property
    def kv_value_bytes(self) -> int:
        """Bytes of a cached number."""
        return self._model.dtype.itemsize

    def run(self, point: StepPoint) -> StepSeconds:
        """One step; nothing is kept of it.

        Raises:
            ProfileError: If there are no pages for it.
        """
        if self.mover is not None and point.bits:
            # Planes and tables of all widths are resident, so a width is what kernels are told.
            self.mover.tables.bits[:] = point.bits
        numbers = tuple(range(point.sequences))
        try:
            for number in numbers:
                self._copy_of_source(number, point.held, point.added)
            batch = self._batch(numbers, point.held, point.added)
            return self._forward(batch, point.bits)
        finally:
            for number in set(numbers) & set(self.cache.sequences):
                self.cache.release(number)

    def close(self) -> None:
        """End the copy thread."""
        if self.mover is not None:
            self.mover.close()

    def _forward(self, batch: StepBatch, bits: int) -> StepSeconds:
        sums = LayerSeconds(chosen=[])
        experts = self._experts
        timed = None if experts is None else TimedExperts(experts, self._clock, sums)
        attention = TimedAttention(self._attention, self._clock, sums)
        with timed_layers(self._model.decoder, self._clock, sums):
            start_s = self._clock()
            self._model.decoder.forward(batch, attention, timed)
            seconds = self._clock() - start_s
        # A clock that has not ticked has seen its least time.
        return StepSeconds(
            seconds=max(seconds, MIN_SECONDS),
            attention_s=max(sums.attention_s, MIN_SECONDS),
            experts_s=max(sums.experts_s, MIN_SECONDS),
            attention_block_s=max(sums.attention_block_s, MIN_SECONDS),
            ffn_s=max(sums.ffn_s, MIN_SECONDS),
            expert_bytes=self._read_bytes(sums.chosen or [], bits),
        )

    def _read_bytes(self, chosen: list[tuple[int, torch.Tensor]], bits: int) -> float:
        """Bytes of the distinct experts of all layers."""
        spec, total = self._model.spec, 0.0
        first = {number: at for at, number in enumerate(spec.moe_layers)}
        for layer, experts in chosen:
            moe = spec.layers[layer].moe
            assert moe is not None  # its experts have been called
            distinct = np.unique(experts.numpy())
            if bits:
                at = 2 * (first[layer] * moe.experts + distinct)
                sizes = self._block_bytes[bits]
                total += float(sizes[at].sum() + sizes[at + 1].sum())
            else:
                total += PLAIN_BYTES * 3.0 * moe.width * spec.hidden * len(distinct)
        return total

    def _batch(self, numbers: tuple[int, ...], held: int, added: int) -> StepBatch:
        count = len(numbers)
        tokens = self._random.integers(0, self._model.spec.vocabulary, count * added)
        first = np.arange(count + 1, dtype=np.int64) * added
        return StepBatch(
            sequences=numbers,
            tokens=tokens.astype(np.int64),
            first=first,
            starts=np.full(count, held, dtype=np.int64),
            logit_rows=first[1:] - 1,
        )

    def _hold_source(self, held: int) -> None:
        """Prefill the sequence that others are copies of."""
        self.cache.add(_SOURCE)
        chunk = 256
        for start in range(0, held, chunk):
            added = min(chunk, held - start)
            self._grow(_SOURCE, added)
            batch = self._batch((_SOURCE,), start, added)
            self._model.decoder.forward(batch, self._attention, self._experts)
            self.cache.advance(_SOURCE, added)

    def _copy_of_source(self, number: int, held: int, added: int) -> None:
        self.cache.add(number)
        self._grow(number, held + added)
        blocks = -(-held // self.cache.layout.block_tokens)
        pages = self.arena.buffer.array
        source = self.cache.table(_SOURCE)[:blocks].ravel()
        there = source >= 0  # what a window has left behind is not read either
        pages[self.cache.table(number)[:blocks].ravel()[there]] = pages[source[there]]
        self.cache.set_tokens(number, held)

    def _grow(self, number: int, added: int) -> None:
        if not self.cache.grow(number, added):
            raise ProfileError(f"memory: no pages for {added:,} more tokens of a sequence")
