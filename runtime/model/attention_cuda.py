"""Attention by the CUDA kernels, straight from the pages of an arena in device memory.

FlashInfer and FlashAttention are not used: they read the pages of a layer from one array of equally
spaced blocks, and ours lie anywhere in an arena that weights and layers of other sizes share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cuda.load import Target
from kernels.cuda.paged_attention import AttentionKernels, AttentionShape, PackedTables
from runtime.model.attention_torch import require_room
from runtime.model.kernel_target import on_current_stream, pointer, target_of
from runtime.model.kv_cache import KvCache
from runtime.model.kv_layout import STORED_TYPES
from runtime.model.spec import ModelSpec
from runtime.model.step import StepBatch
from runtime.model.step_upload import StepUpload
from runtime.model.table_slots import TableSlots
from runtime.page_arena import TorchBuffer

TileLaunches = list[tuple[torch.Tensor, int, int, int]]


class CudaAttentionError(ValueError):
    """The kernels cannot do what a model needs; says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLimits:
    """What buffers at fixed addresses are made for.

    Attributes:
        max_sequences: Of a step.
        max_rows: New tokens of a step, rows that fill up a batch included.
        context_tokens: Of a sequence.
        heads: Query heads of every layer.
    """

    max_sequences: int
    max_rows: int
    context_tokens: int
    heads: tuple[int, ...]

    @classmethod
    def of(
        cls, spec: ModelSpec, *, max_sequences: int, prefill_tokens: int, context_tokens: int
    ) -> CudaLimits:
        """For steps of so many prompt tokens beside one token of every sequence."""
        return cls(
            max_sequences=max_sequences,
            max_rows=prefill_tokens + max_sequences,
            context_tokens=context_tokens,
            heads=tuple(layer.attention.heads for layer in spec.layers),
        )


