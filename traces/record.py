"""The directory a run leaves behind: written whole or not at all, checked when read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.whole_file import write_flushed

FORMAT = "serving-twin-run"
VERSION = 1

Columns = Mapping[str, NDArray[Any]]


class RunDirectoryError(ValueError):
    """A run directory cannot be written or read; the message names it and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything about one run.

    Attributes:
        summary: JSON-ready: scenario, seed, versions, commit, results with intervals, warnings.
        requests: Column name -> [n] array, one row a request; None for a saturated run.
        timeseries: Column name -> [n] array, one row a sampled step; None if there is none.
        files: File name -> content (decision log, timeline, report, pictures).
    """

    summary: Mapping[str, Any]
    requests: Columns | None = None
    timeseries: Columns | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def check_writable(path: str | Path) -> None:
    """Fail before the run, not after it, if its directory could not be written.

    Raises:
        RunDirectoryError: If the path exists already or no directory can be made there.
    """
    target = Path(path)
    try:
        if target.exists() or target.is_symlink():
            raise RunDirectoryError(f"{target}: exists already; choose another --out or remove it")
        parent = target.absolute().parent
        while not parent.exists():
            parent = parent.parent
    except OSError as error:  # the name is too long, or a folder above must not be looked into
        raise RunDirectoryError(f"{target}: cannot be made: {error.strerror}") from error
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RunDirectoryError(f"{target}: cannot be made: {parent} is not a writable directory")
    try:  # permissions alone do not tell
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=parent):
            pass
    except OSError as error:
        raise RunDirectoryError(f"{target}: cannot be made: {error.strerror}") from error


def write_run(path: str | Path, record: RunRecord) -> None:
    """Write the run directory under a temporary name, flush it, then rename it.

    Raises:
        RunDirectoryError: If ``path`` exists or the disk refuses; nothing is left behind.
    """
    target = Path(path)
    check_writable(target)
    with _written_beside(target, record) as partial:
        partial.rename(target)


def write_numbered_run(parent: str | Path, name: str, record: RunRecord) -> Path:
    """Write the run directory as the first ``parent/name-NNN`` that is free when it is complete.

    Of several runs that end at the same time each gets a number of its own.

    Returns:
        Where it was written.

    Raises:
        RunDirectoryError: If the disk refuses; nothing is left behind.
    """
    target = next_run_path(parent, name)
    check_writable(target)
    with _written_beside(target, record) as partial:
        while True:
            try:
                partial.rename(target)
                return target
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                target = next_run_path(parent, name)


@contextmanager
def _written_beside(target: Path, record: RunRecord) -> Iterator[Path]:
    """The complete directory under a temporary name beside ``target``, to be renamed within."""
    # the target's name is not part of it: that one may be as long as the disk allows
    digest = hashlib.sha256(target.name.encode(errors="surrogateescape")).hexdigest()[:8]
    partial = target.with_name(f".partial-{os.getpid()}-{digest}")
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        contents = _contents(record)
        for name, content in contents.items():
            write_flushed(partial / name, content)
        yield partial
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunDirectoryError(f"{target}: cannot be written: {error.strerror}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def next_run_path(parent: str | Path, name: str) -> Path:
    """The first free ``parent/name-NNN``."""
    folder = Path(parent)
    number = 1
    while os.path.lexists(folder / f"{name}-{number:03d}"):
        number += 1
    return folder / f"{name}-{number:03d}"


def read_run(path: str | Path) -> RunRecord:
    """Read a run directory back, verifying the checksum of every file it lists.

    Raises:
        TraceError: Naming the file that is missing, damaged or of another version.
    """
    folder = Path(path)
    head = folder / "run.json"
    try:
        summary = json.loads(head.read_bytes())
    except OSError as error:
        raise TraceError(f"{head}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TraceError(f"{head}: is not JSON: {error}") from error
    if not isinstance(summary, dict) or summary.get("format") != FORMAT:
        raise TraceError(f"{head}: is not a run record (format must be {FORMAT!r})")
    if summary.get("version") != VERSION:
        raise TraceError(f"{head}: version must be {VERSION}, found {summary.get('version')!r}")
    files: dict[str, bytes] = {}
    tables: dict[str, Columns] = {}
    for name, checksum in summary.get("files", {}).items():
        files[name] = _read_checked(folder / name, checksum)
    for name in ("requests", "timeseries"):
        content = files.pop(f"{name}.parquet", None)
        if content is not None:
            tables[name] = _from_parquet(content)
    return RunRecord(
        summary=summary,
        requests=tables.get("requests"),
        timeseries=tables.get("timeseries"),
        files=files,
    )


def _read_checked(path: Path, checksum: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != checksum:
        raise TraceError(f"{path}: is damaged: its checksum differs from the one in run.json")
    return content


def _contents(record: RunRecord) -> dict[str, bytes]:
    """File name -> content; ``run.json`` last, with the checksums of all others."""
    contents = dict(record.files)
    for name, columns in (("requests", record.requests), ("timeseries", record.timeseries)):
        if columns is not None:
            contents[f"{name}.parquet"] = _to_parquet(columns)
    summary = {
        "format": FORMAT,
        "version": VERSION,
        **record.summary,
        "files": {
            name: hashlib.sha256(content).hexdigest() for name, content in sorted(contents.items())
        },
    }
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    return {**contents, "run.json": text.encode()}


def _to_parquet(columns: Columns) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _from_parquet(content: bytes) -> dict[str, NDArray[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(pa.BufferReader(content))
    return {name: np.asarray(table.column(name)) for name in table.column_names}
