"""One server at a time writes a decision log: two of them would overwrite each other's at the end.

The lock lies beside the log, as ``.NAME.lock``. The kernel gives it up with its process, so that
one that is left by a server that was killed keeps nobody from anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


class DecisionFileError(ValueError):
    """The decision log is another server's."""


@contextlib.contextmanager
def reserved(logs: Iterable[Path]) -> Iterator[None]:
    """Within the block, no other process reserves these logs.

    Raises:
        DecisionFileError: If one of them is reserved, or the lock cannot be made.
    """
    with contextlib.ExitStack() as held:
        for log in logs:
            held.enter_context(_reserved(log))
        yield


@contextlib.contextmanager
def _reserved(log: Path) -> Iterator[None]:
    path = log.with_name(f".{log.name}.lock")
    file = _locked(path, log)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may have gone
            if _is_there(path, file):
                path.unlink()
        os.close(file)


def _locked(path: Path, log: Path) -> int:
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DecisionFileError(f"--decisions: {path}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise DecisionFileError(
                f"--decisions: {log}: another server writes its log there; name another file"
            ) from None
        except OSError:
            return file  # a file system without locks
        if _is_there(path, file):
            return file
        os.close(file)  # removed by its holder between the two calls


def _is_there(path: Path, file: int) -> bool:
    """Whether the name is still that of the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except FileNotFoundError:
        return False
