"""Every operation of the store ends by a deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass

from runtime.store.errors import DeadlineError


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock.

    Attributes:
        at_s: Monotonic seconds.
    """

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """That many seconds from now."""
        return cls(time.monotonic() + seconds)

    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.at_s

    def require(self, doing: str) -> float:
        """Seconds left.

        Raises:
            DeadlineError: If none are.
        """
        left_s = self.at_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(f"out of time while {doing}")
        return left_s

    def earlier(self, seconds: float) -> Deadline:
        """This deadline or that many seconds from now, whichever comes first."""
        return Deadline(min(self.at_s, time.monotonic() + seconds))
