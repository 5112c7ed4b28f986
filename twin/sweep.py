"""A grid of experiments over any scenario keys: parallel, resumable, the same on any executor.

Every point is written to its own file as soon as it is done, so an interrupted sweep is a usable
partial one, and the same command picks it up where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twin.sweep_executors import process_results, ray_results, require_ray
from twin.sweep_files import point_file_name, prepare, read_point, write_point, write_tables
from twin.sweep_grid import Axis, Point, grid_points, parse_axis
from twin.sweep_rows import flat_row

__all__ = ["Axis", "Point", "SweepResult", "grid_points", "parse_axis", "run_sweep", "sweep_rows"]

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What is known of a sweep.

    Attributes:
        axes: The swept keys.
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
        """Whether every cell was run."""
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

    A cell that was finished earlier is run again if its scenario, the contents of its trace or
    calibration file, or the version of the product has changed. A cell whose input turns out to
    be bad has its reason in the table, and is tried again by the next run.

    Raises:
        ScenarioError: If a cell is not a valid scenario.
        TraceError: If a cell's trace is missing or of no known format.
        CalibrationError: If a cell's calibration is missing or not valid.
        RunDirectoryError: If ``out`` holds something else, or the disk refuses.
        KeyboardInterrupt: After the partial sweep has been written.
    """
    points = grid_points(tables, axes)
    if engine == "ray":
        require_ray()
    folder = prepare(out, tables, axes)
    done: dict[int, Mapping[str, Any]] = {}
    for point in points:
        earlier = read_point(folder / point_file_name(point))
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

    execute = ray_results if engine == "ray" else process_results
    try:
        # closing: an interruption ends the workers here, not when the generator is collected
        with closing(execute(missing, jobs)) as results:
            for point, summary in results:
                # known before it is on disk: an interruption in between loses no row of the table
                done[point.number] = summary
                if "error" not in summary:
                    write_point(folder, point, summary)
                if on_progress is not None:
                    on_progress("points", len(done), len(points))
    finally:
        known = result()
        rows = [{**row, **point.settings} for point, row in _answered(known)]
        write_tables(out, rows, [axis.key for axis in axes], is_complete=known.is_complete)
    return result()


def sweep_rows(result: SweepResult) -> list[dict[str, Any]]:
    """One flat row a finished point: its settings, the answer, theory and twin.

    Numbers are numbers; None stands for what does not apply.
    """
    return [row for _, row in _answered(result)]


def _answered(result: SweepResult) -> list[tuple[Point, dict[str, Any]]]:
    found = []
    for point, summary in zip(result.points, result.summaries, strict=True):
        if summary is not None:
            settings = {key: point.value(key) for key in point.settings}
            found.append((point, {**settings, **flat_row(summary)}))
    return found
