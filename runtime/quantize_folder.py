"""The folder a quantization writes into: what may lie there, who holds it, how it is cleared."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from runtime.quantized_manifest import (
    JOURNAL,
    MANIFEST,
    QuantizedCheckpointError,
    read_manifest,
)

Existing = Literal["refuse", "resume", "overwrite"]
State = Literal["empty", "unfinished", "finished"]


class OutputError(ValueError):
    """An output folder that cannot be used; the message names it."""


def output_state(folder: Path) -> State:
    """What lies in a folder: nothing, an unfinished run, or a finished one.

    Raises:
        OutputError: If it holds anything else.
    """
    if not folder.exists():
        return "empty"
    if not folder.is_dir():
        raise OutputError(f"{folder}: not a folder")
    if (folder / MANIFEST).exists():
        return "finished"
    if (folder / JOURNAL).exists():
        return "unfinished"
    if any(not _is_partial(path) for path in folder.iterdir()):
        raise OutputError(f"{folder}: not empty, and what it holds was not written by quantize")
    return "empty"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder; the system lets go of it when the process ends, however it ends.

    Raises:
        OutputError: If another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(f"{folder}: another process is writing it") from None
        yield
    finally:
        os.close(handle)


def clear(folder: Path) -> None:
    """Remove what quantize wrote, the journal aside: the manifest first, so that no half is
    taken for a whole.

    Raises:
        OutputError: If the manifest cannot be read, so that its files are not known.
        OSError: If the disk refuses.
    """
    names: set[str] = set()
    if (folder / MANIFEST).exists():
        try:
            names.update(read_manifest(folder).files)
        except QuantizedCheckpointError as error:
            raise OutputError(f"{error}; remove the folder by hand") from None
    (folder / MANIFEST).unlink(missing_ok=True)
    for pattern in ("experts-*-of-*.safetensors", "others-*-of-*.safetensors"):
        names.update(path.name for path in folder.glob(pattern))
    for name in names:
        (folder / name).unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove temporary files of runs that were cut off."""
    for path in folder.iterdir():
        if _is_partial(path):
            path.unlink(missing_ok=True)


def require_room(folder: Path, num_bytes: int) -> None:
    """Check the disk.

    Raises:
        OutputError: If it has less room.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OutputError(
            f"{folder}: {num_bytes / 1e9:.2f} GB are to be written, the disk has {free / 1e9:.2f}"
        )


def _is_partial(path: Path) -> bool:
    return path.name.startswith(".") and ".partial-" in path.name
