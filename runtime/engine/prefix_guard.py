"""A store that fails is left alone for a while: an outage costs one attempt, not one a request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime.engine.prefix_counts import PrefixCounts
from runtime.store.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
MOST_PAUSE_S = 8.0


class StoreGuard:
    """Calls of a store, whose failures end here. Thread-safe.

    A call that fails, or that is late, starts a pause in which none is made; pauses double up to
    ``MOST_PAUSE_S`` while the failures last. The link itself connects again. Threads share the
    store's counts, so a failure that two of them see at once may be taken for two.
    """

    def __init__(
        self,
        store: PrefixStore,
        counts: PrefixCounts,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard a store.

        Args:
            store: Open.
            counts: Told of failures and of calls that were not made.
            clock: Seconds.
        """
        self.store = store
        self._counts, self._clock = counts, clock
        self._lock = threading.Lock()
        self._pause_s = FIRST_PAUSE_S
        self._resume_at_s = -1.0

    @property
    def is_paused(self) -> bool:
        """Whether calls are answered without the store."""
        return self._clock() < self._resume_at_s

    @contextmanager
    def call(self, doing: str) -> Iterator[PrefixStore | None]:
        """The store, for one call; None while it is left alone. Errors inside end here."""
        if self.is_paused:
            self._counts.add("calls_paused")
            yield None
            return
        before = self._num_failures
        try:
            yield self.store
        except Exception as error:
            self.fail(doing, type(error).__name__)
            return
        if self._num_failures > before:
            self.fail(doing, "unavailable or late")
        else:
            self._work()

    def fail(self, doing: str, why: str) -> None:
        """Begin a pause."""
        self._counts.add("store_failures")
        with self._lock:
            if self.is_paused:
                return
            pause_s = self._pause_s
            self._resume_at_s = self._clock() + pause_s
            self._pause_s = min(2 * pause_s, MOST_PAUSE_S)
        if pause_s == FIRST_PAUSE_S:
            logger.warning(
                "prefix store: failed to %s (%s); prompts are computed without it", doing, why
            )

    def _work(self) -> None:
        with self._lock:
            was_failing = self._pause_s > FIRST_PAUSE_S
            self._pause_s = FIRST_PAUSE_S
        if was_failing:
            logger.warning("prefix store: answers again")

    @property
    def _num_failures(self) -> int:
        counters = self.store.counters
        return counters["unavailable"] + counters["late"]
