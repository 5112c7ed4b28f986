"""A folder that one SSD tier has to itself: lock, format, and a disk that does what is needed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.store.errors import StoreSetupError
from runtime.store.forks import keep_lock, release_lock
from runtime.store.ssd_layout import PAGE_BYTES, STORE_BYTES, VERSION
from runtime.store.ssd_segments import sync_folder
from traces.whole_file import write_whole

_FORMAT = "ptstore-ssd"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class SsdFolder:
    """A locked, checked folder.

    Attributes:
        path: The folder.
        store: 16 random bytes that every record of this folder carries.
        has_room: Whether the disk took a page just now; False opens a tier that can be read.
        lock: Descriptor that holds the lock.
    """

    path: Path
    store: bytes
    has_room: bool
    lock: int

    @property
    def segments(self) -> Path:
        """Folder of the segment files."""
        return self.path / "segments"

    @property
    def index(self) -> Path:
        """Folder of the index."""
        return self.path / "index"

    def release(self) -> None:
        """Give the folder up."""
        release_lock(self.lock)


def claim(path: Path) -> SsdFolder:
    """Create or open the folder of an SSD tier, for this process alone.

    Raises:
        StoreSetupError: If another tier holds it, it cannot be written and synced, or its format
            or version is another one.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreSetupError(f"{path}: cannot be used as SSD folder: {_said(error)}") from error
    try:
        _lock(path, lock)
        store = _read_format(path)
        has_room = _probe(path)
        if store is None:
            store = _write_format(path)
        for name in ("segments", "index"):
            (path / name).mkdir(exist_ok=True)
        with suppress(OSError):
            sync_folder(path)
    except OSError as error:
        os.close(lock)
        raise StoreSetupError(f"{path}: cannot be used as SSD folder: {_said(error)}") from error
    except StoreSetupError:
        os.close(lock)
        raise
    return SsdFolder(path, store, has_room, keep_lock(lock))


def _said(error: OSError) -> str:
    return error.strerror or str(error)


def _lock(path: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        raise StoreSetupError(
            f"{path}: in use by another SSD tier (process {holder}); each needs a folder of its own"
        ) from None
    with suppress(OSError):  # the number only helps the reader of a message; a disk may be full
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)


def _read_format(path: Path) -> bytes | None:
    """Id of the store in the folder; None for a folder without one."""
    name = path / "format.json"
    try:
        content = json.loads(name.read_bytes())
        kind, version = content["format"], content["version"]
        store = bytes.fromhex(content["store"])
    except FileNotFoundError:
        if (path / "segments").exists() or (path / "index").exists():
            raise StoreSetupError(
                f"{path}: has segments or an index but no format.json; "
                "give an empty folder, or one that an SSD tier wrote"
            ) from None
        return None
    except (ValueError, KeyError, TypeError):
        raise StoreSetupError(f"{name}: not the format file of an SSD tier") from None
    if kind != _FORMAT:
        raise StoreSetupError(f"{name}: format is {kind!r:.40}, expected {_FORMAT!r}")
    if version != VERSION:
        raise StoreSetupError(f"{name}: version is {version!r:.40}, this program reads {VERSION}")
    if len(store) != STORE_BYTES:
        raise StoreSetupError(f"{name}: store has {len(store)} bytes, expected {STORE_BYTES}")
    return store


def _write_format(path: Path) -> bytes:
    store = uuid.uuid4().bytes
    facts = {"format": _FORMAT, "version": VERSION, "store": store.hex()}
    write_whole(path / "format.json", json.dumps(facts).encode() + b"\n")
    sync_folder(path)
    return store


def _probe(path: Path) -> bool:
    """Whether a page can be written, synced and read back; False if only room is missing."""
    name = path / "probe"
    page = os.urandom(PAGE_BYTES)
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            written = os.pwrite(descriptor, page, 0)
            os.fdatasync(descriptor)
            has_room = written == PAGE_BYTES
            if has_room and os.pread(descriptor, PAGE_BYTES, 0) != page:
                raise StoreSetupError(f"{path}: the disk does not give back what was written")
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        has_room = False
    finally:
        with suppress(OSError):
            name.unlink()
    return has_room
