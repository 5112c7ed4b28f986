"""Counters of the SSD tier: all start at 0 with ``open`` and only grow."""

from __future__ import annotations

import threading

COUNTERS = (
    "blocks_written",  # made durable
    "bytes_written",  # of data, made durable
    "writes_busy",  # calls refused: too many waited
    "writes_late",  # calls that left at their deadline
    "writes_full",  # calls cut short by the capacity
    "writes_skipped",  # calls while the disk rested after a failure
    "writes_mismatched",  # blocks held already with another length
    "writes_bad_checksum",  # blocks whose bytes were not what was said of them
    "write_errors",  # failures of the disk or the index
    "disk_full",  # failures for want of room on the disk
    "blocks_read",  # served
    "bytes_read",  # served
    "reads_absent",  # asked for, not held
    "reads_late",  # given up at their deadline
    "reads_skipped",  # not tried while the disk rested
    "reads_misfit",  # destination too small
    "read_errors",  # failures of the disk
    "dropped_missing",  # segment file absent
    "dropped_torn",  # segment file too short
    "dropped_header",  # record header damaged
    "dropped_foreign",  # another record in its place
    "dropped_data",  # checksum of the data wrong
    "dropped_unreadable",  # the disk reported damage
    "dropped_index",  # index entries damaged
    "dropped_over_capacity",  # did not fit a smaller capacity
    "index_rebuilt",  # times the index was written anew from the segments
    "segments_orphaned",  # files without a valid record, unlinked on opening
    "tails_cut",  # files with bytes nobody acknowledged, cut on opening
    "bytes_compacted",  # freed by compaction on request
)


class Tally:
    """The counters, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Count ``count`` more.

        Raises:
            KeyError: If there is no such counter.
        """
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """All counters now."""
        with self._lock:
            return dict(self._counts)
