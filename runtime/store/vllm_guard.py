"""The store as an engine may rely on it: absent, dying or back, no call raises or piles up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from runtime.store.errors import StoreError
from runtime.store.found import Found
from runtime.store.store import PrefixStore
from runtime.store.vllm_counts import Counts

logger = logging.getLogger("vllm.ptstore")


class GuardedStore:
    """Opens a store when first needed, and leaves it alone for a while after it failed.

    After a failure no call is made for ``retry_s``, doubling up to 30 s while it lasts: an absent
    store costs its users one attempt, not one each.

    Args:
        opener: Opens the store or raises ``StoreError`` or ``OSError``.
        counts: Told of every failure.
        retry_s: Seconds until the next attempt.
    """

    def __init__(
        self, opener: Callable[[], PrefixStore], counts: Counts, *, retry_s: float = 1.0
    ) -> None:
        self._opener = opener
        self._counts = counts
        self._retry_s = retry_s
        self._pause_s = retry_s
        self._resume_at_s = 0.0
        self._store: PrefixStore | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def is_suspended(self) -> bool:
        """Whether calls are answered without the store."""
        return self._is_closed or time.monotonic() < self._resume_at_s

    def open(self) -> bool:
        """Open the store now; whether it is open."""
        return self._opened() is not None

    def lookup(self, keys: Sequence[bytes], deadline_s: float) -> int:
        """Leading keys that are stored; 0 if the store cannot tell."""
        with self._call("look up") as store:
            if store is not None:
                return store.lookup(keys, deadline_s=deadline_s)
        return 0

    @contextmanager
    def load(
        self, keys: Sequence[bytes], deadline_s: float, *, tenant: bytes
    ) -> Iterator[Found | None]:
        """The leading stored blocks, held inside the context; None if the store cannot tell."""
        found: Found | None = None
        with self._call("load") as store:
            if store is not None:
                found = store.load(keys, deadline_s=deadline_s, tenant=tenant)
        try:
            yield found
        finally:
            if found is not None:
                found.close()

    def put(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Any],
        *,
        first: int,
        deadline_s: float,
        tenant: bytes,
    ) -> tuple[int, str]:
        """Store ``keys[first:]``; how many were kept, and why not more."""
        with self._call("put") as store:
            if store is not None:
                put = store.put(keys, blocks, first=first, deadline_s=deadline_s, tenant=tenant)
                return put.stored, put.reason
        return 0, "unavailable"

    def close(self) -> None:
        """Give the store up for good."""
        with self._lock:
            self._is_closed = True
            store, self._store = self._store, None
        _close(store)

    def suspend(self, doing: str, error: BaseException | str) -> None:
        """Note a failure: no calls for a while."""
        self._counts.add("store_errors")
        with self._lock:
            was_suspended = time.monotonic() < self._resume_at_s
            self._resume_at_s = time.monotonic() + self._pause_s
            if not was_suspended:
                logger.warning(
                    "prefix store failed to %s (%s); requests are computed without it, "
                    "next attempt in %.1f s",
                    doing,
                    error,
                    self._pause_s,
                )
                self._pause_s = min(30.0, 2 * self._pause_s)

    @contextmanager
    def _call(self, doing: str) -> Iterator[PrefixStore | None]:
        """The open store, or None while there is none; its failures end here."""
        store = self._opened()
        if store is None:
            yield None
            return
        failures_before = store.counters["unavailable"]
        try:
            yield store
        except (StoreError, OSError) as error:
            self.suspend(doing, error)
            return
        if store.counters["unavailable"] > failures_before:
            self.suspend(doing, "unavailable")
        else:
            self._pause_s = self._retry_s

    def _opened(self) -> PrefixStore | None:
        if self.is_suspended:
            self._counts.add("store_suspended")
            return None
        with self._lock:
            if self._store is not None or self._is_closed:
                return self._store
            try:
                self._store = self._opener()
            except (StoreError, OSError) as caught:
                error = caught
            else:
                return self._store
        self.suspend("open", error)
        return None


def _close(store: PrefixStore | None) -> None:
    if store is not None:
        try:
            store.close()
        except (StoreError, OSError) as error:
            logger.warning("prefix store did not close cleanly (%s)", error)
