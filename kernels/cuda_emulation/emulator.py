"""CUDA C++ kernel source run on the CPU, with the call shape of cupy.RawModule.

    module = RawModule(code=source, options=("-DTILE=64",))
    kernel = module.get_function("gemv")
    kernel((grid,), (block,), (numpy arrays and numpy scalars,), shared_mem=num_bytes)

One CUDA thread is one fiber. Fibers of a block share one thread of the processor and switch only
at barriers and warp collectives, in an order that the schedule sets: 0 forward, 1 reverse, n >= 2
random with seed n. A missing barrier changes the answer under at least one of a few schedules.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kernels.cuda_emulation.host_compile import (
    EmulationError,
    available,
    build_library,
    kernel_names,
)

__all__ = ["EmulatedKernel", "EmulationError", "RawModule", "available"]

DEFAULT_DYNAMIC_SHARED_BYTES = 48 * 1024
_MAX_SWITCHES = 200_000_000
_NEAR_BYTES = 4096
_ONE_LAUNCH_AT_A_TIME = threading.Lock()


class _Options(ctypes.Structure):
    _fields_ = (
        ("schedule", ctypes.c_int),
        ("max_switches", ctypes.c_uint64),
        ("stats", ctypes.c_void_p),
        ("max_shared_bytes", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter: constant, pointer, numpy kind and size such as "f4", bytes."""

    is_constant: bool
    is_pointer: bool
    element: str
    size_bytes: int

    @classmethod
    def parse(cls, text: str) -> Parameter:
        """From the library's own description, such as "c*f4:8" or "vi4:4"."""
        kind, size = text.split(":")
        is_pointer = kind[1] == "*"
        return cls(kind[0] == "c", is_pointer, kind[2 if is_pointer else 1 :], int(size))


@dataclass(slots=True)
class _GuardedArray:
    """A copy of an argument whose end touches a page that no access survives."""

    index: int
    array: np.ndarray[Any, Any]
    address: int
    base: ctypes.c_void_p
    total: ctypes.c_size_t
    is_constant: bool


class _Arguments:
    """The argument block of one launch, and the guarded copies behind it."""

    def __init__(self, library: ctypes.CDLL, name: str, guard: bool) -> None:
        self._library, self._name, self._guard = library, name, guard
        self._values: list[Any] = []
        self._copies: dict[tuple[int, int], _GuardedArray] = {}

    def _fail(self, index: int, message: str) -> EmulationError:
        return EmulationError(f"{self._name}: argument {index}: {message}")

    def add(self, index: int, value: Any, parameter: Parameter) -> None:
        if isinstance(value, np.ndarray):
            self._values.append(ctypes.c_void_p(self._address(index, value, parameter)))
        elif isinstance(value, np.generic):
            self._values.append(self._scalar(index, value, parameter))
        elif value is None and parameter.is_pointer:
            self._values.append(ctypes.c_void_p(0))
        else:
            given = type(value).__name__
            raise self._fail(index, f"give a numpy array or numpy scalar, not {given}")

    def _scalar(self, index: int, value: np.generic, parameter: Parameter) -> Any:
        have = value.dtype.kind + str(value.dtype.itemsize)
        fits = value.dtype.itemsize == parameter.size_bytes
        if parameter.is_pointer or not fits or parameter.element not in ("?", have):
            want = ("pointer to " if parameter.is_pointer else "") + parameter.element
            raise self._fail(index, f"{value.dtype} scalar given for a parameter {want}")
        return ctypes.create_string_buffer(value.tobytes(), value.dtype.itemsize)

    def _address(self, index: int, array: np.ndarray[Any, Any], parameter: Parameter) -> int:
        if not parameter.is_pointer:
            raise self._fail(index, "array given for a scalar parameter")
        want, have = parameter.element, array.dtype.kind + str(array.dtype.itemsize)
        if want not in ("?", "bf") and want[1:] != "1" and have != want:
            raise self._fail(index, f"{have} array given for a {want} pointer")
        if not array.flags.c_contiguous:
            raise self._fail(index, "not contiguous")
        address = int(array.ctypes.data)
        if not self._guard or not array.nbytes:
            return address
        # the same array given twice stays one buffer; its writes are copied back once
        key = (address, array.nbytes)
        known = self._copies.get(key)
        if known is None:
            known = self._copies[key] = self._copy(index, array, parameter.is_constant)
        known.is_constant = known.is_constant and parameter.is_constant
        if not known.is_constant and not array.flags.writeable:
            raise self._fail(index, "read-only array given for a pointer that may be written")
        return known.address

    def _copy(self, index: int, array: np.ndarray[Any, Any], is_constant: bool) -> _GuardedArray:
        base, total = ctypes.c_void_p(), ctypes.c_size_t()
        size = ctypes.c_size_t(array.nbytes)
        address = self._library.cuemu_galloc(size, ctypes.byref(base), ctypes.byref(total))
        if not address:
            raise MemoryError(f"{self._name}: no memory for {array.nbytes} bytes of argument")
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
        return _GuardedArray(index, array, address, base, total, is_constant)

    def block(self) -> Any:
        pointers = [ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in self._values]
        return (ctypes.c_void_p * max(1, len(pointers)))(*pointers)

    def near(self, address: int) -> str:
        """Which argument an address that could not be accessed lies beside, as a remark."""
        for c in self._copies.values() if address else ():
            past = address - c.address - c.array.nbytes
            if 0 <= past < _NEAR_BYTES:
                return f": {past} bytes past the end of argument {c.index}"
            before = c.address - address
            if 0 < before < _NEAR_BYTES:
                return f": {before} bytes before the start of argument {c.index}"
        return ""

    def finish(self) -> str | None:
        """Copy results back and free the copies; what was overrun, if anything."""
        overrun = None
        for c in self._copies.values():
            place, size = ctypes.c_void_p(c.address), ctypes.c_size_t(c.array.nbytes)
            side = self._library.cuemu_gcheck(c.base, c.total, place, size)
            if side and overrun is None:
                where = "before its start" if side < 0 else "past its end"
                overrun = f"argument {c.index}: the kernel wrote outside the array, {where}"
            if not c.is_constant:
                ctypes.memmove(c.array.ctypes.data, c.address, c.array.nbytes)
            self._library.cuemu_gfree(c.base, c.total)
        self._copies.clear()
        return overrun


