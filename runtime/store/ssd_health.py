"""When a disk that failed is tried again."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Backoff:
    """After a failure nothing is tried for a while; the while doubles with each further failure.

    Args:
        clock: Monotonic seconds.
        first_s: Wait after the first failure.
        longest_s: Longest wait.
    """

    def __init__(
        self, clock: Callable[[], float], *, first_s: float = 0.1, longest_s: float = 10.0
    ) -> None:
        self._clock = clock
        self._first_s = first_s
        self._longest_s = longest_s
        self._wait_s = 0.0
        self._due_s = 0.0
        self._lock = threading.Lock()

    @property
    def is_degraded(self) -> bool:
        """Whether the last try failed."""
        return self._wait_s > 0

    def may_try(self) -> bool:
        """Whether the disk may be used now; while it is degraded, one caller per wait gets True."""
        with self._lock:
            if not self._wait_s:
                return True
            if self._clock() < self._due_s:
                return False
            self._due_s = self._clock() + self._wait_s
            return True

    def failed(self) -> None:
        """The disk failed."""
        with self._lock:
            self._wait_s = min(self._longest_s, self._wait_s * 2 or self._first_s)
            self._due_s = self._clock() + self._wait_s

    def succeeded(self) -> None:
        """The disk worked."""
        if self._wait_s:
            with self._lock:
                self._wait_s = 0.0
