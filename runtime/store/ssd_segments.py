"""The segment files of one SSD folder, and nothing but their system calls.

Descriptors are opened for each read: beside megabytes of data that costs nothing, needs no table of
open files, and a segment that is unlinked meanwhile stays readable to whoever has it open.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from runtime.store.ssd_layout import Buffer

_NAME = re.compile(r"^(\d{16})\.seg$")
_MODE = 0o600


class SegmentFiles:
    """Segment files by id, under one folder.

    Every method raises OSError as the system does; writes and reads may be short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, segment: int) -> Path:
        """The file of a segment."""
        return self.folder / f"{segment:016d}.seg"

    def sizes(self) -> dict[int, int]:
        """Bytes of every segment file by id, ascending; other files are left alone."""
        found: dict[int, int] = {}
        with os.scandir(self.folder) as items:
            for item in items:
                match = _NAME.match(item.name)
                if match and item.is_file(follow_symlinks=False):
                    found[int(match[1])] = item.stat().st_size
        return dict(sorted(found.items()))

    def create(self, segment: int) -> int:
        """Descriptor of a new, empty segment."""
        return os.open(self.path(segment), os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE)

    def open(self, segment: int) -> int:
        """Descriptor to read a segment."""
        return os.open(self.path(segment), os.O_RDONLY)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write buffers one behind the other; the number of bytes written."""
        return os.pwritev(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill buffers; the number of bytes read, 0 at the end of the file."""
        return os.preadv(descriptor, buffers, offset)

    def read_ahead(self, descriptor: int) -> None:
        """Have the system read ahead of reads in order (asking for the whole range was slower)."""
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def forget_cached(self, descriptor: int, offset: int, length: int) -> None:
        """Give the page cache of a range back: the store has its own memory for what is hot."""
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def sync(self, descriptor: int) -> None:
        """Wait until a segment's data and size are on disk."""
        os.fdatasync(descriptor)

    def size(self, segment: int) -> int:
        """Bytes of a segment file."""
        return self.path(segment).stat().st_size

    def truncate(self, segment: int, size: int) -> None:
        """Cut a segment to ``size`` bytes."""
        os.truncate(self.path(segment), size)

    def unlink(self, segment: int) -> None:
        """Remove a segment file."""
        self.path(segment).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Bytes that the disk has left for this process."""
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    def sync_folder(self) -> None:
        """Wait until created and removed names are on disk."""
        sync_folder(self.folder)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on disk.

    Raises:
        OSError: If the disk refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
