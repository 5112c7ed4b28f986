"""A temporary folder that goes with its process, however that ends.

A process that is killed removes nothing. Who comes next does: a folder is in use as long as
somebody holds the lock on the folder itself, or on the file ``lock`` that a store keeps in it, and
the kernel gives both up with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from runtime.store.forks import keep_lock, release_lock

PREFIX: Final = "serving-twin-prefixes-"
STORE_LOCK: Final = "lock"
TRIES: Final = 20


class PrivateFolder:
    """A new folder of this process, locked.

    Attributes:
        path: Of the folder.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: If the system's temporary folder takes none.
        """
        for _ in range(TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = _locked(self.path)
            if lock is not None and self.path.is_dir():
                self._lock = keep_lock(lock)
                return
            if lock is not None:  # cleared between the two calls, by somebody who held the lock
                os.close(lock)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(self.path))

    def close(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        release_lock(self._lock)


def clear_abandoned() -> int:
    """Remove this user's folders that no process holds; how many.

    The shared memory of their stores goes with the next store that is opened, see
    ``runtime.store.arena.sweep_arenas``.
    """
    cleared = 0
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        lock = _locked(folder)
        if lock is None:
            continue
        try:
            if not _has_store(folder):
                shutil.rmtree(folder, ignore_errors=True)
                cleared += not folder.exists()
        finally:
            os.close(lock)
    return cleared


def _locked(folder: Path) -> int | None:
    """Descriptor of a folder of this user that is now locked; None if it is not to be had."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.fstat(file).st_uid == os.getuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
    os.close(file)
    return None


def _has_store(folder: Path) -> bool:
    """Whether a store is open in it."""
    try:
        file = os.open(folder / STORE_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not known: better left
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
