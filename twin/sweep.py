"""A grid of experiments over any scenario keys: parallel, resumable, the same on any executor.

Every point is written to its own file as soon as it is done, so an interrupted sweep is a usable
partial one, and the same command picks it up where it stopped.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from models.scenario_file import apply_overrides, parse_scenario
from models.strict_tables import ScenarioError
from traces.record import RunDirectoryError

FORMAT = "serving-twin-sweep"
VERSION = 1
MAX_POINTS = 100_000

OnProgress = Callable[[str, int, int], None]


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
    """

    number: int
    settings: Mapping[str, str]
    tables: Mapping[str, Any]

    @property
    def file_name(self) -> str:
        """Name that changes with anything that could change the result."""
        text = json.dumps(self.tables, sort_keys=True)
        return f"{self.number:05d}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


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
    """Every cell of the grid as a checked scenario.

    Raises:
        ScenarioError: Naming the first cell that is not a valid scenario.
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
    for number, values in enumerate(itertools.product(*(axis.values for axis in axes))):
        settings = dict(zip(keys, values, strict=True))
        cell = apply_overrides(tables, [f"{k}={v}" for k, v in settings.items()])
        run = cell.setdefault("run", {})
        if isinstance(run, dict):
            run.setdefault("simulate_r", "chosen")
            run.setdefault("compare_routing", False)
        where = ", ".join(f"{k}={v}" for k, v in settings.items())
        parse_scenario(cell, where=f"sweep point {where}")
        points.append(Point(number=number, settings=settings, tables=cell))
    return points


def run_point(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of one point, or the reason why it has none (it cannot meet the limits)."""
    from policies.provisioning import InfeasibleError
    from twin.experiment import run_experiment

    try:
        return dict(run_experiment(parse_scenario(tables)).summary)
    except InfeasibleError as error:
        return {"infeasible": str(error)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What is known of a sweep.

    Attributes:
        points: All cells of the grid.
        summaries: Per cell its summary; None where it was not run.
        reused: How many were found finished from an earlier try.
    """

    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    summaries: tuple[Mapping[str, Any] | None, ...]
    reused: int

    @property
    def is_complete(self) -> bool:
        """Whether every cell has its result."""
        return all(summary is not None for summary in self.summaries)


def run_sweep(
    tables: Mapping[str, Any],
    axes: Sequence[Axis],
    out: Path,
    *,
    jobs: int | None = None,
    engine: str = "processes",
    on_progress: OnProgress | None = None,
) -> SweepResult:
    """Run what is missing of the grid and write ``out``; results do not depend on ``jobs``.

    Raises:
        ScenarioError: If a cell is not a valid scenario.
        RunDirectoryError: If ``out`` holds something else.
        KeyboardInterrupt: After the partial sweep has been written.
    """
    points = grid_points(tables, axes)
    folder = _prepare(out, tables, axes)
    done: dict[int, Mapping[str, Any]] = {}
    for point in points:
        earlier = _read_point(folder / point.file_name)
        if earlier is not None:
            done[point.number] = earlier
    reused = len(done)
    missing = [point for point in points if point.number not in done]

    def result() -> SweepResult:
        return SweepResult(
            axes=tuple(axes),
            points=tuple(points),
            summaries=tuple(done.get(point.number) for point in points),
            reused=reused,
        )

    execute = _ray_results if engine == "ray" else _process_results
    try:
        for point, summary in execute(missing, jobs):
            _write_atomically(folder / point.file_name, json.dumps(summary))
            done[point.number] = summary
            if on_progress is not None:
                on_progress("points", len(done), len(points))
    finally:
        _write_tables(out, result())
    return result()


def _process_results(
    points: Sequence[Point], jobs: int | None
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Results as they come from a pool of processes (or from this one, for one job)."""
    workers = min(jobs or os.cpu_count() or 1, max(1, len(points)))
    if workers == 1:
        for point in points:
            yield point, run_point(point.tables)
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["twin.experiment"])
    with _pool(workers, context) as pool:
        waiting = {pool.submit(run_point, point.tables): point for point in points}
        while waiting:
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(finished, key=lambda f: waiting[f].number):
                yield waiting.pop(future), future.result()


