"""Ctrl-C during a replay: the first one ends it between two steps, so that it can be written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopped_by_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield ``is_stopped``; a second Ctrl-C interrupts as ever.

    Outside the main thread signals cannot be caught: then nothing stops it.
    """
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)
