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
        StoreSetupError: If there is none (nothing is made then), or a server uses it.
    """
    path = next(
        (path for path in (folder / "ssd", folder) if (path / "format.json").is_file()), None
    )
    if path is None:
        raise StoreSetupError(
            f"{folder}: no store with an SSD part there (a folder with ssd/format.json)"
        )
    # Nothing is to be evicted: as much room as there may ever be.
    ssd = SsdTier.open(path, capacity_bytes=sys.maxsize // 2)
    try:
        yield ssd
    finally:
        ssd.close()
