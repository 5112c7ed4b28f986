"""Read everything, recount everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import lmdb

from runtime.store.deadline import Deadline
from runtime.store.ssd_index import BlockIndex
from runtime.store.ssd_layout import Place
from runtime.store.ssd_ledger import Ledger
from runtime.store.ssd_log import SegmentLog
from runtime.store.ssd_read import Fault, read_record
from runtime.store.ssd_recovery import damaged_headers
from runtime.store.ssd_segments import SegmentFiles

_BLOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found.

    Attributes:
        blocks: Blocks that passed every check.
        bad: Records that did not, by what was wrong; dropped, except "late" ones.
        damaged_segment_headers: Segment files that do not begin with their own header.
        wrong_index_entries: Entries that differ from what is held, or are absent.
        used_bytes: Bytes of all segment files, recounted.
        live_bytes: Bytes of all live records, recounted.
        is_exact: Whether both are what the tier says of itself.
    """

    blocks: int
    bad: Mapping[str, int]
    damaged_segment_headers: int
    wrong_index_entries: int
    used_bytes: int
    live_bytes: int
    is_exact: bool

    @property
    def is_good(self) -> bool:
        """Whether nothing was amiss."""
        wrong = self.damaged_segment_headers + self.wrong_index_entries
        return self.is_exact and not self.bad and not wrong


def verify(
    files: SegmentFiles,
    index: BlockIndex,
    log: SegmentLog,
    ledger: Ledger,
    store: bytes,
    drop: Callable[[Place, Fault], None],
    on_progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """Check the tier that these parts make up; blocks are read while it goes on working."""
    places = sorted(ledger.places(), key=lambda place: (place.segment, place.offset))
    bad: dict[str, int] = {}
    good = 0
    for count, place in enumerate(places, start=1):
        fault = _fault(files, store, place)
        if fault is None:
            good += 1
        elif ledger.get(place.info.key) is place:  # else it was moved or removed meanwhile
            bad[fault] = bad.get(fault, 0) + 1
            if fault != "late":
                drop(place, fault)
        if on_progress is not None:
            on_progress(count, len(places))
    with log.lock:
        log.commit([])
        sizes = files.sizes()
        held = {place.info.key: place for place in ledger.places()}
        live_bytes = sum(place.size_bytes for place in held.values())
        recorded = {segment: file_bytes for segment, (file_bytes, _) in ledger.sizes().items()}
        return VerifyReport(
            blocks=good,
            bad=bad,
            damaged_segment_headers=damaged_headers(files, store),
            wrong_index_entries=_differences(index, held),
            used_bytes=sum(sizes.values()),
            live_bytes=live_bytes,
            is_exact=sizes == recorded
            and live_bytes == ledger.live_bytes
            and sum(sizes.values()) == ledger.used_bytes,
        )


def _fault(files: SegmentFiles, store: bytes, place: Place) -> Fault | None:
    data = memoryview(bytearray(place.info.length))
    try:
        return read_record(files, store, place, data, Deadline.after(_BLOCK_S))
    except OSError:
        return "late"


def _differences(index: BlockIndex, held: dict[bytes, Place]) -> int:
    if not index.is_readable():
        return len(held)
    try:
        places, bad, _ = index.load()
    except lmdb.Error:
        return len(held)
    saved = {place.info.key: place for place in places}
    return bad + sum(saved.get(key) != held.get(key) for key in {**saved, **held})