class EmulatedKernel:
    """One kernel, called as cupy calls it; `sched` and `max_switches` exist here alone.

    Attributes:
        signature: Its parameters in order.
        max_dynamic_shared_size_bytes: As on a GPU, more than 48 KiB must be asked for first.
        stats: Of the last launch: fiber switches, reads of lanes that had exited.
    """

    def __init__(self, library: ctypes.CDLL, symbol: str, name: str, module: RawModule) -> None:
        self._library, self._name, self._module = library, name, module
        self._launch = getattr(library, f"cuemu_launch_{symbol}")
        describe = getattr(library, f"cuemu_sig_{symbol}")
        describe.restype = ctypes.c_char_p
        self.signature = [Parameter.parse(p) for p in describe().decode().split(",") if p]
        self.max_dynamic_shared_size_bytes = DEFAULT_DYNAMIC_SHARED_BYTES
        self.stats: dict[str, int] = {}

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        sched: int | None = None,
        max_switches: int = _MAX_SWITCHES,
    ) -> None:
        """Run the whole grid; arrays that the kernel may write hold its results afterwards.

        Args:
            grid: Blocks in x, y, z (missing ones are 1).
            block: Threads in x, y, z.
            args: numpy arrays for pointers, numpy scalars for values, None for a null pointer.
            shared_mem: Dynamic shared memory in bytes.
            sched: Order of threads, waiters and blocks; the module's when None.
            max_switches: Fiber switches before the launch counts as hung.

        Raises:
            EmulationError: Wrong arguments, or an error of the kernel: dead or divergent barrier,
                access outside an array, `__trap`, misuse of a warp collective, and so on.
        """
        if len(args) != len(self.signature):
            want = len(self.signature)
            raise EmulationError(f"{self._name}: takes {want} arguments, {len(args)} given")
        block_of_arguments = _Arguments(self._library, self._name, self._module.guard)
        try:
            for i, (value, parameter) in enumerate(zip(args, self.signature, strict=True)):
                block_of_arguments.add(i, value, parameter)
            schedule = self._module.schedule if sched is None else sched
            message = self._run(grid, block, block_of_arguments, shared_mem, schedule, max_switches)
        finally:
            overrun = block_of_arguments.finish()
        if message or overrun:
            raise EmulationError(f"{self._name}: {message or overrun}")

    def _run(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: _Arguments,
        shared_mem: int,
        schedule: int,
        max_switches: int,
    ) -> str:
        sizes = [(ctypes.c_uint * 3)(*(*tuple(d), 1, 1)[:3]) for d in (grid, block)]
        stats = (ctypes.c_uint64 * 3)()
        message = ctypes.create_string_buffer(1024)
        options = _Options(
            schedule, max_switches, ctypes.addressof(stats), self.max_dynamic_shared_size_bytes
        )
        with _ONE_LAUNCH_AT_A_TIME:
            failed = self._launch(
                *sizes,
                ctypes.c_uint(shared_mem),
                arguments.block(),
                ctypes.byref(options),
                message,
                len(message),
            )
        self.stats = {"switches": stats[0], "undefined_reads": stats[1]}
        text = message.value.decode(errors="replace")
        return text + arguments.near(int(stats[2])) if failed else ""


@cache
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.cuemu_galloc.restype = ctypes.c_void_p
    return library


class RawModule:
    """Kernels of one source text, compiled for this processor at the first use of the text.

    Args:
        code: Kernel source, the same text that NVRTC compiles.
        options: Compiler options; -D, -I and -U count.
        name_expressions: Template instances to make available, such as "scale<float, 4>".
        guard: Copy arrays to guarded memory, so that accesses outside them are found.
        ubsan: Trap on undefined behaviour (misaligned vectors, shifts); compiles slower.
        schedule: Order of execution for launches that do not say (see the module's text).

    Raises:
        EmulationError: The source does not compile, or there is no compiler.
    """

    def __init__(
        self,
        *,
        code: str,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] | None = None,
        guard: bool = True,
        ubsan: bool = False,
        schedule: int = 0,
    ) -> None:
        self._expressions = list(name_expressions or ())
        path = build_library(code, tuple(options), tuple(self._expressions), ubsan)
        self.names = kernel_names(code)
        self.guard, self.schedule = guard, schedule
        self._library = _load(path)

    def get_function(self, name: str) -> EmulatedKernel:
        """The kernel of this name or name expression.

        Raises:
            EmulationError: There is none; the message lists those that there are.
        """
        if name in self._expressions:
            symbol = f"expr{self._expressions.index(name)}"
        elif name in self.names:
            symbol = name
        else:
            known = ", ".join([*self.names, *self._expressions])
            raise EmulationError(f"no kernel {name!r} in this source; it has: {known}")
        return EmulatedKernel(self._library, symbol, name, self)
