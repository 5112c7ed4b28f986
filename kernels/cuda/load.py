"""Kernels ready to launch: on a GPU through CuPy, or on the CPU through the emulation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from kernels.cuda.compile import CompiledSource, compile_cubin
from kernels.cuda_emulation.build_cache import cached_file, content_key
from kernels.cuda_emulation.emulator import RawModule
from kernels.cuda_emulation.source_text import read_source

Target = Literal["gpu", "emulation"]


class KernelFunction(Protocol):
    """One kernel, called alike on both targets."""

    max_dynamic_shared_size_bytes: int

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        """Launch; arrays of the target (cupy or numpy) for pointers, numpy scalars for values."""


class KernelModule(Protocol):
    """The kernels of one source."""

    def get_function(self, name: str) -> KernelFunction:
        """The kernel of this name or name expression."""


class GpuUnavailableError(RuntimeError):
    """There is no GPU to run on, or no CuPy to reach it; the message says which."""


@cache
def gpu_problem() -> str | None:
    """Why kernels cannot run on a GPU here, in one line; None when they can."""
    try:
        import cupy
    except ImportError:
        return "cupy is not installed (pip install cupy-cuda13x)"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None if count else "no CUDA device"


def device_architecture() -> str:
    """Such as "sm_90", of the current GPU.

    Raises:
        GpuUnavailableError: There is none.
    """
    problem = gpu_problem()
    if problem:
        raise GpuUnavailableError(problem)
    import cupy

    return f"sm_{cupy.cuda.Device().compute_capability}"


class _GpuKernel:
    """A CuPy kernel that takes None for a null pointer, as the emulation does."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._null = kernel, np.uintp(0)

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return int(self._kernel.max_dynamic_shared_size_bytes)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self._kernel.max_dynamic_shared_size_bytes = size

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        given = tuple(self._null if argument is None else argument for argument in args)
        self._kernel(tuple(grid), tuple(block), given, shared_mem=shared_mem)


class GpuModule:
    """A cubin loaded on the current device; name expressions are found by their own text."""

    def __init__(self, compiled: CompiledSource) -> None:
        import cupy

        def write(path: Path) -> None:
            path.write_bytes(compiled.cubin)

        # CuPy opens the file at the first launch on a device, so it stays in the cache
        path = cached_file(content_key([compiled.cubin]), ".cubin", write)
        module = cupy.RawModule(path=str(path))
        self._functions = {
            name: _GpuKernel(module.get_function(compiled.symbols.get(name, name)))
            for name in compiled.resources
        }

    def get_function(self, name: str) -> KernelFunction:
        """The kernel of this name or name expression.

        Raises:
            KeyError: There is none.
        """
        if name not in self._functions:
            raise KeyError(f"no kernel {name!r}; there are {sorted(self._functions)}")
        return self._functions[name]


def load_kernels(
    path: Path,
    *,
    target: Target,
    defines: Sequence[str] = (),
    name_expressions: Sequence[str] = (),
    schedule: int = 0,
    ubsan: bool = False,
) -> KernelModule:
    """Compile a kernel source (cached) and make its kernels callable on the target.

    Args:
        path: The .cu file; headers beside it are taken in.
        target: "gpu" gives kernels for cupy arrays, "emulation" for numpy arrays.
        defines: Such as "TILE=64".
        name_expressions: Template instances to make available.
        schedule: Order of execution under emulation; nothing on a GPU.
        ubsan: Trap on undefined behaviour under emulation; nothing on a GPU.

    Raises:
        GpuUnavailableError: Target "gpu" without one.
        CompileError, CompilerMissingError, EmulationError: The source does not build here.
        ValueError: Unknown target.
    """
    source = read_source(path)
    if target == "emulation":
        return RawModule(
            code=source,
            options=tuple(f"-D{define}" for define in defines),
            name_expressions=tuple(name_expressions),
            schedule=schedule,
            ubsan=ubsan,
        )
    if target != "gpu":
        raise ValueError(f"target must be 'gpu' or 'emulation', not {target!r}")
    compiled = compile_cubin(
        source, device_architecture(), defines=defines, name_expressions=name_expressions
    )
    return GpuModule(compiled)
