"""The append-only log of the SSD tier: write records, make them durable, free dead segments.

The order that makes a crash harmless at any byte:

    records appended -> data synced (and the segment's name) -> index committed -> blocks visible
    records removed  -> index committed -> segment file unlinked

One thread at a time, whoever holds ``lock``.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from runtime.store.blocks import BlockInfo
from runtime.store.ssd_index import BlockIndex, IndexWriteError
from runtime.store.ssd_layout import (
    PAGE_BYTES,
    Buffer,
    Place,
    pack_record,
    pack_segment,
    record_bytes,
)
from runtime.store.ssd_ledger import Ledger
from runtime.store.ssd_segments import SegmentFiles

_ZEROS = bytes(PAGE_BYTES)

# Room that a transaction may need on the disk: some pages, and a leaf and its parents per entry.
_INDEX_BYTES = 256 << 10
_ENTRY_BYTES = 4 * PAGE_BYTES


class NoRoomError(Exception):
    """The capacity leaves no room for a record."""


class SegmentLog:
    """Segments, index and ledger, kept in step.

    Args:
        files: The segment files.
        index: The durable index.
        ledger: What is held, in memory.
        store: Id of the store.
        capacity_bytes: Most bytes of all segment files together.
        segment_bytes: Size at which a segment is closed; a longer record has one to itself. As
            much of the capacity is kept free for moving records.
        next_segment: First unused id.
    """

    def __init__(
        self,
        files: SegmentFiles,
        index: BlockIndex,
        ledger: Ledger,
        *,
        store: bytes,
        capacity_bytes: int,
        segment_bytes: int,
        next_segment: int,
    ) -> None:
        self.lock = threading.Lock()
        self._files = files
        self._index = index
        self._ledger = ledger
        self._store = store
        self._capacity_bytes = capacity_bytes
        self._segment_bytes = segment_bytes
        self._next_segment = next_segment
        self._active: int | None = None
        self._descriptor = -1
        self._end = 0
        self._synced_end = 0
        self._is_name_synced = True
        self._failed: dict[int, None] = {}
        self._uncommitted = 0

    @property
    def active(self) -> int | None:
        """Segment that is written to."""
        return self._active

    def missing_bytes(self, size: int) -> int:
        """Bytes to free before a record of ``size`` bytes fits; 0 or less if it does."""
        needed = size + (PAGE_BYTES if self._needs_new(size) else 0)
        return self._ledger.used_bytes + needed + self._segment_bytes - self._capacity_bytes

    def _needs_new(self, size: int) -> bool:
        if self._active is None:
            return True
        return self._end + size > max(self._segment_bytes, PAGE_BYTES + size)

    def _move_bytes(self) -> int:
        """What moving may use beyond other writes; all it needs in a folder that is over-full."""
        over = self._ledger.used_bytes - self._capacity_bytes
        return self._segment_bytes if over <= 0 else over + 3 * self._segment_bytes

    def append(self, info: BlockInfo, data: Buffer, *, is_move: bool = False) -> Place:
        """Write one record at the end of the log; it counts for nothing until ``commit``.

        Raises:
            NoRoomError: If the capacity has none left for it.
            OSError: If the disk refuses; what was written of the record is cut off.
        """
        size = record_bytes(info.length)
        if self.missing_bytes(size) > (self._move_bytes() if is_move else 0):
            raise NoRoomError
        self._require_disk(size)
        if self._needs_new(size):
            self.seal()
            self._begin()
        assert self._active is not None
        place = Place(self._active, self._end, info)
        header = pack_record(self._store, place).ljust(PAGE_BYTES, b"\0")
        padding = size - PAGE_BYTES - info.length
        self._write([header, data, memoryview(_ZEROS)[:padding]])
        self._ledger.appended(place)
        self._uncommitted += 1
        return place

    def _require_disk(self, size: int) -> None:
        """Leave the disk room for the index: data that cannot be entered there are of no use."""
        kept = _INDEX_BYTES + (self._uncommitted + 1) * _ENTRY_BYTES
        if self._files.free_bytes() < size + PAGE_BYTES + kept:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def commit(self, places: Sequence[Place]) -> tuple[list[Place], Exception | None]:
        """Make appended records durable, and whatever else the index has to learn; free segments.

        Returns:
            The places that are durable, still to be published or withdrawn like the others, and
            what failed.
        """
        error: Exception | None = None
        self._uncommitted = 0
        try:
            self._sync()
        except OSError as failed:
            error = failed
        good = [place for place in places if place.segment not in self._failed]
        if self._active is not None and self._ledger.is_dead(self._active):
            self._drop_active()  # nothing in it lives: it goes with the others
        unsaved = self._ledger.unsaved()
        if good or unsaved.puts or unsaved.deletes:
            try:
                self._index.commit([*unsaved.puts, *good], unsaved.deletes, self._next_segment)
            except IndexWriteError as failed:
                self._ledger.doubt(unsaved.deletes)
                self._ledger.doubt(place.info.key for place in (*unsaved.puts, *good))
                return [], failed
        self._unlink(unsaved.dead)
        return good, error

    def shed(self) -> None:
        """After a failure: give the disk back what is dead, although the index may not know yet.

        Should a crash come before it does, its entries for what is gone are dropped on opening.
        Nothing is given back while the index may name it as the place of a block that is held.
        """
        if self._ledger.is_in_doubt:
            return
        active = self._active
        with suppress(OSError):
            self.seal()
        self._unlink(self._ledger.dead())
        if active is not None and self._active is None:
            with suppress(OSError):
                self.trim(active)

    def trim(self, segment: int) -> None:
        """Cut a segment other than the active one behind its last live record.

        Raises:
            OSError: If the disk refuses.
        """
        places = self._ledger.places_in(segment)
        if places and segment != self._active and not self._ledger.is_pending(segment):
            self._files.truncate(segment, places[-1].end)
            self._ledger.set_file_bytes(segment, places[-1].end)

    def seal(self) -> None:
        """Close the active segment, synced.

        Raises:
            OSError: If the disk refuses; the segment's unsynced records will not be committed.
        """
        if self._active is None:
            return
        self._sync()
        self._drop_active()

    def close(self) -> None:
        """Commit what the index has to learn, as far as the disk allows."""
        with suppress(OSError):
            self.seal()
        self.commit([])
        self._index.close()

    def _begin(self) -> None:
        segment = self._next_segment
        self._next_segment += 1  # also if this fails: a name that is taken is not tried again
        self._descriptor = self._files.create(segment)
        self._active, self._end, self._synced_end = segment, 0, 0
        self._is_name_synced = False
        self._ledger.set_file_bytes(segment, 0)
        self._write([pack_segment(self._store, segment)])
        self._ledger.set_file_bytes(segment, self._end)

    def _write(self, buffers: Sequence[Buffer]) -> None:
        """Write all buffers at the end; after a failure the end is where it was."""
        assert self._active is not None
        rest: list[memoryview] = [memoryview(b).cast("B") for b in buffers if len(b)]
        offset = self._end
        try:
            while rest:
                count = self._files.write(self._descriptor, rest, offset)
                if count <= 0:
                    raise OSError("the disk takes no more bytes")
                offset += count
                while rest and count >= len(rest[0]):
                    count -= len(rest.pop(0))
                if count:
                    rest[0] = rest[0][count:]
        except OSError:
            self._cut()
            raise
        self._end = offset

    def _cut(self) -> None:
        """Cut the active segment behind its last whole record, or give it up."""
        assert self._active is not None
        try:
            self._files.truncate(self._active, self._end)
        except OSError:
            with suppress(OSError):
                size = self._files.size(self._active)
                self._ledger.set_file_bytes(self._active, size)
            self._fail_active()
            return
        if not self._end:  # not even its header: begin anew next time
            self._fail_active()

    def _sync(self) -> None:
        if self._active is None or (self._synced_end == self._end and self._is_name_synced):
            return
        try:
            self._files.sync(self._descriptor)
            if not self._is_name_synced:
                self._files.sync_folder()
                self._is_name_synced = True
        except OSError:
            # After a failed sync nobody knows which pages the disk has: never sync them again.
            self._fail_active()
            raise
        self._files.forget_cached(self._descriptor, self._synced_end, self._end - self._synced_end)
        self._synced_end = self._end

    def _fail_active(self) -> None:
        assert self._active is not None
        self._failed[self._active] = None
        self._drop_active()

    def _drop_active(self) -> None:
        with suppress(OSError):
            self._files.close(self._descriptor)
        self._active, self._descriptor = None, -1

    def _unlink(self, segments: Sequence[int]) -> None:
        for segment in segments:
            if segment == self._active:
                continue
            with suppress(OSError):
                self._files.unlink(segment)
                self._ledger.forget_segment(segment)
                self._failed.pop(segment, None)
