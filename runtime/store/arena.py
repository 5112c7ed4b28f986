"""One piece of shared memory, cut into slots of one size: a block of keys and values each.

The serving process creates it; clients map the same file and read blocks in place. It lies on
/dev/shm where there is one, outlives a server that is killed, and is taken over by the next server
of the same folder. All pages are allocated at the start: a shared memory that runs full later would
kill the process that touches it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import struct
from pathlib import Path

from runtime.store.arena_owner import folder_identity, sweep, write_folder
from runtime.store.arena_pages import map_pages_ahead
from runtime.store.arena_slots import RECORD_BYTES, SlotTable
from runtime.store.errors import StoreSetupError, StoreUnavailableError
from runtime.store.forks import keep_lock, release_lock

_MAGIC = b"PTSARENA"
_VERSION = 2
_HEADER = struct.Struct("<8sIIQQ16s")  # magic, version, 0, slot bytes, slots, folder's identity
_HEADER_BYTES = 4096
_ALIGN_BYTES = 2 << 20  # of the data, so that huge pages can back it
_MIN_SLOT_BYTES = 64
SHARED_MEMORY = Path("/dev/shm")


class SharedArena:
    """Slots of equal size in a mapped file.

    Attributes:
        path: The file; clients map it.
        slot_bytes: Most bytes of a block.
        num_slots: Slots.
        table: What each slot holds.
        is_adopted: Whether the contents are those of an earlier server.
    """

    def __init__(self, path: Path, *, is_writable: bool) -> None:
        """Map an arena that exists.

        Raises:
            StoreSetupError: If there is none, or it is not one of this version.
        """
        self.path = path
        self.is_adopted = False
        self._lock_file: int | None = None
        flags = os.O_RDWR if is_writable else os.O_RDONLY
        try:
            file = os.open(path, flags)
        except OSError as error:
            raise StoreSetupError(f"{path}: {error.strerror}: no shared memory there") from error
        try:
            header = os.pread(file, _HEADER.size, 0)
            self.slot_bytes, self.num_slots = _parse_header(path, header)
            size = _total_bytes(self.slot_bytes, self.num_slots)
            if os.fstat(file).st_size != size:
                raise StoreSetupError(f"{path}: shared memory is cut short; remove the file")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
            mapped = mmap.mmap(file, size, mmap.MAP_SHARED, protection)
        finally:
            os.close(file)  # the mapping stays, as long as anybody uses it
        with contextlib.suppress(OSError, AttributeError, ValueError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        # The mapping ends with the last view into it, whoever holds that: nobody's bytes go away
        # under a call that still runs.
        memory = memoryview(mapped)
        self._memory: memoryview | None = memory
        map_pages_ahead(memory, size)
        start = _HEADER_BYTES
        self.table = SlotTable(
            memory[start : start + self.num_slots * RECORD_BYTES], self.num_slots
        )
        self._data_at = _data_offset(self.num_slots)

    @classmethod
    def create(cls, path: Path, *, slot_bytes: int, num_slots: int, folder: Path) -> SharedArena:
        """Make an arena, or take over the one that an earlier server of the same folder left.

        Args:
            path: Where; its folder exists.
            slot_bytes: Most bytes of a block, >= 64.
            num_slots: Slots, >= 1.
            folder: Of the store; what was left by a folder of the same path is not taken over.

        Raises:
            StoreSetupError: If another server uses it, or there is not enough shared memory.
        """
        if slot_bytes < _MIN_SLOT_BYTES:
            raise StoreSetupError(f"slot size: must be >= {_MIN_SLOT_BYTES} B, found {slot_bytes}")
        if num_slots < 1:
            raise StoreSetupError(
                f"DRAM size: must hold at least one block of {slot_bytes:,} bytes"
            )
        size = _total_bytes(slot_bytes, num_slots)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(file, path)
            header = os.pread(file, _HEADER.size, 0)
            identity = folder_identity(folder)
            wanted = _HEADER.pack(_MAGIC, _VERSION, 0, slot_bytes, num_slots, identity)
            is_adopted = header == wanted and os.fstat(file).st_size == size
            if not is_adopted:
                # A new file: processes that still map the old one must not lose its pages.
                path.unlink()
                fresh = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.close(file)
                file = fresh
                _lock(file, path)
                _allocate(file, path, size)
                write_folder(file, folder)
                os.pwrite(file, wanted, 0)
            arena = cls(path, is_writable=True)
        except BaseException:
            os.close(file)
            raise
        arena._lock_file = keep_lock(file)
        arena.is_adopted = is_adopted
        return arena

    def slot(self, index: int, length: int | None = None) -> memoryview:
        """The bytes of a slot: all, or the first ``length``.

        Raises:
            StoreUnavailableError: If the arena is closed.
        """
        at = self._data_at + index * self.slot_bytes
        return self._open()[at : at + (self.slot_bytes if length is None else length)]

    @property
    def data(self) -> memoryview:
        """The bytes of all slots, one after the other.

        Raises:
            StoreUnavailableError: If the arena is closed.
        """
        return self._open()[self._data_at :]

    def _open(self) -> memoryview:
        memory = self._memory
        if memory is None:
            raise StoreUnavailableError("the shared memory is closed")
        return memory

    def close(self, *, is_removed: bool = False) -> None:
        """Unmap; ``is_removed``: give the memory back to the machine as well.

        Views that are still in use keep the mapping alive until they go. No slot is given out any
        more, by whatever thread.
        """
        if is_removed:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        self.table.close()
        self._memory = None
        file, self._lock_file = self._lock_file, None
        if file is not None:
            release_lock(file)


class SlotAllocator:
    """Which slots are free; runs of neighbours are preferred, so that a region is contiguous."""

    def __init__(self, num_slots: int) -> None:
        self._used = bytearray(num_slots)
        self.num_free = num_slots
        self._next = 0

    def take(self, count: int) -> list[int]:
        """That many free slots, neighbours if there is such a run; fewer if fewer are free."""
        count = min(count, self.num_free)
        if count <= 0:
            return []
        run = b"\0" * count
        at = self._used.find(run, self._next)
        if at < 0:
            at = self._used.find(run)
        if at >= 0:
            slots = list(range(at, at + count))
        else:
            slots, at = [], -1
            while len(slots) < count:
                at = self._used.find(b"\0", at + 1)
                slots.append(at)
        for slot in slots:
            self._used[slot] = 1
        self.num_free -= count
        self._next = slots[-1] + 1
        return slots

    def take_these(self, slots: list[int]) -> None:
        """Mark slots as used: they hold recovered blocks."""
        for slot in slots:
            self._used[slot] = 1
        self.num_free -= len(slots)

    def give_back(self, slots: list[int]) -> None:
        """Slots are free again.

        Raises:
            ValueError: If one is free already.
        """
        for slot in slots:
            if not self._used[slot]:
                raise ValueError(f"slot {slot} is free already")
            self._used[slot] = 0
        self.num_free += len(slots)


def arena_path(folder: Path) -> Path:
    """Where the shared memory of a store's folder lies."""
    resolved = folder.resolve()
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return resolved / "arena"
    name = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:16]
    return SHARED_MEMORY / (_arena_prefix() + name)


