"""Read one record and believe nothing about it that was not checked."""

from __future__ import annotations

import errno
from typing import Literal

import crc32c

from runtime.store.deadline import Deadline
from runtime.store.ssd_layout import (
    HEADER_BYTES,
    PAGE_BYTES,
    Place,
    pack_record,
    unpack_record,
)
from runtime.store.ssd_segments import SegmentFiles

# A piece is checked while it is still in the core's cache.
PIECE_BYTES = 512 << 10

_DAMAGE = (errno.EIO, errno.EBADMSG, errno.EILSEQ)

Fault = Literal["missing", "torn", "header", "foreign", "data", "unreadable", "late"]


def read_record(
    files: SegmentFiles, store: bytes, place: Place, data: memoryview, deadline: Deadline
) -> Fault | None:
    """Fill ``data`` with the block at a place; None if every check passed.

    Args:
        files: The segments.
        store: Id of the store that wrote them.
        place: Where, and what is expected there.
        data: Writable bytes, exactly as many as the block has.
        deadline: When to give up; looked at between pieces.

    Returns:
        "missing" (no such segment), "torn" (the file ends early), "header" (damaged), "foreign"
        (a whole header of another record), "data" (checksum), "unreadable" (the disk reports
        damage), "late"; what ``data`` then holds is worthless.

    Raises:
        OSError: If the disk or the system fails in another way.
    """
    try:
        descriptor = files.open(place.segment)
    except FileNotFoundError:
        return "missing"
    try:
        return _read(files, descriptor, store, place, data, deadline)
    except OSError as error:
        if error.errno in _DAMAGE:
            return "unreadable"
        raise
    finally:
        files.close(descriptor)


def _read(
    files: SegmentFiles,
    descriptor: int,
    store: bytes,
    place: Place,
    data: memoryview,
    deadline: Deadline,
) -> Fault | None:
    files.read_ahead(descriptor)
    header = bytearray(PAGE_BYTES)
    crc = 0
    filled = 0
    buffers = [memoryview(header), data[:PIECE_BYTES]]
    offset = place.offset
    while True:
        if deadline.is_over:
            return "late"
        if not _fill(files, descriptor, buffers, offset):
            return "torn"
        if not filled and (fault := _wrong_header(store, place, header)):
            return fault
        piece = buffers[-1]
        crc = int(crc32c.crc32c(piece, crc))
        filled += len(piece)
        if filled >= len(data):
            break
        offset = place.offset + PAGE_BYTES + filled
        buffers = [data[filled : filled + PIECE_BYTES]]
    files.forget_cached(descriptor, place.offset, place.size_bytes)
    return None if crc == place.info.crc else "data"


def _fill(files: SegmentFiles, descriptor: int, buffers: list[memoryview], offset: int) -> bool:
    """Fill all buffers, by as many reads as it takes; False at the end of the file."""
    rest = [buffer for buffer in buffers if len(buffer)]
    while rest:
        count = files.read(descriptor, rest, offset)
        if count <= 0:
            return False
        offset += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
    return True


def _wrong_header(store: bytes, place: Place, header: bytearray) -> Fault | None:
    if header[:HEADER_BYTES] == pack_record(store, place):
        return None
    is_whole = unpack_record(store, memoryview(header)) is not None
    return "foreign" if is_whole else "header"
