"""The SSD tier of one node: blocks that survive the process, in segment files with an LMDB index.

Blocks are appended to segment files and become visible once their data are synced and the index
is committed. Which blocks go is decided elsewhere; here dead segments are unlinked and mostly dead
ones compacted. Nothing read is believed unchecked, nothing waits longer than its deadline, and a
failing disk makes fewer blocks durable, never wrong ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.ssd_commit import Committer
from runtime.store.ssd_compact import Compactor
from runtime.store.ssd_folder import SsdFolder, claim
from runtime.store.ssd_health import Backoff
from runtime.store.ssd_index import BlockIndex
from runtime.store.ssd_layout import PAGE_BYTES, record_bytes, require_storable
from runtime.store.ssd_ledger import Ledger
from runtime.store.ssd_log import SegmentLog
from runtime.store.ssd_reader import RecordReader
from runtime.store.ssd_recovery import recover
from runtime.store.ssd_segments import SegmentFiles
from runtime.store.ssd_tally import Tally
from runtime.store.ssd_verify import VerifyReport, verify

_LEAST_CAPACITY_BYTES = 1 << 20
_LEAST_SEGMENTS = 16
_CLOSE_S = 30.0


class SsdTier:
    """Use ``open``. All methods may be called from any thread."""

    def __init__(
        self,
        folder: SsdFolder,
        files: SegmentFiles,
        index: BlockIndex,
        *,
        capacity_bytes: int,
        segment_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._files = files
        self._index = index
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self._ledger = Ledger()
        self._tally = Tally()
        self._is_closed = False
        self._write_health = Backoff(clock)
        self._read_health = Backoff(clock)
        if not folder.has_room:
            self._write_health.failed()
        next_segment = recover(files, index, self._ledger, self._tally, folder.store)
        self._log = SegmentLog(
            files,
            index,
            self._ledger,
            store=folder.store,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            next_segment=next_segment,
        )
        self._reader = RecordReader(
            files, self._ledger, self._tally, self._read_health, folder.store, self._reap
        )
        drop = self._reader.drop
        self._compactor = Compactor(self._log, files, self._ledger, folder.store, drop)
        self._fit()
        self._committer = Committer(
            self._log, self._ledger, self._compactor, self._tally, self._write_health
        )

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        capacity_bytes: int,
        segment_bytes: int = 256 << 20,
        files: Callable[[Path], SegmentFiles] = SegmentFiles,
        index: Callable[[Path, bytes], BlockIndex] = BlockIndex,
        clock: Callable[[], float] = time.monotonic,
    ) -> SsdTier:
        """Open or create the tier in a folder of its own.

        Args:
            folder: Created if absent; held by this process until ``close``.
            capacity_bytes: Most bytes of all segment files, headers and dead records included;
                the index (some 300 bytes a block) comes on top.
            segment_bytes: Size of a segment file; at most a sixteenth of the capacity is used.
            files: Makes the layer of file calls.
            index: Makes the index from its folder and the id of the store.
            clock: Monotonic seconds, for the wait after a failure.

        Raises:
            StoreSetupError: If the folder is held by another tier, cannot be written and synced,
                or has another format or version; or a size is too small.
        """
        if capacity_bytes < _LEAST_CAPACITY_BYTES:
            raise StoreSetupError(
                f"{folder}: SSD capacity is {capacity_bytes} bytes, "
                f"at least {_LEAST_CAPACITY_BYTES} are needed"
            )
        if segment_bytes < 4 * PAGE_BYTES:
            raise StoreSetupError(
                f"{folder}: SSD segments of {segment_bytes} bytes, "
                f"at least {4 * PAGE_BYTES} are needed"
            )
        segment_bytes = min(segment_bytes, capacity_bytes // _LEAST_SEGMENTS)
        claimed = claim(folder)
        opened = index(claimed.index, claimed.store)
        try:
            return cls(
                claimed,
                files(claimed.segments),
                opened,
                capacity_bytes=capacity_bytes,
                segment_bytes=segment_bytes // PAGE_BYTES * PAGE_BYTES,
                clock=clock,
            )
        except BaseException as error:
            opened.close()
            claimed.release()
            if isinstance(error, OSError):
                said = error.strerror or error
                raise StoreSetupError(f"{folder}: cannot be opened: {said}") from error
            raise

    @staticmethod
    def record_bytes(length: int) -> int:
        """Bytes that a block of ``length`` bytes takes of the capacity."""
        return record_bytes(length)

    @property
    def live_limit_bytes(self) -> int:
        """Record bytes that can be held without compaction running all the time.

        Two segments are kept free to move records, and a sixteenth of the rest for dead ones.
        """
        return (self.capacity_bytes - 2 * self.segment_bytes) * 15 // 16

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files: live, dead and being written."""
        return self._ledger.used_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the records of all blocks held, headers and padding included."""
        return self._ledger.live_bytes

    @property
    def is_degraded(self) -> bool:
        """Whether the last write or read met a failing or full disk."""
        return self._write_health.is_degraded or self._read_health.is_degraded

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened since ``open``; all start at 0 and only grow."""
        return self._tally.snapshot()

    def entries(self) -> Iterator[BlockInfo]:
        """All blocks held, parents before their children."""
        return (place.info for place in self._ledger.places())

    def info(self, key: bytes) -> BlockInfo | None:
        """What was said of a block when it was written; None if it is not held."""
        place = self._ledger.get(key)
        return None if place is None else place.info

    def __contains__(self, key: bytes) -> bool:
        return self._ledger.get(key) is not None

    def __len__(self) -> int:
        return len(self._ledger)

    def write(self, blocks: Sequence[tuple[BlockInfo, memoryview]], deadline: Deadline) -> int:
        """Make blocks durable, in order; full or failing disks are counted, not raised.

        The caller may reuse the buffers once this returned: a block whose buffer changes before
        it is on disk is never entered into the index.

        Returns:
            How many leading blocks are durable; those held already count as such.

        Raises:
            ValueError: If what is said of a block cannot be stored or does not fit its buffer.
        """
        for info, data in blocks:
            require_storable(info)
            if data.nbytes != info.length:
                raise ValueError(f"a block of {info.length} bytes comes with {data.nbytes} bytes")
        todo = [(info, data.cast("B") if data.nbytes else data) for info, data in blocks]
        if self._durable(todo) < len(todo) and not self._is_closed:
            if self._write_health.may_try():
                self._committer.write(todo, deadline)
            else:
                self._tally.add("writes_skipped")
        return self._durable(todo)

    def _durable(self, blocks: Sequence[tuple[BlockInfo, memoryview]]) -> int:
        for count, (info, _) in enumerate(blocks):
            place = self._ledger.get(info.key)
            if place is None or place.info.length != info.length:
                return count
        return len(blocks)

    def read_into(
        self, key: bytes, destination: memoryview, deadline: Deadline
    ) -> BlockInfo | None:
        """Read a block into the front of ``destination``.

        Returns:
            The block as it was written; None for a miss, whatever the reason, and then the
            destination holds nothing of worth. A record that is missing, torn, another one's or
            damaged is dropped and counted.

        Raises:
            ValueError: If the destination cannot be written.
        """
        if destination.readonly:
            raise ValueError("the destination of a read is read-only")
        return None if self._is_closed else self._reader.read(key, destination, deadline)

    def _reap(self) -> None:
        self._committer.reap()

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget blocks at once; how many were held.

        The index learns of it with the next batch or soon after; until then a crash may bring
        them back. Segments without a live record are unlinked then.
        """
        removed = sum(self._ledger.remove(key) for key in keys)
        if removed and self._ledger.dead():
            self._committer.reap()
        return removed

    def compact(self, deadline: Deadline, min_dead_share: float = 0.3) -> int:
        """Move live records out of segments with that share of dead bytes or more.

        Returns:
            Bytes freed; fewer than there are when the deadline comes or the disk fails.
        """
        if self._is_closed or not self._log.lock.acquire(timeout=deadline.left_s()):
            return 0
        before = self._ledger.used_bytes
        try:
            self._compactor.free(before, deadline, min_dead_share)
        except OSError:
            self._tally.add("write_errors")
            self._write_health.failed()
        finally:
            freed = max(0, before - self._ledger.used_bytes)
            self._log.lock.release()
        self._tally.add("bytes_compacted", freed)
        return freed

    def verify(self, on_progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every block, count every byte; bad records are dropped and counted.

        Args:
            on_progress: Told how many of how many blocks were read, after each.
        """
        return verify(
            self._files,
            self._index,
            self._log,
            self._ledger,
            self._folder.store,
            self._reader.drop,
            on_progress,
        )

    def close(self) -> None:
        """Commit removals and let the folder go; further calls miss.

        A thread that hangs in the disk is left behind, with the folder locked.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline = Deadline.after(_CLOSE_S)
        if self._committer.stop(deadline) and self._log.lock.acquire(timeout=deadline.left_s()):
            try:
                self._log.close()
            finally:
                self._log.lock.release()
                self._folder.release()

    def _fit(self) -> None:
        """After the capacity was made smaller: let go what does not fit."""
        if self._ledger.used_bytes <= self.capacity_bytes:
            return
        before = len(self._ledger)
        try:
            self._compactor.fit(self.live_limit_bytes, Deadline.after(_CLOSE_S))
        except OSError:
            self._tally.add("write_errors")
            self._write_health.failed()
        self._tally.add("dropped_over_capacity", before - len(self._ledger))
