"""Memory that one-sided reads land in, and what is kept back when a read cannot be ended.

A cancelled read may still write: the adapter holds the address. So reads never go straight into a
caller's buffer. They land here, and a span is given out again only after its read has ended.

    |--- span of a read ---|--- free ---|--- stuck: its read has not ended ---|--- free ---|
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.store.deadline import Deadline


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the landing memory: first byte and bytes."""

    start: int
    length: int


def address_of(view: memoryview) -> int:
    """Address in this process of a buffer that is not empty."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class LandingMemory:
    """Spans of one anonymous mapping; safe for threads.

    Args:
        size_bytes: Of the mapping.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._view = memoryview(mmap.mmap(-1, size_bytes))
        self.address = address_of(self._view)
        self._taken: list[Span] = []  # by start
        self._stuck: list[tuple[Span, Callable[[], bool]]] = []
        self._changed = threading.Condition()

    def view(self, span: Span) -> memoryview:
        """The bytes of a span."""
        return self._view[span.start : span.start + span.length]

    def take(self, length: int, deadline: Deadline) -> Span | None:
        """A span for one read; None if there is none until the deadline."""
        with self._changed:
            while True:
                self._sweep()
                span = self._first_fit(length)
                if span is not None:
                    self._taken.append(span)
                    self._taken.sort(key=lambda one: one.start)
                    return span
                left_s = deadline.left_s()
                if left_s == 0 or length > self.size_bytes:
                    return None
                # Stuck reads end without a word; look after them now and then.
                self._changed.wait(min(left_s, 0.05))

    def give_back(self, span: Span) -> None:
        """The read of this span has ended."""
        with self._changed:
            self._taken.remove(span)
            self._changed.notify_all()

    def keep_back(self, span: Span, has_ended: Callable[[], bool]) -> None:
        """The read of this span could not be ended; it is given back once has_ended says so."""
        with self._changed:
            self._stuck.append((span, has_ended))

    @property
    def stuck_bytes(self) -> int:
        """Bytes kept back."""
        with self._changed:
            return sum(span.length for span, _ in self._stuck)

    def _sweep(self) -> None:
        ended = [span for span, has_ended in self._stuck if has_ended()]
        if ended:
            self._stuck = [(span, end) for span, end in self._stuck if span not in ended]
            self._taken = [span for span in self._taken if span not in ended]

    def _first_fit(self, length: int) -> Span | None:
        start = 0
        for span in self._taken:
            if span.start - start >= length:
                return Span(start, length)
            start = span.start + span.length
        return Span(start, length) if self.size_bytes - start >= length else None
