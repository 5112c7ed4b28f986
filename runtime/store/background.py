"""A thread that works through a queue, in batches, until it is told to stop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from runtime.store.deadline import Deadline

Job = TypeVar("Job")


class Background(Generic[Job]):
    """Works off jobs in order, several at a time. An error of one batch does not end the thread."""

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], None],
        *,
        most_jobs: int,
        most_waiting: int,
        on_error: Callable[[BaseException], None],
        on_drop: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Start the thread.

        Args:
            name: Of the thread.
            work: Works off up to ``most_jobs`` jobs.
            most_jobs: Of one batch.
            most_waiting: Of all batches; older jobs are dropped for newer ones.
            on_error: Told of what a batch raised.
            on_drop: Told how many jobs were dropped.
        """
        self._work, self._most, self._on_error = work, most_jobs, on_error
        self._most_waiting, self._on_drop = most_waiting, on_drop
        self._jobs: deque[Job] = deque()
        self._num_added = self._num_done = 0
        self._is_stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, jobs: Iterable[Job]) -> int:
        """Queue jobs; the number to wait for. Ignored once stopping."""
        with self._changed:
            if not self._is_stopping:
                jobs = list(jobs)
                self._jobs.extend(jobs)
                self._num_added += len(jobs)
                too_many = max(0, len(self._jobs) - self._most_waiting)
                for _ in range(too_many):
                    self._jobs.popleft()
                self._num_done += too_many
                self._on_drop(too_many)
                self._changed.notify_all()
            return self._num_added

    def wait_for(self, number: int, deadline: Deadline) -> bool:
        """Wait until the jobs up to that number are worked off; False if time ran out."""
        with self._changed:
            while self._num_done < number:
                if deadline.is_over or not self._thread.is_alive():
                    return False
                self._changed.wait(deadline.left_s())
            return True

    @property
    def num_added(self) -> int:
        """Jobs ever queued."""
        return self._num_added

    @property
    def num_waiting(self) -> int:
        """Jobs that are not worked off."""
        return self._num_added - self._num_done

    def stop(self, deadline: Deadline) -> bool:
        """Work off what is queued, within the deadline, then end; whether all of it was done."""
        is_done = self.wait_for(self._num_added, deadline)
        with self._changed:
            self._is_stopping = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(max(1.0, deadline.left_s()))
        return is_done

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_stopping:
                    self._changed.wait()
                if self._is_stopping:
                    return
                count = min(self._most, len(self._jobs))
                batch = [self._jobs.popleft() for _ in range(count)]
            try:
                self._work(batch)
            except Exception as error:
                self._on_error(error)
            finally:
                with self._changed:
                    self._num_done += len(batch)
                    self._changed.notify_all()
