"""Files that appear whole under their name or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_flushed(path: Path, content: bytes) -> None:
    """Write ``content`` and wait until the disk has it.

    Raises:
        OSError: If the disk refuses.
    """
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Write under a temporary name, flush, rename; nothing else is left behind.

    Raises:
        OSError: If the disk refuses; what stood at ``path`` before still does.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        write_flushed(partial, content)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):  # the folder may be no folder
            partial.unlink(missing_ok=True)
        raise
