"""The routed experts of a model on the pages of the arena, by the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu import moe_layer
from kernels.cpu.pages import PagedExperts, PagedWeights
from runtime.decoder_config import DecoderConfig
from runtime.page_arena import PageArena
from runtime.page_tables import PageTables

Observer = Callable[[int, NDArray[np.int32], NDArray[np.float32]], None]


class PagedExpertLayers:
    """Experts of all layers, each block at the width committed when a step reads it.

    Args:
        config: Shapes of the model.
        arena: On the host.
        tables: Widths and page lists that the mover keeps; read at every call.
        observe: Told layer, [T, k] chosen experts and [T, k] gate weights of every call.
        threads: Of a kernel.
    """

    def __init__(
        self,
        config: DecoderConfig,
        arena: PageArena,
        tables: PageTables,
        *,
        observe: Observer | None = None,
        threads: int = 1,
    ) -> None:
        weights = PagedWeights(
            arena=arena.buffer.array.reshape(-1),
            page_bytes=arena.page_bytes,
            min_bits=tables.min_bits,
            bits=tables.bits,
            plane_pages=tables.plane_pages,
            table_pages=tables.table_pages,
        )
        self._layers = [
            PagedExperts(
                weights,
                first_block=2 * config.experts * layer,
                experts=config.experts,
                hidden=config.hidden,
                inner=config.expert_hidden,
            )
            for layer in range(config.layers)
        ]
        self._observe = observe
        self._threads = threads

    def __call__(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``runtime.decoder.Experts``."""
        index = experts.to(torch.int32).contiguous().numpy()
        gate = weights.contiguous().numpy()
        if self._observe is not None:
            self._observe(layer, index, gate)
        out = moe_layer(
            hidden.contiguous().numpy(),
            index,
            gate,
            self._layers[layer],
            "silu",
            threads=self._threads,
        )
        return torch.from_numpy(out)
