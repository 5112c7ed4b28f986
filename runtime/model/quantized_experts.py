"""The routed experts of a model on the pages of the arena, by the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu import moe_layer
from kernels.cpu.pages import PagedExperts, PagedWeights
from runtime.model.spec import ModelSpec
from runtime.page_arena import PageArena
from runtime.page_tables import PageTables
from runtime.quantized_checkpoint import QuantizedCheckpoint, QuantizedCheckpointError

Observer = Callable[[int, NDArray[np.int32], NDArray[np.float32]], None]


class QuantizedExperts:
    """Experts of all layers that have some, each block at the width committed when it is read.

    Blocks are numbered as in a quantized checkpoint: layer by layer, dense ones left out, expert
    by expert, gate_up before down.

    Args:
        spec: Of the model.
        arena: On the host.
        tables: Widths and page lists that the mover keeps; read at every call.
        observe: Told layer, [T, k] chosen experts and [T, k] gate weights of every call.
        threads: Of a kernel.
    """

    def __init__(
        self,
        spec: ModelSpec,
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
        self._layers: dict[int, PagedExperts] = {}
        first = 0
        for number in spec.moe_layers:
            moe = spec.layers[number].moe
            assert moe is not None  # it is one of moe_layers
            self._layers[number] = PagedExperts(
                weights,
                first_block=first,
                experts=moe.experts,
                hidden=spec.hidden,
                inner=moe.width,
            )
            first += 2 * moe.experts
        self._activation = spec.activation
        self.observe = observe
        self._threads = threads

    def __call__(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``runtime.model.experts.Experts``."""
        index = experts.to(torch.int32).contiguous().numpy()
        gate = weights.contiguous().numpy()
        if self.observe is not None:
            self.observe(layer, index, gate)
        out = moe_layer(
            hidden.contiguous().numpy(),
            index,
            gate,
            self._layers[layer],
            self._activation,
            threads=self._threads,
        )
        return torch.from_numpy(out)


def require_blocks(checkpoint: QuantizedCheckpoint, spec: ModelSpec) -> None:
    """Refuse a checkpoint whose blocks are not those of its configuration.

    Raises:
        QuantizedCheckpointError: Naming the first difference.
    """
    expected: list[tuple[int, int, str, int, int]] = []
    for number in spec.moe_layers:
        moe = spec.layers[number].moe
        assert moe is not None  # it is one of moe_layers
        for expert in range(moe.experts):
            expected.append((number, expert, "gate_up", 2 * moe.width, spec.hidden))
            expected.append((number, expert, "down", spec.hidden, moe.width))
    found = [(b.layer, b.expert, b.module, b.rows, b.columns) for b in checkpoint.blocks]
    if len(found) != len(expected):
        raise QuantizedCheckpointError(
            f"{checkpoint.folder}: config.json gives {len(expected)} blocks, found {len(found)}"
        )
    for wanted, block in zip(expected, found, strict=True):
        if wanted != block:
            raise QuantizedCheckpointError(
                f"{checkpoint.folder}: config.json gives block {_named(wanted)}, "
                f"found {_named(block)}"
            )


def _named(block: tuple[int, int, str, int, int]) -> str:
    layer, expert, module, rows, columns = block
    return f"{module} of layer {layer}, expert {expert}, [{rows}, {columns}]"