@contextmanager
def _pool(workers: int, context: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool whose waiting work is dropped when the block is left early (Ctrl-C)."""
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_ignore_interrupt)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _ray_results(
    points: Sequence[Point], jobs: int | None
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Results as they come from a Ray cluster: the one of RAY_ADDRESS, else a local one."""
    try:
        import ray
    except ImportError:
        raise ScenarioError(
            "--engine ray: Ray is not installed; pip install 'serving-twin[cluster]'"
        ) from None
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(
            num_cpus=jobs, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
    try:
        task = ray.remote(num_cpus=1)(run_point)
        waiting = {task.remote(point.tables): point for point in points}
        while waiting:
            finished, _ = ray.wait(list(waiting), num_returns=1)
            for reference in finished:
                yield waiting.pop(reference), ray.get(reference)
    finally:
        if started_here:
            ray.shutdown()


# --- files ------------------------------------------------------------------------------------


def _prepare(out: Path, tables: Mapping[str, Any], axes: Sequence[Axis]) -> Path:
    """The folder for points; refuses a directory that holds anything but this sweep."""
    head = out / "sweep.json"
    grid = {axis.key: list(axis.values) for axis in axes}
    wanted = {"scenario": json.loads(json.dumps(tables)), "over": grid}
    if out.exists():
        try:
            found = json.loads(head.read_text())
        except (OSError, ValueError):
            raise RunDirectoryError(
                f"{out}: exists and is not a sweep; choose another --out"
            ) from None
        if {key: found.get(key) for key in wanted} != wanted:
            raise RunDirectoryError(f"{out}: holds another sweep; choose another --out")
    folder = out / "points"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be made: {error.strerror}") from error
    _write_atomically(
        head, json.dumps({"format": FORMAT, "version": VERSION, **wanted}, indent=2) + "\n"
    )
    return folder


def _read_point(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with partial.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def _write_tables(out: Path, result: SweepResult) -> None:
    """``sweep.csv``: one row a finished point, in grid order; a picture of a complete sweep."""
    rows = sweep_rows(result)
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    _write_atomically(out / "sweep.csv", buffer.getvalue())
    if result.is_complete and rows:
        from twin.plots import sweep_picture

        picture = sweep_picture(rows, [axis.key for axis in result.axes])
        if picture is not None:
            partial = out / f".sweep.png.partial-{os.getpid()}"
            partial.write_bytes(picture)
            partial.replace(out / "sweep.png")


def sweep_rows(result: SweepResult) -> list[dict[str, Any]]:
    """One flat row a finished point: its settings, the answer, theory and twin."""
    rows = []
    for point, summary in zip(result.points, result.summaries, strict=True):
        if summary is None:
            continue
        row: dict[str, Any] = dict(point.settings)
        row.update(_flat(summary))
        rows.append(row)
    return rows


COLUMNS = (
    "r",
    "best_r",
    "batch_per_worker",
    "regret",
    "predicted_tokens_per_s_per_instance",
    "tokens_per_s_per_instance",
    "tokens_per_s_half_width",
    "tpot_s",
    "barrier_overhead",
    "attention_idle",
    "ffn_idle",
    "completed",
    "unfinished",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "e2e_p99_s",
    "goodput_share",
    "goodput_per_s",
    "infeasible",
)


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    if "infeasible" in summary:
        return {**dict.fromkeys(COLUMNS, ""), "infeasible": summary["infeasible"]}
    best, layers = summary["recommendation"], summary["bundle"]["num_layers"]
    values = {
        name: best[name]
        for name in (
            "r",
            "best_r",
            "batch_per_worker",
            "regret",
            "tpot_s",
            "barrier_overhead",
            "attention_idle",
            "ffn_idle",
        )
    }
    values["predicted_tokens_per_s_per_instance"] = best["throughput_per_instance"] / layers
    simulation = summary.get("simulation")
    points = [p for p in simulation["points"] if p["r"] == best["r"]] if simulation else []
    for name, field in (
        ("tokens_per_s_per_instance", "mean"),
        ("tokens_per_s_half_width", "half_width"),
    ):
        values[name] = points[0]["throughput_per_instance"][field] / layers if points else ""
    values.update(_open_loop_columns(summary.get("open_loop")))
    return {name: values.get(name, "") for name in COLUMNS}


def _open_loop_columns(run: Mapping[str, Any] | None) -> dict[str, Any]:
    """Latency columns of an open-loop point; nothing for a saturated one."""
    if run is None:
        return {}
    columns: dict[str, Any] = {
        "completed": run["completed"],
        "unfinished": run["running"] + run["queued"] + run["preparing"],
    }
    for name, latency, statistic in (
        ("ttft_p50_s", "ttft_s", "p50"),
        ("ttft_p99_s", "ttft_s", "p99"),
        ("tpot_mean_s", "tpot_s", "mean"),
        ("e2e_p99_s", "e2e_s", "p99"),
    ):
        if run["latency"][latency]:
            columns[name] = run["latency"][latency][statistic]
    if run["goodput"]:
        columns["goodput_share"] = run["goodput"]["share"]
        columns["goodput_per_s"] = run["goodput"]["requests_per_s"]
    return columns
