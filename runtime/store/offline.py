"""The SSD part of a store that nobody serves at the moment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from runtime.store.errors import StoreSetupError
from runtime.store.ssd import SsdTier


@contextlib.contextmanager
def opened_ssd(folder: Path) -> Iterator[SsdTier]:
    """The SSD tier of a store's folder, or of its ``ssd`` folder itself.

    Raises:
        StoreSetupError: If there is none, or a server uses it.
    """
    path = folder / "ssd" if (folder / "ssd").is_dir() else folder
    if not path.is_dir() or not any(path.iterdir()):
        raise StoreSetupError(f"{folder}: no store with an SSD part there")
    # Nothing is to be evicted: as much room as there may ever be.
    ssd = SsdTier.open(path, capacity_bytes=sys.maxsize // 2)
    try:
        yield ssd
    finally:
        ssd.close()
