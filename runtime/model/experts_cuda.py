"""Quantized routed experts on the pages of an arena in device memory, by the tile kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cuda.load import Target
from kernels.cuda.moe_tile import DevicePages, MoeShape, MoeTileLayer
from runtime.model.kernel_target import array, on_current_stream, target_of
from runtime.model.spec import ModelSpec
from runtime.page_arena import PageArena
from runtime.page_torch_device import DeviceTables

Observer = Callable[[int, NDArray[np.int32], NDArray[np.float32]], None]
KERNEL_TOKENS: Final = (4, 8, 16)  # most tokens of the kernels for few
NO_EXPERT: Final = -1


class CudaExpertsError(ValueError):
    """The kernels cannot do what a model needs; says what."""


class CudaExperts:
    """`runtime.model.experts.Experts` with `kernels.cuda.moe_tile`.

    Widths, pages and routing are read on the device: a captured graph replays while they change.
    Which kernel multiplies depends on the number of tokens, and so do a result's last bits.

    Attributes:
        live: [1] int32 on the device: rows from here on belong to no sequence and get no expert;
            None: all rows count.

    Args:
        spec: Of the model.
        arena: A torch tensor.
        tables: Their mirror on the device.
        min_bits: Width of the first table.
        max_rows: New tokens of a step at most.
        observe: Told layer, [T, k] chosen experts and [T, k] gate weights of every step, once the
            step is done.
        kernel_tokens: Most tokens of the kernels for few; none: one kernel for all steps.
        schedule: Order of execution under emulation.

    Raises:
        CudaExpertsError: If layers differ in their experts, or sizes are not built.
    """

    def __init__(
        self,
        spec: ModelSpec,
        arena: PageArena,
        tables: DeviceTables,
        *,
        min_bits: int,
        max_rows: int,
        observe: Observer | None = None,
        kernel_tokens: Sequence[int] = KERNEL_TOKENS,
        schedule: int = 0,
    ) -> None:
        pages: torch.Tensor = arena.buffer.array
        self._device, self._target = pages.device, target_of(pages.device)
        self._place = {number: place for place, number in enumerate(spec.moe_layers)}
        shape = _shape(spec)
        self._kernels = _kernels(
            shape,
            DevicePages(
                array(pages.view(-1), self._target),
                arena.page_bytes,
                min_bits,
                *(
                    array(t, self._target)
                    for t in (tables.bits, tables.plane_pages, tables.table_pages)
                ),
            ),
            [size for size in sorted(kernel_tokens) if size < max_rows] + [max_rows],
            self._target,
            schedule,
        )
        self.live: torch.Tensor | None = None
        self.observe = observe
        self._routing = _Routing(len(self._place), max_rows, shape.top_k, self._device)
        self._row = torch.arange(max_rows, dtype=torch.int32, device=self._device)

    def __call__(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``runtime.model.experts.Experts``."""
        count, place = len(hidden), self._place[layer]
        chosen = experts.to(torch.int32)
        if self.live is not None:
            is_padding = self._row[:count, None] >= self.live
            chosen = chosen.masked_fill(is_padding, NO_EXPERT)
        if self.observe is not None:
            self._routing.write(place, chosen, weights)
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        kernel = next(k for k in self._kernels if k.max_tokens >= count)
        with on_current_stream(self._device, self._target):
            kernel(
                place,
                *(array(t.contiguous(), self._target) for t in (hidden, chosen, weights, out)),
            )
        return out

    def step_done(self, rows: int | None = None) -> None:
        """The step's launches are enqueued: have its routing copied to the host.

        Args:
            rows: Rows that count, of a graph's replay; None: those of the calls.
        """
        if self.observe is not None:
            self._routing.fetch(rows)

    def report(self) -> None:
        """Tell the observer of the last step; waits for it if it is not done."""
        if self.observe is not None:
            for number, (index, gate) in zip(self._place, self._routing.fetched(), strict=False):
                self.observe(number, index, gate)


class _Routing:
    """Chosen experts and gate weights of every layer of a step, at fixed addresses.

    Rows come first, so that those of a step are one piece to copy.
    """

    def __init__(self, layers: int, rows: int, top_k: int, device: torch.device) -> None:
        shape = (rows, layers, top_k)
        self._is_cuda = device.type == "cuda"
        self._index = torch.zeros(shape, dtype=torch.int32, device=device)
        self._gate = torch.zeros(shape, dtype=torch.float32, device=device)
        self._host = [
            torch.zeros(shape, dtype=t.dtype, pin_memory=self._is_cuda)
            for t in (self._index, self._gate)
        ]
        self._rows = [0] * layers
        self._event: Any = None
        self._has_step = False

    def write(self, layer: int, index: torch.Tensor, gate: torch.Tensor) -> None:
        count = self._rows[layer] = len(index)
        self._index[:count, layer].copy_(index)
        self._gate[:count, layer].copy_(gate)

    def fetch(self, rows: int | None) -> None:
        if rows is not None:
            self._rows = [rows] * len(self._rows)
        most = max(self._rows)
        for host, device in zip(self._host, (self._index, self._gate), strict=True):
            host[:most].copy_(device[:most], non_blocking=True)
        if self._is_cuda:
            self._event = torch.cuda.current_stream(self._index.device).record_event()
        self._has_step = True

    def fetched(self) -> list[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """[T, k] of every layer; nothing where no step was fetched since."""
        if not self._has_step:
            return []
        self._has_step = False
        if self._event is not None:
            self._event.synchronize()
        index, gate = (host.numpy() for host in self._host)
        return [
            (index[:count, layer].copy(), gate[:count, layer].copy())
            for layer, count in enumerate(self._rows)
        ]


def _shape(spec: ModelSpec) -> MoeShape:
    found = {
        (moe.experts, moe.width, moe.experts_per_token)
        for moe in (spec.layers[number].moe for number in spec.moe_layers)
        if moe is not None
    }
    if len(found) != 1:
        raise CudaExpertsError(f"the tile kernels need layers with equal experts, found {found}")
    ((experts, width, top_k),) = found
    try:
        return MoeShape(
            experts=experts,
            hidden=spec.hidden,
            intermediate=width,
            top_k=top_k,
            activation="silu" if spec.activation == "silu" else "gelu_tanh",
        )
    except ValueError as error:
        raise CudaExpertsError(str(error)) from error


def _kernels(
    shape: MoeShape, pages: DevicePages, sizes: Sequence[int], target: Target, schedule: int
) -> Sequence[MoeTileLayer]:
    """Kernels for few tokens up to those for whole prompts, ascending."""
    return [
        MoeTileLayer(shape, pages, max_tokens=size, target=target, schedule=schedule)
        for size in sizes
    ]
