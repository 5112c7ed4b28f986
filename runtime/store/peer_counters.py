"""Counts of what happened between nodes, for statistics; safe for threads."""

from __future__ import annotations

import threading
from collections import Counter


class PeerCounters:
    """Named counts that only grow."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Adds to a count."""
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """All counts so far, by name in alphabetical order."""
        with self._lock:
            return dict(sorted(self._counts.items()))
