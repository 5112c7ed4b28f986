"""The cells of a sweep: swept keys, their values, and every combination as a checked scenario."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.scenario import Scenario
from models.scenario_file import apply_overrides, parse_scenario
from models.strict_tables import ScenarioError
from twin.input_checksums import checksum, input_files

MAX_POINTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One swept key and its values, as they would be written after ``--set key=``."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cell of the grid.

    Attributes:
        number: Place in the grid, the last axis changing fastest.
        settings: Key -> value text.
        tables: The complete scenario as plain tables.
        inputs: Path -> sha256 of the trace and calibration files it reads.
    """

    number: int
    settings: Mapping[str, str]
    tables: Mapping[str, Any]
    inputs: Mapping[str, str]

    def value(self, key: str) -> Any:
        """The value of a swept key as the scenario holds it: a number, a text, ..."""
        node: Any = self.tables
        for name in key.split("."):
            node = node[name]
        return node


def parse_axis(text: str) -> Axis:
    """``key=1..32``, ``key=1..32..4`` (with a step) or ``key=a,b,c``.

    Raises:
        ScenarioError: If the text has no key, no values, or a range that is empty.
    """
    key, separator, values = text.partition("=")
    if not separator or "." not in key or not values.strip():
        raise ScenarioError(
            f"--over {text}: must look like table.key=1..32, table.key=1..32..4 or table.key=a,b"
        )
    if ".." in values:
        return Axis(key=key.strip(), values=_range(text, values))
    parts = tuple(part.strip() for part in values.split(","))
    if not all(parts):
        raise ScenarioError(f"--over {text}: has an empty value")
    if len(set(parts)) < len(parts):
        raise ScenarioError(f"--over {text}: has the same value twice")
    return Axis(key=key.strip(), values=parts)


def _range(text: str, values: str) -> tuple[str, ...]:
    parts = values.split("..")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise ScenarioError(
            f"--over {text}: a range needs whole numbers, found {values!r}"
        ) from None
    if len(numbers) not in (2, 3):
        raise ScenarioError(f"--over {text}: a range is first..last or first..last..step")
    first, last = numbers[:2]
    step = numbers[2] if len(numbers) == 3 else 1
    if step < 1 or last < first:
        raise ScenarioError(f"--over {text}: the range is empty (first <= last, step >= 1)")
    if (last - first) // step >= MAX_POINTS:
        raise ScenarioError(f"--over {text}: more than {MAX_POINTS:,} values")
    return tuple(str(value) for value in range(first, last + 1, step))


def grid_points(tables: Mapping[str, Any], axes: Sequence[Axis]) -> list[Point]:
    """Every cell of the grid as a checked scenario whose input files can be read.

    Raises:
        ScenarioError: Naming the first cell that is not a valid scenario.
        TraceError: If a cell's trace file is missing or of no known format.
        CalibrationError: If a cell's calibration is missing or not valid.
    """
    size = 1
    for axis in axes:
        size *= len(axis.values)
    if size > MAX_POINTS:
        raise ScenarioError(f"the grid has {size:,} points; at most {MAX_POINTS:,} are allowed")
    keys = [axis.key for axis in axes]
    if len(set(keys)) < len(keys):
        raise ScenarioError("--over: the same key is swept twice")
    points = []
    inputs = _Inputs()
    for number, values in enumerate(itertools.product(*(axis.values for axis in axes))):
        settings = dict(zip(keys, values, strict=True))
        cell = apply_overrides(tables, [f"{k}={v}" for k, v in settings.items()])
        run = cell.setdefault("run", {})
        if isinstance(run, dict) and run.get("mode", "saturated") == "saturated":
            run.setdefault("simulate_r", "chosen")
            run.setdefault("compare_routing", False)
        where = ", ".join(f"{k}={v}" for k, v in settings.items())
        scenario = parse_scenario(cell, where=f"sweep point {where}")
        points.append(
            Point(number=number, settings=settings, tables=cell, inputs=inputs.of(scenario))
        )
    return points


class _Inputs:
    """Checksums of the cells' input files, each file opened and told apart once."""

    def __init__(self) -> None:
        self._checksums: dict[Path, str] = {}
        self._detected: set[Path] = set()
        self._calibrations: set[str] = set()

    def of(self, scenario: Scenario) -> dict[str, str]:
        self._check_calibration(scenario.attention_ffn.calibration)
        found = {}
        for path in input_files(scenario):
            if path not in self._checksums:
                self._checksums[path] = _readable_checksum(path)
            found[str(path)] = self._checksums[path]
        self._check_format(scenario)
        return found

    def _check_calibration(self, name: str | None) -> None:
        from models.calibration import load_calibration

        if name is not None and name not in self._calibrations:
            load_calibration(name)
            self._calibrations.add(name)

    def _check_format(self, scenario: Scenario) -> None:
        from traces.readers import detect_format

        workload = scenario.workload
        told = workload.format != "auto" or workload.columns
        for path in input_files(scenario):
            is_trace = str(path) == str(Path(workload.trace or ""))
            if is_trace and not told and path.is_file() and path not in self._detected:
                detect_format(path)
                self._detected.add(path)


def _readable_checksum(path: Path) -> str:
    from traces.errors import TraceError

    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(f"{path}: is not a regular file")
    try:
        return checksum(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
