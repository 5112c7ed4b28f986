"""How much memory an engine's arena may have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from runtime.engine.accelerator import Accelerator
from runtime.engine.settings import EngineSettingsError
from runtime.engine.weight_pages import checkpoint_tables
from runtime.model.load import LoadedModel

KV_BYTES: Final = 1 << 30
"""KV memory where none is asked for, if a quarter of what is available is as much."""


def default_memory_bytes(
    model: LoadedModel, page_bytes: int, accelerator: Accelerator | None
) -> int:
    """KV as of ``KV_BYTES``, and quantized experts at their widest, as far as memory reaches.

    Of a GPU's memory all that it can spare: nothing else is there to use it.
    """
    spared = None if accelerator is None else accelerator.available_bytes()
    if spared is not None:
        return spared
    available = _available_bytes()
    kv_bytes = min(KV_BYTES, available // 4)
    if model.checkpoint is None:
        return kv_bytes
    widest = int(checkpoint_tables(model.checkpoint, page_bytes).bytes_[:, -1].sum())
    return min(int(widest * 1.1) + kv_bytes, available // 2)


def memory_error(asked_bytes: int, available_bytes: int, advice: str) -> EngineSettingsError:
    """One line: what is asked for, what there is, what to do."""
    return EngineSettingsError(
        f"memory_bytes: --memory asks for {asked_bytes:,} bytes, {available_bytes:,} are "
        f"available: {advice}"
    )


def free_bytes(accelerator: Accelerator | None) -> int:
    """Of the memory that the arena is to lie in."""
    free = None if accelerator is None else accelerator.free_bytes()
    return _available_bytes() if free is None else free


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
