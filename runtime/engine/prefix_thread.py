"""A thread that moves blocks, one transfer after the other, and hands back what has ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from runtime.store.deadline import Deadline

Job = Callable[[], None]


class CopyThread:
    """Runs jobs in order of arrival. A daemon: a store that hangs keeps no process alive."""

    def __init__(self, name: str, on_done: Callable[[], None] | None = None) -> None:
        """Start the thread.

        Args:
            name: Of the thread.
            on_done: Called on it after every job.
        """
        self._on_done = on_done
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        """Have a job done, which raises nothing; after ``close`` it never is."""
        with self._changed:
            if not self._is_closed:
                self._waiting.append(job)
                self._changed.notify_all()

    def wait_for(self, is_over: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until jobs have made something true; False if time ran out."""
        with self._changed:
            return self._changed.wait_for(is_over, timeout=deadline.left_s())

    def close(self, deadline: Deadline) -> bool:
        """Drop what waits and let what runs end; False if it has not by the deadline."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(deadline.left_s())
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if self._is_closed:
                    return
                job = self._waiting.popleft()
            job()
            with self._changed:
                self._changed.notify_all()
            if self._on_done is not None:
                self._on_done()
