"""What a folder holds when it is opened: the index is the truth, files are cut down to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import lmdb

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.ssd_index import BlockIndex, IndexWriteError
from runtime.store.ssd_layout import PAGE_BYTES, Place, is_segment, unpack_record
from runtime.store.ssd_ledger import Ledger
from runtime.store.ssd_read import read_record
from runtime.store.ssd_segments import SegmentFiles
from runtime.store.ssd_tally import Tally

_CHECK_S = 3600.0


def recover(
    files: SegmentFiles, index: BlockIndex, ledger: Ledger, tally: Tally, store: bytes
) -> int:
    """Fill an empty ledger from a folder; the first unused segment id.

    Entries whose segment is missing or too short are dropped and counted. Bytes behind the last
    entry of a segment were never acknowledged: they are cut off, and files without an entry go. An
    index that is damaged or lost is written anew from the record headers in the segments.

    Raises:
        StoreSetupError: If the index can be neither opened nor written anew.
        OSError: If the folder cannot be read.
    """
    sizes = files.sizes()
    places, next_segment = _read_index(files, index, tally, store, sizes)
    next_segment = max(next_segment, *(segment + 1 for segment in sizes), 1)
    for segment, size in sizes.items():
        ledger.set_file_bytes(segment, size)
    whole: list[Place] = []
    ends: dict[int, int] = {}
    for place in places:
        segment, end = place.segment, place.end
        if end <= sizes.get(segment, -1):
            whole.append(place)
            if end > ends.get(segment, 0):
                ends[segment] = end
        else:
            tally.add("dropped_torn" if segment in sizes else "dropped_missing")
            ledger.doubt([place.info.key])
    ledger.load(whole)
    _cut(files, ledger, tally, sizes, ends)
    return next_segment


def _cut(
    files: SegmentFiles,
    ledger: Ledger,
    tally: Tally,
    sizes: dict[int, int],
    ends: dict[int, int],
) -> None:
    for segment, size in sizes.items():
        end = ends.get(segment)
        if end == size:
            continue
        with suppress(OSError):  # what cannot be cut stays counted as dead
            if end is None:
                files.unlink(segment)
                ledger.forget_segment(segment)
                tally.add("segments_orphaned")
            else:
                files.truncate(segment, end)
                ledger.set_file_bytes(segment, end)
                tally.add("tails_cut")


def _read_index(
    files: SegmentFiles, index: BlockIndex, tally: Tally, store: bytes, sizes: dict[int, int]
) -> tuple[Sequence[Place], int]:
    if index.is_readable():
        try:
            index.open()
            places, bad, next_segment = index.load()
        except lmdb.Error:
            pass
        else:
            if next_segment:
                tally.add("dropped_index", bad)
                return places, next_segment
            if not sizes:
                _write_anew(index, (), 1)
                return (), 1
    tally.add("index_rebuilt")
    index.set_aside()
    places = list({p.info.key: p for p in _scan(files, store, sizes)}.values())
    next_segment = max(sizes, default=0) + 1
    _write_anew(index, places, next_segment)
    return places, next_segment


def _write_anew(index: BlockIndex, places: Sequence[Place], next_segment: int) -> None:
    try:
        index.open()
        index.commit(places, (), next_segment)
    except IndexWriteError as error:
        raise StoreSetupError(f"{index.folder}: cannot write the index: {error}") from error


def _scan(files: SegmentFiles, store: bytes, sizes: dict[int, int]) -> Iterator[Place]:
    """Places of all records that the segments hold, oldest first.

    A segment is synced before the next is begun, so only the newest can hold records whose data
    never reached the disk: theirs are read. All others are checked, as always, when they are.
    """
    newest = max(sizes, default=0)
    for segment, size in sizes.items():
        for place in _headers(files, store, segment, size):
            if segment != newest or _is_whole(files, store, place):
                yield place


def _is_whole(files: SegmentFiles, store: bytes, place: Place) -> bool:
    data = memoryview(bytearray(place.info.length))
    return read_record(files, store, place, data, Deadline.after(_CHECK_S)) is None


def _headers(files: SegmentFiles, store: bytes, segment: int, size: int) -> Iterator[Place]:
    descriptor = files.open(segment)
    page = bytearray(PAGE_BYTES)
    offset = PAGE_BYTES
    try:
        while offset + PAGE_BYTES <= size:
            if files.read(descriptor, [page], offset) < PAGE_BYTES:
                return
            place = unpack_record(store, page)
            is_here = place is not None and (place.segment, place.offset) == (segment, offset)
            if place is not None and is_here and place.end <= size:
                yield place
                offset = place.end
            else:
                offset += PAGE_BYTES
    finally:
        files.close(descriptor)


def damaged_headers(files: SegmentFiles, store: bytes) -> int:
    """How many segment files do not begin with their own header."""
    damaged = 0
    for segment in files.sizes():
        page = bytearray(PAGE_BYTES)
        try:
            descriptor = files.open(segment)
        except FileNotFoundError:
            continue
        try:
            files.read(descriptor, [page], 0)
        finally:
            files.close(descriptor)
        damaged += not is_segment(page, store, segment)
    return damaged
