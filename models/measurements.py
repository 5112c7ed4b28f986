"""Measured stage times from a CSV file: one row a measurement, checked line by line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# What the time of each stage depends on.
QUANTITY_BY_STAGE = {"attention": "tokens", "ffn": "batch", "communication": "batch"}
SECONDS_BY_COLUMN = {
    **dict.fromkeys(("seconds", "time_s", "s"), 1.0),
    **dict.fromkeys(("milliseconds", "time_ms", "ms"), 1e-3),
    **dict.fromkeys(("microseconds", "time_us", "us"), 1e-6),
}


# Beyond these a number is a slip of unit or column, and squares of it leave the range of floats.
MAX_LOAD = 1e12
MIN_SECONDS, MAX_SECONDS = 1e-12, 1e6


class CalibrationError(ValueError):
    """A calibration or its measurements cannot be used; the message names file and place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurements:
    """Times of one stage.

    Attributes:
        quantity: ``tokens`` or ``batch``.
        load: [n] tokens or batch, >= 0.
        seconds: [n], > 0.
    """

    quantity: str
    load: NDArray[np.float64]
    seconds: NDArray[np.float64]


def require_readable(path: Path) -> None:
    """A pipe or device must not be opened: reading it may never end.

    Raises:
        CalibrationError: If there is something that is neither a file nor a folder.
    """
    if "\0" in str(path):
        raise CalibrationError(f"{str(path)!r}: is no file name (it holds a zero byte)")
    try:
        is_special = path.exists() and not (path.is_file() or path.is_dir())
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from error
    if is_special:
        raise CalibrationError(f"{path}: is not a regular file")


def read_measurements(path: str | Path) -> tuple[dict[str, StageMeasurements], tuple[str, ...]]:
    """Measurements by stage, and the names of columns that were not used.

    The header names ``stage``, ``tokens``, ``batch`` and one time column: ``seconds``, ``ms`` or
    ``us`` and the like. ``attention`` rows need tokens (KV tokens a worker reads), ``ffn`` and
    ``communication`` rows need batch (tokens passed); the other field may be empty.

    Raises:
        CalibrationError: For anything that is not such a file, naming the line.
    """
    path = Path(path)
    rows = _rows(path)
    header_line, header = next(rows, (1, []))
    names = [name.strip().lower() for name in header]
    if not any(names):
        raise CalibrationError(f"{path}: empty file, expected a header with stage and a time")
    time_column = _time_column(path, header_line, names)
    loads: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for line, row in rows:
        if len(row) != len(names):
            raise CalibrationError(
                f"{path}:{line}: {len(row)} field(s), expected {len(names)} as in the header"
            )
        fields = dict(zip(names, row, strict=True))
        stage = fields["stage"].strip().lower()
        if stage not in QUANTITY_BY_STAGE:
            allowed = ", ".join(QUANTITY_BY_STAGE)
            raise CalibrationError(
                f"{path}:{line}: stage is {fields['stage']!r}, allowed: {allowed}"
            )
        quantity = QUANTITY_BY_STAGE[stage]
        if quantity not in fields:
            raise CalibrationError(f"{path}:{line}: {stage} rows need a column {quantity!r}")
        load = _number(path, line, quantity, fields[quantity])
        time = _number(path, line, time_column, fields[time_column])
        if time == 0.0:
            raise CalibrationError(f"{path}:{line}: {time_column} must be > 0, found 0")
        seconds = time * SECONDS_BY_COLUMN[time_column]
        if load > MAX_LOAD:
            raise CalibrationError(
                f"{path}:{line}: {quantity} must be <= {MAX_LOAD:g}, found {fields[quantity]!r}"
            )
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:
            raise CalibrationError(
                f"{path}:{line}: {time_column} must be within {MIN_SECONDS:g}..{MAX_SECONDS:g} "
                f"seconds, found {fields[time_column]!r}"
            )
        loads.setdefault(stage, []).append(load)
        times.setdefault(stage, []).append(seconds)
    if not loads:
        raise CalibrationError(f"{path}: no measurement below the header")
    used = {"stage", "tokens", "batch", time_column}
    found = {
        stage: StageMeasurements(
            quantity=QUANTITY_BY_STAGE[stage],
            load=np.asarray(loads[stage], dtype=np.float64),
            seconds=np.asarray(times[stage], dtype=np.float64),
        )
        for stage in QUANTITY_BY_STAGE
        if stage in loads
    }
    return found, tuple(name for name in names if name and name not in used)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of every line that is not blank."""
    require_readable(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                if any(field.strip() for field in row):
                    yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not a text file ({error.reason})") from error
    except csv.Error as error:
        raise CalibrationError(f"{path}:{reader.line_num}: not CSV: {error}") from error
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from error


def _time_column(path: Path, line: int, names: list[str]) -> str:
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        raise CalibrationError(f"{path}:{line}: column {repeated[0]!r} appears twice")
    if "stage" not in names:
        raise CalibrationError(f"{path}:{line}: no column 'stage', found {', '.join(names)}")
    times = [name for name in names if name in SECONDS_BY_COLUMN]
    if len(times) != 1:
        found = ", ".join(times) if times else "none"
        raise CalibrationError(
            f"{path}:{line}: exactly one time column is needed, found {found}; "
            f"allowed: {', '.join(SECONDS_BY_COLUMN)}"
        )
    return times[0]


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0.0):
        raise CalibrationError(f"{path}:{line}: {column} must be a number >= 0, found {text!r}")
    return value
