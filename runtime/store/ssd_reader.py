"""Reads of the SSD tier: find the record, check it, and know what to make of a fault."""

from __future__ import annotations

from collections.abc import Callable

from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.ssd_health import Backoff
from runtime.store.ssd_layout import Place
from runtime.store.ssd_ledger import Ledger
from runtime.store.ssd_read import Fault, read_record
from runtime.store.ssd_segments import SegmentFiles
from runtime.store.ssd_tally import Tally

# A record may be moved while it is looked for; more often than this in a row it is not.
_TRIES = 4


class RecordReader:
    """Reads by key.

    Args:
        files: The segment files.
        ledger: What is held.
        tally: Counts.
        health: Whether the disk gives.
        store: Id of the store.
        reap: Called after a record was dropped.
    """

    def __init__(
        self,
        files: SegmentFiles,
        ledger: Ledger,
        tally: Tally,
        health: Backoff,
        store: bytes,
        reap: Callable[[], None],
    ) -> None:
        self._files = files
        self._ledger = ledger
        self._tally = tally
        self._health = health
        self._store = store
        self._reap = reap

    def read(self, key: bytes, destination: memoryview, deadline: Deadline) -> BlockInfo | None:
        """Fill the front of ``destination``; None for a miss."""
        for _ in range(_TRIES):
            place = self._ledger.get(key)
            if (miss := self._miss(place, destination)) is not None or place is None:
                self._tally.add(miss or "reads_absent")
                return None
            try:
                fault = self._try(place, destination, deadline)
            except OSError:
                self._health.failed()
                self._tally.add("read_errors")
                return None
            if fault is None:
                self._tally.add("blocks_read")
                self._tally.add("bytes_read", place.info.length)
                return place.info
            if fault == "late":
                self._tally.add("reads_late")
                return None
            if self._ledger.get(key) is place:  # else it was moved while it was read
                self.drop(place, fault)
                self._reap()
                return None
        self._tally.add("reads_absent")
        return None

    def _miss(self, place: Place | None, destination: memoryview) -> str | None:
        if place is None:
            return "reads_absent"
        if destination.nbytes < place.info.length:
            return "reads_misfit"
        return None if self._health.may_try() else "reads_skipped"

    def _try(self, place: Place, destination: memoryview, deadline: Deadline) -> Fault | None:
        data = destination.cast("B")[: place.info.length]
        fault = read_record(self._files, self._store, place, data, deadline)
        if fault == "unreadable":
            self._health.failed()
        elif fault != "late":
            self._health.succeeded()
        return fault

    def drop(self, place: Place, fault: Fault) -> None:
        """Forget a bad record, unless its block lies elsewhere by now."""
        if self._ledger.remove(place.info.key, place):
            self._tally.add(f"dropped_{fault}")
