"""Writes a trace in the product's own plain form, which every reader of CSV or JSON Lines takes.

Columns: arrival_s, prompt_tokens, output_tokens, then what the trace has of request_id, session_id,
think_s and measured times; JSON Lines carries hash_ids as well. Unknown values are left empty.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from traces.errors import TraceError
from traces.request import Trace

ENDINGS = (".csv", ".jsonl", ".csv.gz", ".jsonl.gz")


def check_new(path: str | Path) -> None:
    """Fail before the work, not after it, where a trace could not be written.

    Raises:
        TraceError: If the ending is not one of ``ENDINGS``, or there is something of that name.
    """
    target = Path(path)
    if not target.name.endswith(ENDINGS):
        raise TraceError(f"{target}: the name must end in {', '.join(ENDINGS)}")
    if os.path.lexists(target):
        raise TraceError(f"{target}: exists already; choose another name or remove it")


def write_trace(trace: Trace, path: str | Path) -> tuple[str, ...]:
    """Write a trace; the ending says how: .csv or .jsonl, each perhaps with .gz.

    The file appears whole under its name or not at all.

    Args:
        trace: What to write.
        path: Where; nothing of that name may exist.

    Returns:
        What the chosen form does not carry, one sentence each.

    Raises:
        TraceError: If the ending is another one, the file exists, or it cannot be written.
    """
    target = Path(path)
    check_new(target)
    is_csv = target.name.endswith((".csv", ".csv.gz"))
    lines = _csv_lines(trace) if is_csv else _json_lines(trace)
    partial = target.with_name(f".trace-{os.getpid()}.partial")
    try:
        with partial.open("wb") as raw:
            if target.name.endswith(".gz"):
                # no name and no time inside: equal traces give equal files
                with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                    _write(packed, lines)
            else:
                _write(raw, lines)
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(target)
    except OSError as error:
        raise TraceError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):  # the folder may be no folder
            partial.unlink(missing_ok=True)
    if trace.block_ids is None:
        return ()
    if is_csv:
        return ("CSV has no place for prompt blocks; JSON Lines keeps them as hash_ids",)
    return (f"prompt blocks are read back where {trace.block_tokens} tokens per block are given",)


def _write(file: io.BufferedIOBase | gzip.GzipFile, lines: Iterator[str]) -> None:
    for text in lines:
        file.write(text.encode())


def _columns(trace: Trace) -> dict[str, NDArray[Any]]:
    columns = {
        "arrival_s": trace.arrival_s,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
        "request_id": trace.request_ids,
        "session_id": trace.session_ids,
        "think_s": trace.think_s,
        **trace.measured,
    }
    return {name: column for name, column in columns.items() if column is not None}


def _rows(trace: Trace) -> Iterator[tuple[object, ...]]:
    """Plain Python values row by row; None for what is unknown."""
    for row in zip(*(column.tolist() for column in _columns(trace).values()), strict=True):
        yield tuple(None if v != v else v for v in row)  # NaN is not itself


def _csv_lines(trace: Trace) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_columns(trace))
    for row in _rows(trace):
        writer.writerow(["" if value is None else value for value in row])
        if buffer.tell() > 1 << 16:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _json_lines(trace: Trace) -> Iterator[str]:
    names = list(_columns(trace))
    offsets, ids = trace.block_offsets, trace.block_ids
    for i, row in enumerate(_rows(trace)):
        record: dict[str, object] = {
            name: value for name, value in zip(names, row, strict=True) if value is not None
        }
        if offsets is not None and ids is not None:
            record["hash_ids"] = ids[int(offsets[i]) : int(offsets[i + 1])].tolist()
        yield json.dumps(record) + "\n"
