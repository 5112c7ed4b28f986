"""Which of the CPU paths is used, why, and how to force another.

Paths, fastest first: ``avx512`` (AVX-512 F/BW/VL/DQ with VBMI and GFNI), ``avx2`` (with FMA and
F16C) and ``portable`` are one compiled library; ``numba`` and ``numpy`` need no compiler. Of the
compiled paths that the processor can run, the one that is fastest on a small block is taken. A
missing compiler is reported by a `SlowKernelWarning`; a path that was asked for and cannot run is
an error.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from kernels.cpu.blocks import ContiguousBlock
from kernels.cpu.compile import CompileError
from kernels.cpu.fallback import PRODUCTS, numba_is_here
from kernels.cpu.library import FaultReport, Library
from kernels.planes import plane_words

PATH_VARIABLE = "SERVING_TWIN_CPU_KERNELS"
COMPILED_PATHS = ("avx512", "avx2", "portable")
ALL_PATHS = (*COMPILED_PATHS, *PRODUCTS)
_TRIAL_ROWS, _TRIAL_COLUMNS, _TRIAL_BITS, _TRIAL_REPEATS = 64, 2048, 4, 5


class SlowKernelWarning(UserWarning):
    """The compiled library cannot be used; results are right and slow."""


@dataclass(frozen=True)
class Backend:
    """The path that calls take.

    Attributes:
        name: One of `ALL_PATHS`.
        reason: One line: why this path.
        available: Every path that can run here, fastest first.
        trial_seconds: Measured seconds of the compiled paths on a small block; empty if there was
            nothing to choose.
        library: The compiled library, or None for numba and numpy.
    """

    name: str
    reason: str
    available: tuple[str, ...]
    trial_seconds: dict[str, float] = field(default_factory=dict)
    library: Library | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason} (available: {', '.join(self.available)})"


def backend(path: str | None = None) -> Backend:
    """The path that a call with this argument takes.

    Args:
        path: One of `ALL_PATHS`; None for ``$SERVING_TWIN_CPU_KERNELS``, and without that the
            fastest.

    Raises:
        ValueError: If the path is unknown or cannot run on this machine.
    """
    wanted, source = path, "asked for by the caller"
    if wanted is None:
        wanted, source = os.environ.get(PATH_VARIABLE) or None, f"asked for by {PATH_VARIABLE}"
    return _choose(wanted, source)


@cache
def _choose(wanted: str | None, source: str) -> Backend:
    if wanted is not None and wanted not in ALL_PATHS:
        raise ValueError(f"path must be one of {list(ALL_PATHS)}, found {wanted!r} ({source})")
    without = tuple(name for name in PRODUCTS if name != "numba" or numba_is_here())
    if wanted in PRODUCTS:
        if wanted not in without:
            raise ValueError(f"path {wanted!r} ({source}) needs numba, which is not installed")
        return Backend(wanted, source, without)
    library, failure = _library()
    compiled = tuple(library.path_ids) if library else ()
    available = compiled + without
    if wanted is not None:
        if wanted not in compiled:
            why = failure or f"this processor runs {list(compiled)} only"
            raise ValueError(f"path {wanted!r} ({source}) cannot run here: {why}")
        return Backend(wanted, source, available, library=library)
    if library is None:
        reason = f"no compiled kernels, {failure}"
        warnings.warn(f"slow {without[0]} kernels: {reason}", SlowKernelWarning, stacklevel=4)
        return Backend(without[0], reason, available)
    seconds = _trial(library)
    best = min(seconds, key=lambda name: seconds[name])
    reason = "fastest of the compiled paths that this processor runs"
    return Backend(best, reason, available, seconds, library)


@cache
def _library() -> tuple[Library | None, str]:
    try:
        return Library.load(), ""
    except (CompileError, OSError) as error:
        return None, str(error)


def _trial(library: Library) -> dict[str, float]:
    """Least seconds of each compiled path on one small block of zeros."""
    words = plane_words(_TRIAL_COLUMNS)
    block = ContiguousBlock(
        np.zeros((_TRIAL_BITS, _TRIAL_ROWS, words), np.uint32),
        np.zeros((_TRIAL_ROWS, 1 << _TRIAL_BITS), np.float16),
        _TRIAL_BITS,
        _TRIAL_COLUMNS,
    )
    x = np.zeros((1, _TRIAL_COLUMNS), np.float32)
    y = np.empty((1, _TRIAL_ROWS), np.float32)
    seconds = dict.fromkeys(library.path_ids, np.inf)
    for _ in range(_TRIAL_REPEATS):
        for name, path_id in library.path_ids.items():
            start = time.perf_counter()
            library.handle.block_matmul(
                path_id,
                block.argument,
                0,
                _TRIAL_ROWS,
                _TRIAL_COLUMNS,
                x.ctypes.data,
                1,
                y.ctypes.data,
                1,
                FaultReport(),
            )
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return {name: float(value) for name, value in seconds.items()}


def forget() -> None:
    """Choose again at the next call (after a change of ``$PATH``, ``$CXX`` or the cache)."""
    _choose.cache_clear()
    _library.cache_clear()
