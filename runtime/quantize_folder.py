"""The folder a quantization writes into: what may lie there, who holds it, how it is replaced.

A finished result is replaced only by a finished one: the new one grows in a folder inside, and its
files move up when it is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from runtime.quantized_manifest import (
    JOURNAL,
    MANIFEST,
    STAGING,
    QuantizedCheckpointError,
    read_manifest,
)

Existing = Literal["refuse", "resume", "overwrite"]
State = Literal["empty", "unfinished", "finished"]


class OutputError(ValueError):
    """An output folder that cannot be used; the message names it."""


def names_in(folder: Path) -> set[str]:
    """What lies in a folder, leftovers of cut-off writes aside; nothing if it is not there.

    Raises:
        OutputError: If it is no folder or cannot be looked into.
    """
    try:
        if not folder.exists():
            return set()
        if not folder.is_dir():
            raise OutputError(f"{folder}: not a folder")
        return {path.name for path in folder.iterdir() if not is_partial(path)}
    except OSError as error:
        raise OutputError(f"{folder}: cannot be used: {error.strerror}") from None


def output_state(folder: Path) -> State:
    """What lies in a folder: nothing, an unfinished run, or a finished one.

    Raises:
        OutputError: If it holds anything else, or cannot be looked into.
    """
    names = names_in(folder)
    if MANIFEST in names:
        return "finished"
    if JOURNAL in names or STAGING in names:
        return "unfinished"
    if names:
        raise OutputError(f"{folder}: not empty, and what it holds was not written by quantize")
    return "empty"


def require_outside(output: Path, source: Path) -> None:
    """Check that a run does not write into what it reads.

    Raises:
        OutputError: If it would.
    """
    inside, outside = output.resolve(), source.resolve()
    if inside == outside:
        raise OutputError(f"{output}: is the source itself")
    if outside in inside.parents:
        raise OutputError(f"{output}: lies in the source {source}")


@contextmanager
def made_and_locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be and hold it; the system lets go of it when the process ends.

    Folders that were made here are removed again if they are empty at the end.

    Raises:
        OutputError: If it cannot be made or written, or another process holds it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise OutputError(f"{folder}: cannot be used: {error.strerror}") from None
        try:
            if not os.access(folder, os.W_OK | os.X_OK):
                raise OutputError(f"{folder}: cannot be written")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise OutputError(f"{folder}: another process is writing it") from None
            yield
        finally:
            os.close(handle)
    finally:
        for path in made:
            with suppress(OSError):  # it holds something, or was not made
                path.rmdir()


def clear(folder: Path) -> None:
    """Remove what an unfinished run has written, the journal aside.

    Raises:
        OSError: If the disk refuses.
    """
    for path in _result_files(folder):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def require_replaceable(folder: Path) -> None:
    """Check that the files of a finished result are known.

    Raises:
        OutputError: If its manifest cannot be read.
    """
    try:
        read_manifest(folder)
    except QuantizedCheckpointError as error:
        raise OutputError(f"{error}; remove the folder by hand") from None


def move_up(folder: Path) -> None:
    """Put the complete result in ``STAGING`` in the place of the old one.

    The old manifest goes first and the new one comes last, so that no mixture is taken for a
    whole; cut off in between, the same call finishes it.

    Raises:
        QuantizedCheckpointError: If the new manifest cannot be read.
        OSError: If the disk refuses.
    """
    new = folder / STAGING
    wanted = read_manifest(new).files
    with suppress(QuantizedCheckpointError):  # gone already if an earlier call was cut off
        for name in set(read_manifest(folder).files) - set(wanted):
            (folder / name).unlink(missing_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in _result_files(folder):
        if path.name not in wanted:
            path.unlink(missing_ok=True)
    for name in wanted:
        if (new / name).exists():
            (new / name).replace(folder / name)
    (folder / JOURNAL).unlink(missing_ok=True)
    (new / MANIFEST).replace(folder / MANIFEST)
    shutil.rmtree(new)


def remove_partial(folder: Path) -> None:
    """Remove temporary files of runs that were cut off."""
    for path in folder.iterdir():
        if is_partial(path):
            path.unlink(missing_ok=True)


def require_room(folder: Path, num_bytes: int) -> None:
    """Check the disk.

    Args:
        folder: Where is to be written; need not be there.
        num_bytes: How much.

    Raises:
        OutputError: If it has less room.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise OutputError(
            f"{folder}: {num_bytes / 1e9:.2f} GB are to be written, the disk has {free / 1e9:.2f}"
        )


def is_partial(path: Path) -> bool:
    """Whether it is a temporary file of a write that was cut off."""
    return path.name.startswith(".") and ".partial-" in path.name


def _result_files(folder: Path) -> list[Path]:
    patterns = ("experts-*-of-*.safetensors", "others-*-of-*.safetensors")
    return [path for pattern in patterns for path in folder.glob(pattern)]
