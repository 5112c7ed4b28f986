"""Progress of long commands on standard error: a bar on a terminal, a line per file elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextmanager
def bar(label: str, unit: str, scale: float) -> Iterator[Callable[[float, float], None]]:
    """Yield ``show(done, total)``; draws nothing unless standard error is a terminal.

    Args:
        label: What is done.
        unit: Written behind numbers and speed.
        scale: How many make one unit.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:.1f}}/{{task.total:.1f}} {unit}"),
        TextColumn("{task.fields[speed]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=1.0, speed="")
        yield _Show(progress, task, unit, scale)


class _Show:
    """Updates a bar; the speed is that of this run, without what an earlier one had done."""

    def __init__(self, progress: Progress, task: TaskID, unit: str, scale: float) -> None:
        self._progress = progress
        self._task = task
        self._unit = unit
        self._scale = scale
        self._first: tuple[float, float] | None = None

    def __call__(self, done: float, total: float) -> None:
        done, total = done / self._scale, total / self._scale
        now = time.perf_counter()
        if self._first is None:
            self._first = (now, done)
            self._progress.reset(self._task, total=total, completed=int(done))
        began, had = self._first
        speed = f"{(done - had) / (now - began):.2f} {self._unit}/s" if now > began else ""
        self._progress.update(self._task, completed=done, total=total, speed=speed)
