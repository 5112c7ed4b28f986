"""Calls of a node that run while it closes: they end well, and no new one begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreUnavailableError

_SAID: Final = "the store is closed"
_Phase = Literal["open", "closing", "closed"]


class Calls:
    """Counts the calls that run: open, then closing (those that run may end), then closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self._phase: _Phase = "open"

    @contextmanager
    def running(self) -> Iterator[None]:
        """One call.

        Raises:
            StoreUnavailableError: If the node is closing or closed, or was closed under the call.
        """
        with self._changed:
            if self._phase != "open":
                raise StoreUnavailableError(_SAID)
            self._num_running += 1
        try:
            yield
        except ValueError as error:
            if self._is_closed():  # the memory went under a call that took too long
                raise StoreUnavailableError(_SAID) from error
            raise
        finally:
            self._end()

    @contextmanager
    def ending(self) -> Iterator[bool]:
        """A call that gives something back: also while closing. Whether there is anything left."""
        with self._changed:
            is_there = self._phase != "closed"
            self._num_running += is_there
        try:
            yield is_there
        except (StoreUnavailableError, ValueError):  # the same
            if not self._is_closed():
                raise
        finally:
            if is_there:
                self._end()

    def close(self) -> bool:
        """No new call begins from now on; False if that was so before."""
        with self._changed:
            was_open = self._phase == "open"
            if was_open:
                self._phase = "closing"
            return was_open

    def finish(self, deadline: Deadline) -> bool:
        """Wait for those that run, then let nothing be given back any more either.

        Returns:
            Whether all had ended by the deadline.
        """
        with self._changed:
            while self._num_running and not deadline.is_over:
                self._changed.wait(deadline.left_s())
            self._phase = "closed"
            return not self._num_running

    def _is_closed(self) -> bool:
        return self._phase == "closed"

    def _end(self) -> None:
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()
