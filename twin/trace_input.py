"""What the commands of ``twin trace`` share: options of a file, and how bad input ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from traces.request import Trace


@contextmanager
def input_errors() -> Iterator[None]:
    """Bad input ends with one message and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not _is_about_input(error):
            raise
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(2) from None


def _is_about_input(error: Exception) -> bool:
    from traces.errors import TraceError
    from twin.fetch_catalog import FetchError
    from twin.trace_generation import GenerationError

    return isinstance(error, TraceError | FetchError | GenerationError)


def read_options(
    format_name: str,
    columns: list[str] | None,
    time_unit: str | None,
    skip_bad_rows: bool,
    block_tokens: int | None,
) -> dict[str, Any]:
    """Keyword arguments of ``read_trace``."""
    return {
        "format": format_name,
        "columns": column_map(columns or []),
        "time_unit": time_unit,
        "skip_bad_rows": skip_bad_rows,
        "block_tokens": block_tokens,
    }


def column_map(given: list[str]) -> dict[str, str] | None:
    """``role=NAME`` texts as a mapping; None for none."""
    from traces.errors import TraceError

    mapping: dict[str, str] = {}
    for text in ",".join(given).split(",") if given else []:
        role, sign, column = text.partition("=")
        if not (role.strip() and sign and column.strip()):
            raise TraceError(f"--columns must be role=NAME, found {text!r}")
        if role.strip() in mapping:
            raise TraceError(f"--columns names the role {role.strip()!r} twice")
        mapping[role.strip()] = column.strip()
    return mapping or None


def read_file(file: Path, options: Mapping[str, Any]) -> Trace:
    """The trace of a file, read with the options of ``read_options``."""
    from traces.errors import TraceError
    from traces.readers import read_trace
    from traces.workloads import BUNDLED

    if str(file) in BUNDLED and not file.exists():
        raise TraceError(
            f"{file}: a bundled workload, not a file; `twin trace generate` makes one from it"
        )
    return read_trace(file, **options)
