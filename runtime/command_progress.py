"""Progress of long commands on standard error: a bar on a terminal, a line per file elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


Show = Callable[[float, float], None]


@contextmanager
def phases() -> Iterator[Callable[[str, str, float], Show]]:
    """Yield ``phase(label, unit, scale)``, which gives ``show(done, total)`` of one phase's bar.

    A bar appears when its phase first shows something; none unless standard error is a terminal.
    ``label`` says what is done, ``unit`` is written behind numbers and speed, ``scale`` is how many
    make one unit.
    """
    if not sys.stderr.isatty():
        yield lambda label, unit, scale: lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f}/{task.total:.1f} {task.fields[unit]}"),
        TextColumn("{task.fields[speed]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def phase(label: str, unit: str, scale: float) -> Show:
            task = progress.add_task(label, total=1.0, visible=False, speed="", unit=unit)
            return _Show(progress, task, unit, scale)

        yield phase


@contextmanager
def bar(label: str, unit: str, scale: float) -> Iterator[Show]:
    """Yield ``show(done, total)`` of a command with one phase; see ``phases``."""
    with phases() as phase:
        yield phase(label, unit, scale)


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
            self._progress.reset(self._task, total=total, completed=int(done), visible=True)
        began, had = self._first
        speed = f"{(done - had) / (now - began):.2f} {self._unit}/s" if now > began else ""
        self._progress.update(self._task, completed=done, total=total, speed=speed)
