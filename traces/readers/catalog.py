"""Every format by name, how a file's own content tells which it is, and the one way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from traces.errors import TraceError
from traces.readers import agentic, azure, burstgpt, dynamo, generic, mooncake, vidur, vllm_bench
from traces.readers.csv_rows import CsvHeader
from traces.readers.files import Chunk, chunks
from traces.readers.json_rows import JsonHead, not_lines, parsed_object
from traces.readers.layout import Names, Options
from traces.readers.rules import BadRow, BadRows
from traces.readers.times import TimeUnit
from traces.request import Trace

LINES_TRIED = 100
BYTES_TRIED = 1 << 18


@dataclass(frozen=True, slots=True)
class _CsvFormat:
    description: str
    matches: Callable[[Names], bool]
    read: Callable[[CsvHeader, Options], Trace]


@dataclass(frozen=True, slots=True)
class _JsonFormat:
    description: str
    matches: Callable[[JsonHead], bool]
    read: Callable[[JsonHead, Options], Trace]


_CSV: dict[str, _CsvFormat] = {
    azure.FORMAT: _CsvFormat(
        "Azure LLM inference 2023/2024: TIMESTAMP, ContextTokens, GeneratedTokens",
        azure.matches,
        azure.read,
    ),
    vidur.VIDUR: _CsvFormat(
        "Vidur: num_prefill_tokens, num_decode_tokens, perhaps arrived_at (s)",
        vidur.matches_vidur,
        vidur.read_vidur,
    ),
    vidur.SPLITWISE: _CsvFormat(
        "splitwise-sim: arrival_timestamp (s), prompt_size, token_size",
        vidur.matches_splitwise,
        vidur.read_splitwise,
    ),
    burstgpt.FORMAT: _CsvFormat(
        "BurstGPT: Timestamp (s), Request tokens, Response tokens, perhaps Session ID",
        burstgpt.matches,
        burstgpt.read,
    ),
    generic.CSV: _CsvFormat(
        "any CSV with a header; columns guessed by name or given",
        generic.looks_readable,
        generic.read_csv,
    ),
}
_JSONL: dict[str, _JsonFormat] = {
    mooncake.MOONCAKE: _JsonFormat(
        "Mooncake: timestamp (ms), input_length, output_length, hash_ids of 512 tokens",
        lambda head: mooncake.matches_mooncake(head.names),
        mooncake.read_mooncake,
    ),
    mooncake.QWEN: _JsonFormat(
        "Qwen-Bailian: as Mooncake with timestamp in s, 16-token blocks and chat_id",
        lambda head: mooncake.matches_qwen(head.names),
        mooncake.read_qwen,
    ),
    vllm_bench.FORMAT: _JsonFormat(
        "vLLM benchmark: input_toks, output_toks, arrival_time, measured times or hash_ids",
        lambda head: vllm_bench.matches(head.names),
        vllm_bench.read,
    ),
    agentic.FORMAT: _JsonFormat(
        "agentic sessions, one per line: requests with think_time, api_time, hash_ids",
        lambda head: agentic.matches(head.names),
        agentic.read,
    ),
    dynamo.FORMAT: _JsonFormat(
        "NVIDIA Dynamo request trace: request_end events with measured times",
        lambda head: dynamo.matches(head.sample),
        dynamo.read,
    ),
    generic.JSONL: _JsonFormat(
        "any JSON Lines with flat objects; keys guessed by name or given",
        lambda head: generic.looks_readable(head.names),
        generic.read_jsonl,
    ),
}
FORMATS: Mapping[str, str] = {
    **{name: known.description for name, known in _CSV.items()},
    **{name: known.description for name, known in _JSONL.items()},
}
"""Name of a format -> one line on what it looks like."""


def read_trace(
    path: str | Path,
    *,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    time_unit: TimeUnit | None = None,
    skip_bad_rows: bool = False,
    block_tokens: int | None = None,
) -> Trace:
    """The requests of a file, in order of arrival, the first arrival at 0 s.

    Args:
        path: The file; gzip, bzip2, xz and zstd are unpacked on the way.
        format: A name of ``FORMATS``, or ``auto`` to tell by the content.
        columns: For a file of no known family, role -> column name; the roles are prompt, output,
            arrival, request_id, session, hash_ids. Roles not named are guessed.
        time_unit: Unit of numeric arrival times, where it is not the format's own.
        skip_bad_rows: Leave out rows that break a rule and count them in ``Trace.skipped``,
            instead of stopping at the first.
        block_tokens: Tokens per prompt block, where it is not the format's own.

    Raises:
        TraceError: If the file cannot be read as a trace; one line that says where and why.
    """
    file = Path(path)
    options = Options(
        columns=dict(columns) if columns else None,
        time_unit=time_unit,
        skip_bad_rows=skip_bad_rows,
        block_tokens=block_tokens,
    )
    _check(file, format, options)
    head = _head(file)
    name = _format_of(head, options) if format == "auto" else format
    if isinstance(head, CsvHeader):
        if name not in _CSV:
            raise TraceError(f"{file}: format {name} is JSON Lines, but the file looks like CSV")
        return _CSV[name].read(head, options)
    if name not in _JSONL:
        raise TraceError(f"{file}: format {name} is CSV, but the file looks like JSON Lines")
    return _JSONL[name].read(head, options)


def detect_format(path: str | Path) -> str:
    """The format's name, told by the content alone.

    Raises:
        TraceError: If it is none of ``FORMATS``.
    """
    head = _head(Path(path))
    name = _format_of(head, Options())
    if name in (generic.CSV, generic.JSONL):
        generic.check_readable(head)
    return name


def _check(path: Path, format_name: str, options: Options) -> None:
    if format_name != "auto" and format_name not in FORMATS:
        raise TraceError(
            f"{path}: there is no format {format_name!r}; known: auto, {', '.join(FORMATS)}"
        )
    if options.time_unit is not None and options.time_unit not in get_args(TimeUnit):
        raise TraceError(
            f"{path}: time_unit must be one of {', '.join(get_args(TimeUnit))}, "
            f"found {options.time_unit!r}"
        )
    if options.block_tokens is not None and options.block_tokens < 1:
        raise TraceError(f"{path}: block_tokens must be >= 1, found {options.block_tokens}")
    if options.columns is not None:
        generic.check_roles(path, options.columns)
        if format_name not in ("auto", generic.CSV, generic.JSONL):
            raise TraceError(
                f"{path}: a column map goes with the formats {generic.CSV} and {generic.JSONL}, "
                f"format {format_name} has its own columns"
            )


def _format_of(head: CsvHeader | JsonHead, options: Options) -> str:
    is_csv = isinstance(head, CsvHeader)
    if options.columns is not None:
        return generic.CSV if is_csv else generic.JSONL
    if isinstance(head, CsvHeader):
        found = [name for name, known in _CSV.items() if known.matches(head.names)]
    else:
        found = [name for name, known in _JSONL.items() if known.matches(head)]
    # The general formats stand last; they say what is missing where nothing matches.
    return found[0] if found else (generic.CSV if is_csv else generic.JSONL)


def _head(path: Path) -> CsvHeader | JsonHead:
    """The header of a CSV file, or the first objects of a JSON Lines file."""
    stream = chunks(path)
    for chunk in stream:
        lines = chunk.data.split(b"\n", LINES_TRIED)
        for i, text in enumerate(lines[:LINES_TRIED]):
            if not text.strip():
                continue
            if text.lstrip()[:1] not in b"{[":
                return CsvHeader(path, chunk.first_line + i, _header_text(path, text))
            return _json_head(path, chunk, lines, is_whole=next(stream, None) is None)
    raise TraceError(f"{path}: is empty: nothing to read")


def _header_text(path: Path, text: bytes) -> str:
    try:
        return text.decode().removesuffix("\r")
    except UnicodeDecodeError:
        raise TraceError(f"{path}: the header is not UTF-8 text") from None


def _json_head(path: Path, chunk: Chunk, lines: list[bytes], *, is_whole: bool) -> JsonHead:
    """The objects among the first lines; bad lines are for the reader to report."""
    objects: list[dict[str, Any]] = []
    num_bytes = 0
    first_bad: list[tuple[int, BadRow]] = []
    for i, text in enumerate(lines[:LINES_TRIED]):
        if not text.strip() or (objects and num_bytes > BYTES_TRIED):
            continue
        num_bytes += len(text)
        try:
            objects.append(parsed_object(text))
        except BadRow as bad:
            first_bad.append((chunk.first_line + i, bad))
    if objects:
        return JsonHead(path, objects)
    document = not_lines(path, chunk.data) if is_whole else None
    if document is not None:
        raise document
    line, reason = first_bad[0]
    is_torn = is_whole and chunk.is_torn and line == chunk.first_line + len(lines) - 1
    raise BadRows(path, skip=False).error(line, reason, is_torn=is_torn)
