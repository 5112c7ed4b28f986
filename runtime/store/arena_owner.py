"""Whose shared memory it is: the folder it belongs to, and what to do when that folder is gone.

Shared memory outlives its server, and so could outlive the folder of the store as well: a folder
that was deleted must not come back with its blocks, nor its memory be lost to the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import structlog

from runtime.store.errors import StoreSetupError
from traces.whole_file import write_whole

IDENTITY_BYTES = 16
PATH_OFFSET = 1024  # of the folder's path in the header page: two bytes of length, then the path
PATH_MOST = 2048
_log = structlog.get_logger("store")


def folder_identity(folder: Path) -> bytes:
    """A random name of this very folder, made once.

    Raises:
        StoreSetupError: If it can be neither read nor written.
    """
    file = folder / "identity"
    with contextlib.suppress(OSError, ValueError):
        identity = bytes.fromhex(file.read_text("ascii").strip())
        if len(identity) == IDENTITY_BYTES:
            return identity
    identity = os.urandom(IDENTITY_BYTES)
    try:
        write_whole(file, identity.hex().encode("ascii"))
    except OSError as error:
        raise StoreSetupError(f"{file}: {error.strerror}") from error
    return identity


def write_folder(file: int, folder: Path) -> None:
    """Note in the header page of a new arena which folder it belongs to."""
    path = os.fsencode(folder.resolve())[:PATH_MOST]
    os.pwrite(file, len(path).to_bytes(2, "little") + path, PATH_OFFSET)


def sweep(place: Path, prefix: str, magic: bytes) -> int:
    """Remove the shared memory of folders that are gone and that no server uses.

    Args:
        place: Where shared memory lies.
        prefix: How the names of this user's arenas begin.
        magic: How an arena begins.

    Returns:
        How many were removed.
    """
    removed = 0
    for path in place.glob(prefix + "*"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _is_orphan(file, magic):
                    path.unlink()
                    removed += 1
            finally:
                os.close(file)
    if removed:
        _log.info("shared memory of deleted stores removed", count=removed)
    return removed


def _is_orphan(file: int, magic: bytes) -> bool:
    if os.pread(file, len(magic), 0) != magic:
        return False
    length = int.from_bytes(os.pread(file, 2, PATH_OFFSET), "little")
    if not 0 < length <= PATH_MOST:
        return False
    folder = os.fsdecode(os.pread(file, length, PATH_OFFSET + 2))
    if os.path.lexists(folder):
        return False
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a server uses it
    return True
