"""The wall clock of a run, the only place of the engine that asks what time it is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RunClock:
    """Seconds since it was made, never decreasing."""

    _start_s: float = field(default_factory=time.monotonic)

    def __call__(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s
