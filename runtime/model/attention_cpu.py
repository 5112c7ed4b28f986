"""Attention by the compiled kernels, straight from the pages of an arena in host memory."""

from __future__ import annotations

from typing import get_args

import torch

from kernels.cpu.attention import AttentionLayer, StoredType, TokenPages, paged_attention
from kernels.cpu.backend import backend
from runtime.model.attention import Attention
from runtime.model.attention_cuda import CudaAttention, CudaLimits
from runtime.model.attention_torch import TorchAttention, require_room
from runtime.model.kv_cache import KvCache
from runtime.model.kv_layout import STORED_TYPES
from runtime.model.step import StepBatch
from runtime.page_arena import HostBuffer, TorchBuffer

_STORED: dict[torch.dtype, StoredType] = {
    dtype: stored
    for dtype, name in STORED_TYPES.items()
    for stored in get_args(StoredType)
    if stored == name
}


class CpuAttention:
    """`runtime.model.attention.Attention` with `kernels.cpu.paged_attention`.

    A query's result does not depend on what else is in the step.
    """

    def __init__(self, cache: KvCache, *, threads: int = 1, path: str | None = None) -> None:
        """Attend with one of the compiled paths.

        Args:
            cache: Its arena must lie in host memory.
            threads: That share the work of a layer.
            path: As in `kernels.cpu.backend`.

        Raises:
            ValueError: If the arena is elsewhere or there is no such path.
        """
        if not isinstance(cache.arena.buffer, HostBuffer):
            raise ValueError("compiled attention reads pages in host memory")
        chosen = backend(path)
        if chosen.library is None:
            raise ValueError(f"attention needs a compiled path, found {chosen}")
        self._cache, self._arena = cache, cache.arena.buffer.array
        self._threads, self._path = threads, chosen.name
        self._layers: dict[tuple[int, int], AttentionLayer] = {}
        self._pages: TokenPages | None = None

    def begin(self, batch: StepBatch) -> None:
        """A step starts.

        Raises:
            ValueError: If a sequence has no pages for its new tokens.
        """
        require_room(self._cache, batch)
        self._pages = TokenPages(
            self._arena,
            block_tokens=self._cache.layout.block_tokens,
            tables=[self._cache.table(sequence) for sequence in batch.sequences],
            first=batch.first,
            starts=batch.starts,
        )

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
        if self._pages is None:
            raise RuntimeError("attention of a step that has not begun")
        found = paged_attention(
            queries.float().contiguous().numpy(),
            self._layer(layer, queries.shape[1]),
            self._pages,
            scale=scale,
            keys=None if keys is None else keys.float().contiguous().numpy(),
            values=None if values is None else values.float().contiguous().numpy(),
            threads=self._threads,
            path=self._path,
        )
        return torch.from_numpy(found).to(queries.dtype)

    def _layer(self, layer: int, heads: int) -> AttentionLayer:
        if (layer, heads) not in self._layers:
            layout = self._cache.layout
            kv = layout.kv(layer)
            self._layers[layer, heads] = AttentionLayer(
                heads=heads,
                kv_heads=kv.kv_heads,
                head_dim=kv.head_dim,
                tokens_per_page=layout.tokens_per_page[layer],
                first_page=layout.first_page[layer],
                window_tokens=kv.window_tokens,
                stored=_STORED[layout.dtype],
            )
        return self._layers[layer, heads]


def attention_for(
    cache: KvCache,
    *,
    threads: int = 1,
    path: str | None = None,
    limits: CudaLimits | None = None,
) -> Attention:
    """Compiled attention where the arena and the machine allow it, torch's otherwise.

    Args:
        cache: Keys and values.
        threads: Of compiled attention.
        path: As in `kernels.cpu.backend`; one that is not compiled means torch.
        limits: Of steps, for the CUDA kernels of an arena that is a tensor; None: torch there.

    Raises:
        CudaAttentionError: If those kernels do not have what the model needs.
    """
    if limits is not None and isinstance(cache.arena.buffer, TorchBuffer):
        return CudaAttention(cache, limits)
    on_host = isinstance(cache.arena.buffer, HostBuffer)
    if on_host and backend(path).library is not None:
        return CpuAttention(cache, threads=threads, path=path)
    return TorchAttention(cache)
