"""Nodes that failed lately are left alone for a while, longer each time.

After a failure a node is not asked again for 0.25 s, after the next 0.5 s, and so on up to 10 s.
When that time is over one caller may try; the others wait for its result. Signs of life do not
clear a suspicion, since a node whose data path hangs may well answer them: only success does, or
a new start of the node.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class _Suspicion:
    failures: int
    until_s: float


class Suspects:
    """Who is left alone, and until when; safe for threads.

    Args:
        first_s: Pause after a first failure.
        most_s: Longest pause.
    """

    def __init__(self, first_s: float = 0.25, most_s: float = 10.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._suspicions: dict[str, _Suspicion] = {}
        self._lock = threading.Lock()

    def may_try(self, node: str, *, now: float) -> bool:
        """Whether to ask this node; of a suspect only one caller per pause hears yes."""
        with self._lock:
            suspicion = self._suspicions.get(node)
            if suspicion is None:
                return True
            if now < suspicion.until_s:
                return False
            suspicion.until_s = now + self._pause_s(suspicion.failures)
            return True

    def failed(self, node: str, *, now: float) -> None:
        """A request to this node failed or was late."""
        with self._lock:
            suspicion = self._suspicions.setdefault(node, _Suspicion(0, now))
            # Several requests that were under way together count as one failure.
            if now >= suspicion.until_s or suspicion.failures == 0:
                suspicion.failures += 1
            suspicion.until_s = now + self._pause_s(suspicion.failures)

    def clear(self, node: str) -> None:
        """A request to this node succeeded, or it started anew."""
        # Read without the lock: this is on the path of every request.
        if node in self._suspicions:
            with self._lock:
                self._suspicions.pop(node, None)

    def is_suspect(self, node: str) -> bool:
        """Whether the last request to this node failed."""
        return node in self._suspicions

    def names(self) -> tuple[str, ...]:
        """All suspects by name."""
        with self._lock:
            return tuple(sorted(self._suspicions))

    def _pause_s(self, failures: int) -> float:
        return float(min(self._most_s, self._first_s * 2.0 ** min(failures - 1, 30)))
