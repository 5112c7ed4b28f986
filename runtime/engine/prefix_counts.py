"""What the prefix cache has done, as a flat table of numbers for the engine's statistics."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from numbers import Real
from typing import Any, Final

# Blocks that are ordered to be saved again after they were refused are counted again.
COUNTS: Final[Mapping[str, str]] = {
    "lookups": "Prompts whose blocks were looked up.",
    "lookup_blocks": "Blocks asked for by lookups.",
    "lookup_hit_blocks": "Leading blocks that lookups found.",
    "lookup_seconds": "Seconds in lookups.",
    "loads": "Loads ordered.",
    "loaded_blocks": "Blocks loaded into pages.",
    "loaded_bytes": "Bytes loaded into pages.",
    "load_seconds": "Seconds from the order of a load to its end, summed.",
    "load_missed_blocks": "Blocks ordered and not loaded: computed instead.",
    "loads_late": "Loads given up at their deadline.",
    "loads_cancelled": "Loads of sequences that were given up.",
    "saves": "Saves ordered.",
    "saved_blocks": "Blocks stored that were not before.",
    "saved_bytes": "Bytes of them.",
    "save_known_blocks": "Blocks to be saved that the store had.",
    "save_seconds": "Seconds in which blocks were copied and stored, summed.",
    "unsaved_backpressure": "Blocks not saved: too many saves under way.",
    "unsaved_left_behind": "Blocks not saved: a window had given their pages back.",
    "unsaved_too_deep": "Blocks not saved: behind the longest chain that a store takes.",
    "unsaved_cancelled": "Blocks not saved: their pages were wanted.",
    "unsaved_paused": "Blocks not saved: the store had just failed.",
    "unsaved_busy": "Blocks not saved: another engine is storing the same.",
    "unsaved_full": "Blocks not saved: no room.",
    "unsaved_quota": "Blocks not saved: the tenant's quota.",
    "unsaved_orphan": "Blocks not saved: a block before them is not stored.",
    "unsaved_size": "Blocks not saved: larger than the store's blocks.",
    "unsaved_late": "Blocks not saved: out of time.",
    "unsaved_unavailable": "Blocks not saved: the store is gone.",
    "store_failures": "Calls that the store failed or was late for.",
    "calls_paused": "Calls not made: the store had just failed.",
    "resets": "Times that all blocks were forgotten.",
}


class PrefixCounts:
    """Sums by name; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(COUNTS, 0.0)

    def add(self, name: str, amount: float = 1) -> None:
        """Add to one of ``COUNTS``.

        Raises:
            KeyError: If it is none.
        """
        with self._lock:
            self._sums[name] += amount

    def all(self) -> dict[str, float]:
        """A copy of all sums."""
        with self._lock:
            return dict(self._sums)


def flat_stats(stats: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of ``PrefixStore.stats``, by names such as ``store_blocks_hit_ssd_total``.

    Gauges keep their names behind ``store_``; counters, those of the SSD (``store_ssd_``) and of
    the pool end with ``_total``. Anything that is no number is left out.
    """
    flat: dict[str, float] = {}
    for part, prefix, suffix in (
        ("gauges", "store_", ""),
        ("counters", "store_", "_total"),
        ("ssd_counters", "store_ssd_", "_total"),
        ("pool_counters", "store_pool_", "_total"),
    ):
        for name, value in stats.get(part, {}).items():
            if isinstance(value, Real):
                flat[f"{prefix}{name}{suffix}"] = float(value)
    return flat
