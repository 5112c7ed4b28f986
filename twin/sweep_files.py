"""The directory of a sweep: its question, one file a finished point, the table and the picture."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from traces.record import RunDirectoryError
from traces.whole_file import write_whole
from twin.sweep_grid import Axis, Point

FORMAT = "serving-twin-sweep"
VERSION = 2


def point_file_name(point: Point) -> str:
    """Name that changes with anything that could change the result.

    That is the scenario, the contents of the files it reads, and the version of the product.
    """
    try:
        product = metadata.version("serving-twin")
    except metadata.PackageNotFoundError:
        product = "unknown"
    key = [VERSION, product, point.tables, point.inputs]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{point.number:05d}-{digest[:16]}.json"


def prepare(out: Path, tables: Mapping[str, Any], axes: Sequence[Axis]) -> Path:
    """The folder for points; refuses a directory that holds anything but this sweep.

    Raises:
        RunDirectoryError: If it holds something else or cannot be made.
    """
    head = out / "sweep.json"
    grid = {axis.key: list(axis.values) for axis in axes}
    wanted = {"scenario": json.loads(json.dumps(tables)), "over": grid}
    folder = out / "points"
    try:
        if out.exists():
            _require_same(out, head, wanted)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be made: {error.strerror}") from error
    text = json.dumps({"format": FORMAT, "version": VERSION, **wanted}, indent=2) + "\n"
    write_atomically(head, text.encode())
    return folder


def _require_same(out: Path, head: Path, wanted: Mapping[str, Any]) -> None:
    try:
        found = json.loads(head.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RunDirectoryError(f"{out}: exists and is not a sweep; choose another --out")
    if {key: found.get(key) for key in wanted} != wanted:
        raise RunDirectoryError(f"{out}: holds another sweep; choose another --out")


def read_point(path: Path) -> dict[str, Any] | None:
    """The summary of a finished point; None where there is none or it is damaged."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_point(folder: Path, point: Point, summary: Mapping[str, Any]) -> None:
    """Keep a summary, and drop those of the same cell with other inputs or versions.

    Raises:
        RunDirectoryError: If the disk refuses.
    """
    path = folder / point_file_name(point)
    write_atomically(path, json.dumps(summary).encode())
    for other in folder.glob(f"{point.number:05d}-*.json"):
        if other != path:
            other.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Under a temporary name, flushed, then renamed; nothing else is left behind.

    Raises:
        RunDirectoryError: If the disk refuses.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror}") from error


def write_tables(
    out: Path, rows: Sequence[Mapping[str, Any]], keys: Sequence[str], *, is_complete: bool
) -> None:
    """``sweep.csv``: one row a finished point, in grid order; a picture of a complete sweep.

    Raises:
        RunDirectoryError: If the disk refuses.
    """
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_atomically(out / "sweep.csv", buffer.getvalue().encode())
    picture = _picture(rows, keys) if is_complete else None
    if picture is not None:
        write_atomically(out / "sweep.png", picture)


def _picture(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> bytes | None:
    """Of the rows with an answer, where all of them are of one kind."""
    from twin.plots import sweep_picture

    answered = [
        {name: math.nan if value is None else value for name, value in row.items()}
        | {name: row[name] if row[name] is not None else "" for name in ("completed", "infeasible")}
        for row in rows
        if not (row["infeasible"] or row["error"])
    ]
    if not answered or len({row["completed"] == "" for row in answered}) > 1:
        return None
    return sweep_picture(answered, keys)
