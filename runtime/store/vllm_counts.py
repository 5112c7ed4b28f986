"""What the connector has done, as names and amounts that add up over steps and workers."""

from __future__ import annotations

import threading
from collections.abc import Mapping

AMOUNTS: Mapping[str, str] = {
    "lookups": "Requests whose stored prefix was looked up.",
    "lookup_hit_tokens": "Tokens found stored beyond the engine's own cache.",
    "lookups_late": "Lookups given up at their deadline.",
    "loads": "Loads into the engine's cache, one per request and worker.",
    "loaded_blocks": "Blocks loaded into the engine's cache.",
    "loaded_bytes": "Bytes loaded into the engine's cache.",
    "load_seconds": "Seconds from the order of a load to its end, summed.",
    "load_failed_blocks": "Blocks promised by a lookup and not loaded; the engine recomputes them.",
    "loads_late": "Loads given up at their deadline.",
    "saved_blocks": "Blocks handed to the store and kept by it.",
    "saved_bytes": "Bytes handed to the store and kept by it.",
    "save_seconds": "Seconds that the store took to keep blocks, summed.",
    "unsaved_busy": "Blocks not kept: another writer is storing them.",
    "unsaved_full": "Blocks not kept: no room.",
    "unsaved_late": "Blocks not kept: out of time.",
    "unsaved_quota": "Blocks not kept: the tenant's quota.",
    "unsaved_orphan": "Blocks not kept: a block before them is not stored.",
    "unsaved_size": "Blocks not kept: larger than the store's blocks.",
    "unsaved_staging": "Blocks not kept: no staging buffer was free.",
    "unsaved_error": "Blocks not kept: the store failed.",
    "store_errors": "Calls that the store failed.",
    "store_suspended": "Calls not made since the store had just failed.",
    "requests_not_stored": "Requests whose contents cannot be named by a key.",
}


class Counts:
    """Amounts since they were last taken; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to one of `AMOUNTS`."""
        if name not in AMOUNTS:
            raise KeyError(name)
        if amount:
            with self._lock:
                self._amounts[name] = self._amounts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What was added since the last call; empty if nothing was."""
        with self._lock:
            taken, self._amounts = self._amounts, {}
        return taken


def added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Sums by name."""
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
