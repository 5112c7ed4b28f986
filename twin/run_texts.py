"""The texts that every run directory holds: the scenario as it was asked, the report as printed."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def scenario_text(scenario: Any) -> bytes:
    """A scenario as TOML, its files by absolute paths, so that the run can be repeated anywhere."""
    import tomli_w

    from models.scenario_file import scenario_tables, with_absolute_files

    return tomli_w.dumps(with_absolute_files(scenario_tables(scenario))).encode()


def report_text(
    print_summary: Callable[[Mapping[str, Any], Console], None], summary: Mapping[str, Any]
) -> bytes:
    """What the terminal would show of a summary, in the width of a plain file."""
    from rich.console import Console

    from twin.report import PLAIN_WIDTH

    buffer = io.StringIO()
    print_summary(summary, Console(file=buffer, width=PLAIN_WIDTH, highlight=False))
    return buffer.getvalue().encode()
