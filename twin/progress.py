"""A progress bar on standard error, only where somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[str, int, int], None]


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """Yield ``on_progress(label, done, total)``; draws nothing unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda label, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1)

        def on_progress(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        yield on_progress
