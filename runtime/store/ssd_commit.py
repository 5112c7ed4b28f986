"""Writes of all callers, made durable together by one thread.

Whatever waits when the thread comes round goes into one batch: one sync, one index transaction. The
thread also is what lets a caller leave at its deadline while the disk hangs; blocks of a caller who
left are not entered into the index.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.ssd_compact import Compactor
from runtime.store.ssd_health import Backoff
from runtime.store.ssd_layout import Place, record_bytes
from runtime.store.ssd_ledger import Ledger
from runtime.store.ssd_log import NoRoomError, SegmentLog
from runtime.store.ssd_tally import Tally

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOST_WAITING = 256
# Of one batch. After a failed sync or transaction it is halved: on a disk whose quota is used up
# only a smaller batch leaves the index room.
_MOST_BLOCKS = 1 << 16
_LOG = logging.getLogger(__name__)


class _Job:
    __slots__ = ("blocks", "covered", "deadline", "is_abandoned", "is_done")

    def __init__(self, blocks: Sequence[tuple[BlockInfo, memoryview]], deadline: Deadline) -> None:
        self.blocks = blocks
        self.deadline = deadline
        self.covered = 0
        self.is_abandoned = False
        self.is_done = threading.Event()


class Committer:
    """The thread that writes.

    Args:
        log: Where to.
        ledger: What is held.
        compactor: Makes room.
        tally: Counts.
        health: Whether the disk takes writes.
    """

    def __init__(
        self,
        log: SegmentLog,
        ledger: Ledger,
        compactor: Compactor,
        tally: Tally,
        health: Backoff,
    ) -> None:
        self._log = log
        self._ledger = ledger
        self._compactor = compactor
        self._tally = tally
        self._health = health
        self._condition = threading.Condition()
        self._waiting: list[_Job] = []
        self._most_blocks = _MOST_BLOCKS
        self._is_reaping = False
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="ssd-commit", daemon=True)
        self._thread.start()

    def write(self, blocks: Sequence[tuple[BlockInfo, memoryview]], deadline: Deadline) -> None:
        """Return once the blocks were dealt with, or at the deadline; the ledger knows how far."""
        job = _Job(blocks, deadline)
        with self._condition:
            if self._is_stopped or len(self._waiting) >= _MOST_WAITING:
                self._tally.add("writes_busy")
                return
            self._waiting.append(job)
            self._condition.notify()
        if not job.is_done.wait(deadline.left_s()):
            with self._condition:
                if not job.is_done.is_set():
                    job.is_abandoned = True
                    self._tally.add("writes_late")

    def reap(self) -> None:
        """Have removals committed and dead segments unlinked soon."""
        with self._condition:
            self._is_reaping = True
            self._condition.notify()

    def stop(self, deadline: Deadline) -> bool:
        """Finish what waits; whether the thread ended in time."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify()
        self._thread.join(deadline.left_s())
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._waiting or self._is_reaping or self._is_stopped):
                    self._condition.wait()
                jobs, self._waiting = self._waiting, []
                self._is_reaping = False
                if not jobs and self._is_stopped:
                    return
                if not jobs and self._health.is_degraded:
                    continue  # the next write that is tried sees to it
            try:
                with self._log.lock:
                    self._batch(jobs)
            except Exception:
                _LOG.exception("a batch of the SSD tier failed")
                self._failed(None)
            finally:
                for job in jobs:
                    job.blocks = ()
                    job.is_done.set()

    def _batch(self, jobs: Sequence[_Job]) -> None:
        fresh: dict[bytes, tuple[_Job, Place]] = {}
        error: Exception | None = None
        if self._ledger.dead():
            self._log.commit([])  # on a full disk this is where room comes from
        for job in jobs:
            try:
                self._append(job, fresh, is_readonly=error is not None)
            except OSError as failed:
                error = failed
        with self._condition:
            left = [place for job, place in fresh.values() if job.is_abandoned]
        for place in left:
            self._ledger.withdraw(place)
            del fresh[place.info.key]
        durable, failed_commit = self._log.commit([place for _, place in fresh.values()])
        self._settle(fresh, durable)
        if error or failed_commit:
            self._failed(error or failed_commit)
            self._log.shed()
            self._most_blocks = max(1, len(fresh) // 2) if failed_commit else self._most_blocks
        elif durable:
            self._health.succeeded()
            self._most_blocks = min(_MOST_BLOCKS, 2 * self._most_blocks)

    def _append(
        self, job: _Job, fresh: dict[bytes, tuple[_Job, Place]], *, is_readonly: bool
    ) -> None:
        for info, data in job.blocks:
            if job.is_abandoned or job.deadline.is_over:
                return
            held = self._ledger.get(info.key) or (fresh[info.key][1] if info.key in fresh else None)
            if held is not None:
                if held.info.length != info.length:
                    self._tally.add("writes_mismatched")
                    return
                continue
            if is_readonly or len(fresh) >= self._most_blocks:
                return
            if checksum(data) != info.crc:
                self._tally.add("writes_bad_checksum")
                return
            try:
                place = self._make_place(info, data, job.deadline)
            except NoRoomError:
                self._tally.add("writes_full")
                return
            fresh[info.key] = (job, place)

    def _make_place(self, info: BlockInfo, data: memoryview, deadline: Deadline) -> Place:
        try:
            return self._log.append(info, data)
        except NoRoomError:
            wanted = self._log.missing_bytes(record_bytes(info.length))
            if self._compactor.free(wanted, deadline) < wanted:
                raise
            return self._log.append(info, data)

    def _settle(self, fresh: dict[bytes, tuple[_Job, Place]], durable: Sequence[Place]) -> None:
        kept = {place.info.key for place in durable}
        blocks = size = 0
        # Whoever leaves before this gets nothing, whoever leaves after it finds all in the ledger.
        with self._condition:
            for key, (job, place) in fresh.items():
                if key not in kept:
                    self._ledger.withdraw(place)
                    continue
                self._ledger.publish(place, is_wanted=not job.is_abandoned)
                if job.is_abandoned:
                    self._is_reaping = True
                    continue
                blocks += 1
                size += place.info.length
        self._tally.add("blocks_written", blocks)
        self._tally.add("bytes_written", size)

    def _failed(self, error: Exception | None) -> None:
        is_full = isinstance(error, OSError) and error.errno in _NO_ROOM
        self._tally.add("disk_full" if is_full else "write_errors")
        self._health.failed()
