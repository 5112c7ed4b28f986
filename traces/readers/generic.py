"""CSV and JSON Lines of no known family: columns named by the caller or guessed from their names.

A guess is made only from names that can mean nothing else, and is said in the notes. A file in
which prompt and output tokens cannot both be found is refused, as is one with several candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.readers.assembly import Columns
from traces.readers.csv_rows import CsvHeader, read_csv_columns
from traces.readers.json_rows import JsonHead, read_json_columns
from traces.readers.layout import (
    Layout,
    Names,
    Numbers,
    Options,
    RowRule,
    canonical,
    with_measured,
)
from traces.readers.times import without_unit
from traces.request import Trace

CSV = "csv"
JSONL = "jsonl"

# Compared without case, spaces and signs: "Prompt tokens" is prompt_tokens.
_KNOWN = {
    "prompt": (
        "prompt_tokens num_prompt_tokens n_prompt_tokens prompt_length prompt_len prompt_toks "
        "input_tokens num_input_tokens n_input_tokens input_length input_len input_toks "
        "context_tokens num_context_tokens prefill_tokens num_prefill_tokens prefill_length "
        "request_tokens tokens_in in_tokens isl"
    ),
    "output": (
        "output_tokens num_output_tokens n_output_tokens output_length output_len output_toks "
        "completion_tokens num_completion_tokens generated_tokens num_generated_tokens "
        "n_generated_tokens decode_tokens num_decode_tokens decode_length response_tokens "
        "num_response_tokens response_length tokens_out out_tokens osl"
    ),
    "arrival": (
        "timestamp time_stamp arrival arrival_time arrival_timestamp arrived_at arrival_at "
        "time ts t request_time request_timestamp received_at created_at start_time datetime"
    ),
    "request_id": "request_id req_id",
    "session": "session_id conversation_id",
    "hash_ids": "hash_ids block_ids",
}
ROLES = tuple(_KNOWN)
# Columns of exactly these names are taken as they are, in seconds.
THINK = "think_s"
MEASURED = ("ttft_s", "tpot_s", "queue_s", "e2e_s", "session_time_s")
_SAID = {
    "prompt": "prompt tokens",
    "output": "output tokens",
    "arrival": "arrival time",
    "request_id": "request id",
    "session": "session",
    "hash_ids": "block ids",
}
_TIMINGS = ("prompt_time", "token_time", "e2e_time", "ttft", "tpot", "latency")


@dataclass(frozen=True, slots=True)
class _Parts:
    """Which column plays which role, and how that was decided."""

    column_by_role: Mapping[str, str]
    notes: tuple[str, ...]


def looks_readable(names: Names) -> bool:
    """Whether prompt and output tokens can each be guessed from exactly one name."""
    return len(_candidates(names, "prompt")) == 1 and len(_candidates(names, "output")) == 1


def read_csv(header: CsvHeader, options: Options) -> Trace:
    """Read a CSV file of no known family."""
    parts = _parts(header, options.columns or {})
    blocks = parts.column_by_role.get("hash_ids")
    notes = parts.notes
    if blocks is not None:
        if options.columns and "hash_ids" in options.columns:
            raise TraceError(f"{header.path}: block ids can be read from JSON Lines only, not CSV")
        notes = (*notes, f"column {blocks} was ignored: block ids cannot be read from CSV")
    layout = _layout(CSV, parts.column_by_role, notes, numbers=_found(header.names))
    return _with_numbers(read_csv_columns(header, layout, options))


def read_jsonl(head: JsonHead, options: Options) -> Trace:
    """Read a JSON Lines file of no known family; block ids need ``block_tokens``."""
    parts = _parts(head, options.columns or {})
    blocks, size = parts.column_by_role.get("hash_ids"), options.block_tokens
    notes = parts.notes
    if blocks is not None and size is None:
        if options.columns and "hash_ids" in options.columns:
            raise TraceError(
                f"{head.path}: block ids of column {blocks} need block_tokens, the tokens per block"
            )
        notes = (*notes, f"column {blocks} was ignored: block_tokens was not given")
        blocks = None
    layout = _layout(
        JSONL,
        parts.column_by_role,
        notes,
        numbers=(THINK, *MEASURED),
        blocks=blocks,
        block_tokens=(size or 0) if blocks else 0,
    )
    return _with_numbers(read_json_columns(head, layout, options))


def check_readable(head: CsvHeader | JsonHead) -> None:
    """Refuse a file in which not every needed column can be guessed.

    Raises:
        TraceError: With the columns found.
    """
    _parts(head, {})


def check_roles(path: Path, columns: Mapping[str, str]) -> None:
    """Refuse a column map with a role that does not exist.

    Raises:
        TraceError: With the roles there are.
    """
    unknown = [role for role in columns if role not in ROLES]
    if unknown:
        raise TraceError(
            f"{path}: the column map has no role {', '.join(map(repr, unknown))}; "
            f"roles: {', '.join(ROLES)}"
        )


def _layout(
    format_name: str,
    column_by_role: Mapping[str, str],
    notes: tuple[str, ...],
    *,
    numbers: tuple[str, ...],
    blocks: str | None = None,
    block_tokens: int = 0,
) -> Layout:
    return Layout(
        format=format_name,
        prompt=column_by_role["prompt"],
        output=column_by_role["output"],
        arrival=column_by_role.get("arrival"),
        request_id=column_by_role.get("request_id"),
        session_id=column_by_role.get("session"),
        block_ids=blocks,
        block_tokens=block_tokens,
        numbers=numbers,
        row_rules=tuple(_not_negative(column) for column in numbers),
        notes=notes,
    )


def _found(names: Names) -> tuple[str, ...]:
    return tuple(column for column in (THINK, *MEASURED) if names.spelled.count(column) == 1)


def _not_negative(column: str) -> RowRule:
    def holds(numbers: Numbers) -> NDArray[np.bool_]:
        return ~(numbers[column] < 0)

    return RowRule(column=column, rule=f"{column} must be >= 0", holds=holds)


def _with_numbers(columns: Columns) -> Trace:
    """The trace with the think and measured times of which any is known."""
    known = {
        column: values
        for column, values in columns.numbers.items()
        if not bool(np.isnan(values).all())
    }
    think_s = known.pop(THINK, None)
    return replace(with_measured(columns.trace, **known), think_s=think_s)


def _parts(head: CsvHeader | JsonHead, given: Mapping[str, str]) -> _Parts:
    path, names = head.path, head.names
    check_roles(path, given)
    column_by_role = {role: _named(path, names, role, name) for role, name in given.items()}
    for role, column in column_by_role.items():
        others = [other for other in column_by_role if column_by_role[other] == column]
        if others[0] != role:
            raise TraceError(f"{path}: column {column} cannot be both {others[0]} and {role}")
    guessed = {}
    for role in ROLES:
        if role in given:
            continue
        found = [name for name in _candidates(names, role) if name not in column_by_role.values()]
        if len(found) > 1:
            raise TraceError(
                f"{path}: several columns could be the {_SAID[role]}: {', '.join(found)}; "
                f"say which one with {role}=NAME"
            )
        if found:
            guessed[role] = found[0]
    column_by_role |= guessed
    missing = [role for role in ("prompt", "output") if role not in column_by_role]
    if missing:
        raise TraceError(f"{path}: {_refusal(head, missing)}")
    taken = ", ".join(f"{column} as {_SAID[role]}" for role, column in column_by_role.items())
    notes = [f"columns taken: {taken}"]
    if guessed:
        notes.append(f"guessed by name: {', '.join(guessed.values())}")
    return _Parts(column_by_role, tuple(notes))


def _refusal(head: CsvHeader | JsonHead, missing: list[str]) -> str:
    names = head.names
    said = " and ".join(_SAID[role] for role in missing)
    advice = ", ".join(f"{role}=NAME" for role in missing)
    if isinstance(head, CsvHeader) and len(names.spelled) == 1:
        hint = "; fields must be separated by ',', ';' or a tab"
    elif any(names.has(column) for column in _TIMINGS):
        hint = "; this looks like a table of measured times, not of requests"
    else:
        hint = ""
    return (
        f"is not a known trace format, and no column holds the {said}{hint}; "
        f"columns found: {names.listed()}; if they are there, name them with {advice}"
    )


def _named(path: Path, names: Names, role: str, name: str) -> str:
    found = names.find(name)
    if found is None:
        raise TraceError(
            f"{path}: there is no column {name!r} for the {_SAID[role]}; "
            f"columns found: {names.listed()}"
        )
    return found


def _candidates(names: Names, role: str) -> list[str]:
    wanted = {canonical(name) for name in _KNOWN[role].split()}
    bare = without_unit if role == "arrival" else str
    return [name for name in names if canonical(bare(name)) in wanted]