class CudaAttention:
    """`runtime.model.attention.Attention` with `kernels.cuda.paged_attention`.

    A query's result does not depend on what else is in the step.

    Attributes:
        limits: As given.
        rows: [3, max_rows] int32: tokens, positions and slots of the step, where graphs read them.
    """

    def __init__(
        self,
        cache: KvCache,
        limits: CudaLimits,
        *,
        spare_pages: NDArray[np.int32] | None = None,
        schedule: int = 0,
        partial_bytes: int | None = None,
    ) -> None:
        """Make the buffers.

        Args:
            cache: Its arena must be a torch tensor: on a GPU, or in host memory, where the kernels
                are emulated.
            limits: Of a step.
            spare_pages: [block_pages] pages that rows which fill up a batch are written to.
            schedule: Order of execution under emulation.
            partial_bytes: Of partial results at most; None: the kernels' own choice.

        Raises:
            CudaAttentionError: If the arena is no tensor or a layer has a shape that is not built.
        """
        if not isinstance(cache.arena.buffer, TorchBuffer):
            raise CudaAttentionError("CUDA attention reads pages in device memory")
        pages: torch.Tensor = cache.arena.buffer.array
        layout = cache.layout
        self._cache, self.limits, self._device = cache, limits, pages.device
        self._target: Target = target_of(pages.device)
        self._kept: list[torch.Tensor] = []  # what kernels know by address alone
        self._slots = TableSlots(
            cache,
            slots=limits.max_sequences,
            max_blocks=-(-limits.context_tokens // layout.block_tokens) + 1,
            device=pages.device,
            spare_pages=spare_pages,
        )
        self._shapes = [self._shape(number) for number in range(len(layout.layers))]
        options = {} if partial_bytes is None else {"partial_bytes": partial_bytes}
        self._kernels = AttentionKernels(
            PackedTables(
                arena=pointer(pages, self._target),
                page_bytes=layout.page_bytes,
                tables=pointer(self._slots.tables, self._target),
                max_blocks=self._slots.max_blocks,
                block_pages=layout.block_pages,
                block_tokens=layout.block_tokens,
            ),
            max_heads=max(limits.heads),
            max_head_dim=max(shape.head_dim for shape in self._shapes),
            partials=self._partials,
            target=self._target,
            schedule=schedule,
            **options,
        )
        most = limits.max_rows
        self._tile_tokens = sorted({shape.tile_tokens(False) for shape in self._shapes})
        self._upload = StepUpload(most * (3 + 2 * len(self._tile_tokens)), pages.device)
        self.rows = self._upload.numbers[: 3 * most].view(3, most)
        one = torch.arange(most, dtype=torch.int32)
        self._singles = torch.stack((one, torch.ones_like(one)), 1).to(pages.device)
        self._tiles: dict[int, TileLaunches] = {}
        self._num_rows = self._chunks = 0
        self._is_single = False

    def begin(self, batch: StepBatch) -> None:
        """A step starts.

        Raises:
            ValueError: If a sequence has no pages for its new tokens, or the step is too large.
        """
        self._begin(batch, len(batch.tokens))

    def begin_padded(self, batch: StepBatch, rows: int) -> None:
        """A step of one token of every sequence, filled up to ``rows`` with rows of no sequence.

        All that kernels read then lies at fixed addresses, and launches depend on ``rows`` alone.

        Raises:
            ValueError: As for ``begin``.
        """
        self._begin(batch, rows)
        self._chunks = self._kernels.max_chunks

    def prepare(self) -> None:
        """Load all kernels."""
        for shape in self._shapes:
            self._kernels.prepare(shape)

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
        if len(queries) != self._num_rows:
            raise RuntimeError(f"{len(queries)} queries in a step of {self._num_rows} tokens")
        shape = self._shapes[layer]
        queries = _with_whole_tokens(queries)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        positions, slots = (self._pointer(self.rows[at]) for at in (1, 2))
        kind = STORED_TYPES[queries.dtype]
        with on_current_stream(self._device, self._target):
            if keys is not None and values is not None:
                keys, values = _with_whole_tokens(keys), _with_whole_tokens(values)
                self._kernels.write(
                    shape,
                    self._pointer(keys),
                    self._pointer(values),
                    positions,
                    slots,
                    num_tokens=self._num_rows,
                    new_type=STORED_TYPES[keys.dtype],
                    strides=(keys.stride(0), values.stride(0)),
                )
            self._kernels.attend(
                shape,
                self._pointer(queries),
                self._pointer(out),
                positions,
                slots,
                [
                    (self._pointer(tiles), count, first, tokens)
                    for tiles, count, first, tokens in self._launches(
                        shape.tile_tokens(self._is_single)
                    )
                ],
                query_type=kind,
                query_stride=queries.stride(0),
                scale=scale,
                is_single=self._is_single,
                chunks=self._chunks,
            )
        return out.flatten(1)

    def _begin(self, batch: StepBatch, rows: int) -> None:
        require_room(self._cache, batch)
        most, count = self.limits.max_rows, len(batch.tokens)
        if rows > most:
            raise ValueError(f"{rows} new tokens in a step, at most {most} may be")
        slots = self._slots.place(batch.sequences)
        numbers = np.zeros((3, most), np.int32)
        numbers[0, :count] = batch.tokens
        numbers[1, :count] = batch.positions
        numbers[2] = self._slots.spare
        numbers[2, :count] = np.repeat(slots, batch.counts)
        self._num_rows, self._tiles = rows, {}
        self._is_single = bool((batch.counts == 1).all())
        last = int(batch.positions.max(initial=0))
        self._chunks = last // self._kernels.chunk_keys + 1
        parts = [numbers.ravel()]
        lists: dict[int, NDArray[np.int32]] = {}
        if not self._is_single:
            for tokens in self._tile_tokens:
                lists[tokens] = _cut(batch.first, tokens)
                parts.append(lists[tokens].ravel())
        self._upload.write(np.concatenate(parts))
        at = 3 * most
        for tokens, tiles in lists.items():
            sent = self._upload.numbers[at : at + tiles.size].view(-1, 2)
            self._tiles[tokens] = self._sliced(sent, tiles)
            at += tiles.size

    def _launches(self, tile_tokens: int) -> TileLaunches:
        if not self._is_single:
            return self._tiles[tile_tokens]
        size = self._num_rows if self._chunks == 1 else self._kernels.partial_tokens
        launches: TileLaunches = []
        for begin in range(0, self._num_rows, size):
            count = min(size, self._num_rows - begin)
            launches.append((self._singles[begin:], count, begin, count))
        return launches

    def _sliced(self, sent: torch.Tensor, tiles: NDArray[np.int32]) -> TileLaunches:
        """Launches whose partial results have room."""
        size = len(tiles) if self._chunks == 1 else 0
        launches: TileLaunches = []
        begin = 0
        while begin < len(tiles):
            first = int(tiles[begin, 0])
            ends = tiles[begin:].sum(axis=1) - first  # tokens up to the end of every tile
            stop = begin + max(1, size or int((ends <= self._kernels.partial_tokens).sum()))
            stop = min(stop, len(tiles))
            launches.append((sent[begin:], stop - begin, first, int(ends[stop - begin - 1])))
            begin = stop
        return launches

    def _shape(self, layer: int) -> AttentionShape:
        layout = self._cache.layout
        kv = layout.kv(layer)
        try:
            return AttentionShape(
                heads=self.limits.heads[layer],
                kv_heads=kv.kv_heads,
                head_dim=kv.head_dim,
                stored=STORED_TYPES[layout.dtype],
                page_tokens=layout.tokens_per_page[layer],
                first_page=layout.first_page[layer],
                window_tokens=kv.window_tokens,
            )
        except ValueError as error:
            raise CudaAttentionError(f"layer {layer}: {error}") from error

    def _partials(self, size: int) -> object:
        kept = torch.zeros(size, dtype=torch.float32, device=self._device)
        self._kept.append(kept)
        return self._pointer(kept)

    def _pointer(self, tensor: torch.Tensor) -> object:
        return pointer(tensor, self._target)


def _with_whole_tokens(heads: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim] whose numbers of a token have no gaps; tokens may have."""
    is_whole = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if is_whole else heads.contiguous()


def _cut(first: Sequence[int] | NDArray[np.int64], tokens: int) -> NDArray[np.int32]:
    """[n, 2] first token and tokens of every tile: sequences cut into so many tokens each."""
    counts = np.diff(first)
    per = -(-counts // tokens)
    place = np.arange(per.sum()) - np.repeat(np.cumsum(per) - per, per)
    begin = np.repeat(np.asarray(first)[:-1], per) + place * tokens
    size = np.minimum(np.repeat(counts, per) - place * tokens, tokens)
    tiles: NDArray[np.int32] = np.stack((begin, size), 1).astype(np.int32)
    return tiles