def sweep_arenas() -> int:
    """Remove this user's arenas whose folders are gone; how many."""
    return sweep(SHARED_MEMORY, _arena_prefix(), _MAGIC) if SHARED_MEMORY.is_dir() else 0


def _arena_prefix() -> str:
    return f"serving-twin-store-{os.getuid()}-"


def _total_bytes(slot_bytes: int, num_slots: int) -> int:
    return _data_offset(num_slots) + slot_bytes * num_slots


def _data_offset(num_slots: int) -> int:
    table_end = _HEADER_BYTES + num_slots * RECORD_BYTES
    return -(-table_end // _ALIGN_BYTES) * _ALIGN_BYTES


def _parse_header(path: Path, header: bytes) -> tuple[int, int]:
    if len(header) < _HEADER.size:
        raise StoreSetupError(f"{path}: not shared memory of a store")
    magic, version, _, slot_bytes, num_slots, _ = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise StoreSetupError(f"{path}: not shared memory of a store")
    if version != _VERSION:
        raise StoreSetupError(f"{path}: version {version}, this program knows {_VERSION}")
    return slot_bytes, num_slots


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StoreSetupError(f"{path}: another server uses this shared memory") from error


def _allocate(file: int, path: Path, size: int) -> None:
    free = os.fstatvfs(file).f_bavail * os.fstatvfs(file).f_frsize
    try:
        if size > free:
            raise OSError(errno.ENOSPC, "no space")
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.ftruncate(file, 0)
        with contextlib.suppress(OSError):
            path.unlink()
        raise StoreSetupError(
            f"DRAM size: {size / 2**30:.2f} GiB of shared memory are not to be had at "
            f"{path.parent} ({free / 2**30:.2f} GiB free): ask for less"
        ) from error
