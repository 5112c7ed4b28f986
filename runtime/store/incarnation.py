"""A number that is larger at every start of a node, so that old addresses can be told from new."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from runtime.store.errors import StoreSetupError
from traces.whole_file import write_whole


def next_incarnation(file: Path) -> int:
    """The next number, written down; never smaller than the clock's nanoseconds or the last one.

    Raises:
        StoreSetupError: If it cannot be written.
    """
    last = 0
    with contextlib.suppress(OSError, ValueError):
        last = int(file.read_text("ascii"))
    number = max(last + 1, time.time_ns())
    try:
        write_whole(file, str(number).encode("ascii"))
    except OSError as error:
        raise StoreSetupError(f"{file}: {error.strerror}") from error
    return number
