"""What has happened in a store, as counts that only grow."""

from __future__ import annotations

import threading
from collections.abc import Mapping


class Counters:
    """Named counts; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        if count:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + count

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def all(self) -> Mapping[str, int]:
        """A copy of all counts, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))
