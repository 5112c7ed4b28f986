"""What the log may say of errors, and how often."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Final

_MOST_KINDS: Final = 1000


def what_failed(error: BaseException) -> dict[str, str]:
    """Kind and place of an error, for the log; its text and variables could hold contents."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return {"kind": type(error).__name__, "place": place}


class Seldom:
    """Lets each kind of message through once in a while, so that no fault fills the log.

    Args:
        pause_s: Between two messages of a kind.
    """

    def __init__(self, pause_s: float = 60.0) -> None:
        self._pause_s = pause_s
        self._last_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def may_say(self, kind: str, *, now: float) -> bool:
        """Whether it is time for a message of this kind."""
        with self._lock:
            last_s = self._last_s.get(kind)
            if last_s is not None and now < last_s + self._pause_s:
                return False
            if last_s is None and len(self._last_s) >= _MOST_KINDS:
                self._last_s.clear()
            self._last_s[kind] = now
            return True
