"""The device of an engine that does not compute on the CPU: a GPU, or its emulation.

In the emulation the whole path of a GPU is taken (arena as a tensor, tile kernels, packed tables,
padded decode steps), the kernels run on the CPU, and a graph's replay is its launches once more. It
is for tests: it is slow, and says nothing about time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from kernels.cuda.compile import missing_packages
from kernels.cuda.load import gpu_problem
from kernels.cuda_emulation import emulator
from runtime.engine.settings import EngineSettingsError
from runtime.engine.weight_pages import Movement
from runtime.model.attention_cuda import CudaAttention, CudaAttentionError, CudaLimits
from runtime.model.decode_graphs import Capture, Compute, CudaGraphCapture
from runtime.model.experts_cuda import KERNEL_TOKENS, CudaExperts, CudaExpertsError, Observer
from runtime.model.kv_cache import KvCache
from runtime.model.spec import ModelSpec
from runtime.page_arena import PageArena
from runtime.page_devices import CopyDevice
from runtime.page_movement import PageMover
from runtime.page_tile_layout import TileLayout
from runtime.page_torch_device import CudaStreams, StreamEvent, Streams, TorchDevice

EMULATION: Final = "emulation"
SPARE_SEQUENCE: Final = -1
FREE_SHARE: Final = 0.8  # of what is free beside the model; graphs and activations take the rest
SLOT_BYTES: Final = 16 << 20
_CUDA = re.compile(r"cuda(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Where an engine computes.

    Attributes:
        device: Of tensors.
        arena_device: Of the arena; names an index where the host's memory is meant as a tensor.
        is_emulated: Whether kernels run on the CPU.
    """

    device: str
    arena_device: str
    is_emulated: bool

    def available_bytes(self) -> int | None:
        """Memory an arena may have; None: as on the CPU."""
        free = self.free_bytes()
        return None if free is None else int(FREE_SHARE * free)

    def free_bytes(self) -> int | None:
        """Memory that nobody has; None: as on the CPU."""
        if self.is_emulated:
            return None
        free, _ = torch.cuda.mem_get_info(torch.device(self.device))
        return free

    def movement(self, given: Movement | None) -> Movement:
        """How quantized weights get into the arena: in the order of the tile kernels."""
        rules, history = (None, None) if given is None else (given.rules, given.history)
        return Movement(self._copies, rules, history, TileLayout())

    def spare_block(self, cache: KvCache) -> None:
        """Take the pages that rows of no sequence are written to.

        Raises:
            EngineSettingsError: If the arena has none left.
        """
        cache.add(SPARE_SEQUENCE)
        if not cache.grow(SPARE_SEQUENCE, 1):
            raise EngineSettingsError(
                f"memory_bytes: {cache.arena.num_pages} pages leave none for keys and values"
            )

    def attention(self, cache: KvCache, limits: CudaLimits) -> CudaAttention:
        """Attention by the CUDA kernels; ``spare_block`` comes before.

        Raises:
            EngineSettingsError: If the model has a shape that is not built.
        """
        try:
            return CudaAttention(cache, limits, spare_pages=cache.table(SPARE_SEQUENCE)[0])
        except CudaAttentionError as error:
            raise EngineSettingsError(f"device: {error}") from error

    def experts(
        self,
        spec: ModelSpec,
        arena: PageArena,
        mover: PageMover,
        *,
        max_rows: int,
        observe: Observer | None,
    ) -> CudaExperts:
        """Quantized experts by the tile kernels.

        Raises:
            EngineSettingsError: If the model has sizes that are not built.
        """
        copies = mover.device
        assert isinstance(copies, TorchDevice)  # of ``movement``
        assert copies.tables is not None  # the mover has attached it
        try:
            return CudaExperts(
                spec,
                arena,
                copies.tables,
                min_bits=mover.tables.min_bits,
                max_rows=max_rows,
                observe=observe,
                kernel_tokens=() if self.is_emulated else KERNEL_TOKENS,
            )
        except CudaExpertsError as error:
            raise EngineSettingsError(f"device: {error}") from error

    def capture(self) -> Capture:
        """Graphs of the device; in the emulation, launches once more."""
        if self.is_emulated:
            return launched_again
        return CudaGraphCapture(torch.device(self.device))

    def _copies(self, arena: PageArena) -> CopyDevice:
        streams: Streams = _DoneStreams() if self.is_emulated else CudaStreams(self.device)
        return TorchDevice(arena, streams, slot_bytes=max(SLOT_BYTES, arena.page_bytes))


def open_accelerator(device: str) -> Accelerator | None:
    """The device of this name; None for the CPU.

    Raises:
        EngineSettingsError: If there is no such device, or what it needs is not installed.
    """
    if device == "cpu":
        return None
    if device == EMULATION:
        if not emulator.available():
            raise EngineSettingsError("device: emulation needs a C++ compiler: install g++")
        return Accelerator("cpu", "cpu:0", is_emulated=True)
    found = _CUDA.fullmatch(device)
    if found is None:
        raise EngineSettingsError(f"device: must be cpu or cuda:N, found {device!r}")
    index = int(found[1] or 0)
    problem = _problem(index)
    if problem:
        raise EngineSettingsError(
            f"device: {device}: {problem}; `runtime doctor` says what to install"
        )
    import cupy

    torch.cuda.set_device(index)
    cupy.cuda.Device(index).use()
    name = f"cuda:{index}"
    return Accelerator(name, name, is_emulated=False)


def _problem(index: int) -> str | None:
    """Why kernels cannot run there."""
    problem = gpu_problem()
    if problem is not None:
        return problem
    if missing_packages():
        return f"packages are missing: {', '.join(missing_packages())}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the GPU"
    count = torch.cuda.device_count()
    return None if index < count else f"there are {count} devices, the first is cuda:0"


def launched_again(compute: Compute) -> Compute:
    """A graph that is none: every replay computes, into the same tensor."""
    kept: list[torch.Tensor] = []

    def replay() -> torch.Tensor:
        if kept:
            kept[0].copy_(compute())
        else:
            kept.append(compute().clone())
        return kept[0]

    return replay


class _Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class _DoneStreams:
    """Streams of a device that has done everything when it returns."""

    def on_copy_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def compute_events(self) -> Sequence[StreamEvent]:
        return [_Done()]

    def copy_after(self, events: Sequence[StreamEvent]) -> None:
        return None

    def copy_event(self) -> StreamEvent:
        return _Done()
