"""What the machine itself gives: memory copies, arithmetic, its names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Final

import numpy as np
import torch

from runtime.profile_clock import Clock

COPY_BYTES: Final = 64 << 20  # beyond the caches of most processors
MATRIX: Final = 768
PACKAGES: Final = ("serving-twin", "torch", "numpy")


def copy_bytes_per_s(clock: Clock, *, rounds: int = 5) -> float:
    """Bytes read and written per second by a large copy, with torch's threads; the median."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.zeros_like(source)
    target.copy_(source)
    rates = []
    for _ in range(rounds):
        start_s = clock()
        target.copy_(source)
        rates.append(2 * COPY_BYTES / max(clock() - start_s, 1e-9))
    return float(np.median(rates))


def flops_per_s(clock: Clock, *, rounds: int = 5) -> float:
    """Operations per second of torch's float32 matrix product, two a multiply-add; the median."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(MATRIX, MATRIX, generator=generator)
    out = torch.mm(a, a)
    rates = []
    for _ in range(rounds):
        start_s = clock()
        torch.mm(a, a, out=out)
        rates.append(2.0 * MATRIX**3 / max(clock() - start_s, 1e-9))
    return float(np.median(rates))


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_name() -> str:
    """Model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in named if name), platform.machine() or "unknown processor")


def versions() -> dict[str, str]:
    """Of the product and what it computes with."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
