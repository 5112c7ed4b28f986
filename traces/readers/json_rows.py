"""JSON Lines of any flat family: whole chunks by Arrow, and row by row where one is unusual.

Row by row is what the rules are written for: it knows the line of each row and says what is wrong
with it. Both ways give the same rows; the tests compare them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from traces.errors import TraceError
from traces.readers.arrow_json import ArrowJson
from traces.readers.assembly import Assembly, Columns
from traces.readers.blocks import BlockIds
from traces.readers.files import Chunk, chunks, pieces
from traces.readers.layout import Layout, Names, Options
from traces.readers.rows import Batch, RowCollector
from traces.readers.rules import BadRow, BadRows, Missing, number_in_json, shown
from traces.readers.times import TimeColumn

ROWS_PER_BATCH = 1 << 16
_OBJECT_RULE = "a line must be one JSON object"


class JsonHead:
    """What the first lines of a JSON Lines file hold.

    Attributes:
        path: The file.
        sample: Key -> the first value that is not null, of the first objects.
        names: The keys, in order of appearance.
    """

    def __init__(self, path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
        self.path = path
        self.sample: dict[str, Any] = {}
        for row in objects:
            for key, value in row.items():
                if self.sample.get(key) is None:
                    self.sample[key] = value
        self.names = Names(path, self.sample)


def parsed_object(text: bytes) -> dict[str, Any]:
    """The JSON object in one line.

    Raises:
        BadRow: If the line is anything else.
    """
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise BadRow("", shown(repr(text[error.start :])), "text must be UTF-8") from None
    except (ValueError, RecursionError) as error:
        place = f"{' '.join(str(error).split())}"
        raise BadRow("", shown(text.decode(errors="replace")), _OBJECT_RULE, place) from None
    if not isinstance(value, dict):
        raise BadRow("", shown(value), _OBJECT_RULE)
    return value


def json_objects(parts: Iterator[Chunk], bad_rows: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank.

    Raises:
        TraceError: If a line is no JSON object and bad rows are not to be skipped.
    """
    for chunk in parts:
        lines = chunk.data.split(b"\n")
        for i, text in enumerate(lines):
            if not text.strip():
                continue
            line = chunk.first_line + i
            try:
                value = parsed_object(text)
            except BadRow as bad:
                bad_rows.add(line, bad, is_torn=chunk.is_torn and i == len(lines) - 1)
            else:
                yield line, value


def json_collector(
    layout: Layout, times: TimeColumn | None, blocks: BlockIds | None
) -> RowCollector:
    """A collector of rows whose values come from JSON."""
    moment = None if times is None else times.from_json
    return RowCollector(layout, times, blocks, number=number_in_json, moment=moment)


def read_json_columns(head: JsonHead, layout: Layout, options: Options) -> Columns:
    """All objects of a JSON Lines file in the keys of ``layout``.

    Raises:
        TraceError: If the file cannot be read, or a row is bad and not to be skipped.
    """
    times = TimeColumn(layout.arrival) if layout.arrival is not None else None
    blocks = BlockIds(layout.block_ids) if layout.block_ids is not None else None
    bad_rows = BadRows(head.path, skip=options.skip_bad_rows)
    assembly = Assembly(head.path, layout, options, bad_rows, times)
    collector = json_collector(layout, times, blocks)
    arrow = ArrowJson(head.sample, layout, times, blocks)
    for chunk in chunks(head.path):
        whole = arrow.batch(chunk)
        if whole is not None:
            assembly.add(whole)
            continue
        # In pieces, so that one odd row costs little.
        for piece in pieces(chunk):
            fast = arrow.batch(piece)
            rows = _row_by_row(piece, layout, collector, bad_rows)
            for batch in [fast] if fast is not None else rows:
                assembly.add(batch)
    return assembly.columns()


def _row_by_row(
    chunk: Chunk, layout: Layout, collector: RowCollector, bad_rows: BadRows
) -> Iterator[Batch]:
    keys = layout.columns
    for line, row in json_objects(iter([chunk]), bad_rows):
        try:
            collector.add(line, [None if k is None else row.get(k, Missing.KEY) for k in keys])
        except BadRow as bad:
            bad_rows.add(line, bad)
        if len(collector) == ROWS_PER_BATCH:
            yield collector.batch()
    yield collector.batch()


def not_lines(path: Path, data: bytes) -> TraceError | None:
    """An error where the file is one JSON document rather than lines of objects, else None."""
    start = data.lstrip()[:1]
    if start == b"[":
        return TraceError(
            f"{path}: is a JSON array, not JSON Lines: write one object per line (jq -c '.[]')"
        )
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return None
    return TraceError(
        f"{path}: is one JSON document over several lines, not a request trace in JSON Lines "
        "(one object per line)"
    )
