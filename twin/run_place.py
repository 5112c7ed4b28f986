"""Whether a run's directory can be written, found out before the run and not after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from traces.record import RunDirectoryError, check_writable


def check_place(target: Path) -> None:
    """Make and remove a folder beside the run directory to be: permissions alone do not tell.

    Raises:
        RunDirectoryError: If the path exists already or no directory can be made there.
    """
    check_writable(target)
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=parent):
            pass
    except OSError as error:
        raise RunDirectoryError(f"{target}: cannot be made: {error.strerror}") from error
