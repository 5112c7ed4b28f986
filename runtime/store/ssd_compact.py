"""Move live records out of mostly dead segments, so that their files can go."""

from __future__ import annotations

from collections.abc import Callable

from runtime.store.deadline import Deadline
from runtime.store.ssd_layout import Place
from runtime.store.ssd_ledger import Ledger
from runtime.store.ssd_log import NoRoomError, SegmentLog
from runtime.store.ssd_read import Fault, read_record
from runtime.store.ssd_segments import SegmentFiles


class Compactor:
    """Copies records within one log.

    A crash leaves the old or the new place of a record in the index, both whole: the old file is
    unlinked only after the index names the new one.

    Args:
        log: The log; its lock is held by whoever calls.
        files: The segment files.
        ledger: What is held.
        store: Id of the store.
        drop: Told of records that turn out bad.
    """

    def __init__(
        self,
        log: SegmentLog,
        files: SegmentFiles,
        ledger: Ledger,
        store: bytes,
        drop: Callable[[Place, Fault], None],
    ) -> None:
        self._log = log
        self._files = files
        self._ledger = ledger
        self._store = store
        self._drop = drop

    def free(self, wanted_bytes: int, deadline: Deadline, min_dead_share: float = 0.0) -> int:
        """Free about ``wanted_bytes``, dead segments first, then by copying; bytes freed.

        Raises:
            OSError: If the disk fails on the way; what was freed until then stays so.
        """
        before = self._ledger.used_bytes
        if self._ledger.dead():
            self._raise(self._log.commit([])[1])
        for segment in self._ledger.mostly_dead(min_dead_share):
            if before - self._ledger.used_bytes >= wanted_bytes or deadline.is_over:
                break
            self._empty_piecewise(segment, deadline)
        return before - self._ledger.used_bytes

    def fit(self, limit_bytes: int, deadline: Deadline) -> int:
        """Let blocks go, the deepest first, until the live ones fit; how many went.

        Raises:
            OSError: If the disk fails while room is made.
        """
        excess = self._ledger.live_bytes - limit_bytes
        removed = 0
        if excess > 0:
            for place in reversed(self._ledger.places()):
                if excess <= 0:
                    break
                removed += self._ledger.remove(place.info.key)
                excess -= place.size_bytes
        self.free(max(0, self._log.missing_bytes(0)), deadline)
        return removed

    def _empty_piecewise(self, segment: int, deadline: Deadline) -> None:
        while True:
            before = self._ledger.used_bytes
            if self._empty(segment, deadline) or self._ledger.used_bytes >= before:
                return

    def _empty(self, segment: int, deadline: Deadline) -> bool:
        """Move what lives in a segment and unlink it; False if that could not be finished.

        Begins at the end and cuts off what was moved, so that a segment that is too large to be
        moved at once (the settings were others then) goes piece by piece.
        """
        if segment == self._log.active:
            self._log.seal()
        moved: list[tuple[Place, Place]] = []
        error: Exception | None = None
        is_whole = True
        for place in reversed(self._ledger.places_in(segment)):
            try:
                new = self._move(place, deadline)
            except (OSError, NoRoomError) as failed:
                error, is_whole = failed, False
                break
            if new is not None:
                moved.append((place, new))
            elif deadline.is_over:
                is_whole = False
                break
        self._finish(moved)
        if isinstance(error, OSError):
            raise error
        self._raise(self._log.commit([])[1])
        if not is_whole:
            self._log.trim(segment)
        return is_whole

    def _move(self, place: Place, deadline: Deadline) -> Place | None:
        data = memoryview(bytearray(place.info.length))
        fault = read_record(self._files, self._store, place, data, deadline)
        if fault is None:
            return self._log.append(place.info, data, is_move=True)
        if fault != "late":
            self._drop(place, fault)
        return None

    def _finish(self, moved: list[tuple[Place, Place]]) -> None:
        durable, error = self._log.commit([new for _, new in moved])
        kept = {place.info.key for place in durable}
        for old, new in moved:
            if new.info.key in kept:
                self._ledger.publish(new, replaces=old)
            else:
                self._ledger.withdraw(new)
        self._raise(error)

    @staticmethod
    def _raise(error: Exception | None) -> None:
        if error is not None:
            raise error if isinstance(error, OSError) else OSError(str(error))
