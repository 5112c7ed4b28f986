"""CSV of any family: whole chunks by Arrow, and row by row where a chunk has anything unusual.

Row by row is what the rules are written for: it knows the line of each row and says what is wrong
with it. Both ways give the same rows; the tests compare them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from traces.errors import TraceError
from traces.readers.arrow_csv import batch_by_arrow
from traces.readers.assembly import Assembly, Columns
from traces.readers.files import Chunk, chunks, pieces
from traces.readers.layout import Layout, Names, Options
from traces.readers.rows import Batch, RowCollector
from traces.readers.rules import BadRow, BadRows, number_in_text, shown
from traces.readers.times import TimeColumn

DELIMITERS = ",;\t"
ROWS_PER_BATCH = 1 << 16

_NOT_UTF8 = re.compile("[\udc80-\udcff]")


class CsvHeader:
    """The header of a CSV file.

    Attributes:
        path: The file.
        line: Its line number, after blank lines.
        delimiter: The one of ``,``, ``;`` and tab that it has most of.
        names: The column names.
    """

    def __init__(self, path: Path, line: int, text: str) -> None:
        self.path = path
        self.line = line
        bare = re.sub(r'"[^"]*"', "", text)
        self.delimiter = max(DELIMITERS, key=bare.count)
        try:
            fields = next(csv.reader([text], delimiter=self.delimiter, strict=True))
        except csv.Error as error:
            raise TraceError(f"{path}, line {line}: the header cannot be read ({error})") from None
        self.names = Names(path, [field.strip() for field in fields])
        if all(number_in_text(field) is not None for field in fields):
            raise TraceError(
                f"{path}, line {line}: found {shown(text)} where a header must stand: "
                "the first line must name the columns"
            )


def read_csv_columns(header: CsvHeader, layout: Layout, options: Options) -> Columns:
    """All rows of a CSV file in the columns of ``layout``.

    Raises:
        TraceError: If the file cannot be read, or a row is bad and not to be skipped.
    """
    times = TimeColumn(layout.arrival) if layout.arrival is not None else None
    bad_rows = BadRows(header.path, skip=options.skip_bad_rows)
    assembly = Assembly(header.path, layout, options, bad_rows, times)
    rows = _Rows(header, layout, bad_rows, times)
    rest = _after_header(header)
    for chunk in rest:
        # An odd number of quotes: a quoted field holds a line end just where the chunk is cut.
        # From there on rows are read one after the other across chunks.
        is_cut = chunk.data.count(b'"') % 2 == 1
        batches = rows.batches(chain([chunk], rest)) if is_cut else _batches(chunk, rows)
        for batch in batches:
            assembly.add(batch)
    columns = assembly.columns()
    if header.delimiter != ",":
        columns = columns.noting(f"the delimiter is {shown(header.delimiter)}")
    return columns


def _batches(chunk: Chunk, rows: _Rows) -> Iterator[Batch]:
    """The rows of a chunk: at once, or else in pieces, so that one odd row costs little."""
    fast = rows.by_arrow(chunk)
    if fast is not None:
        yield fast
    elif b'"' in chunk.data:
        yield from rows.batches(iter([chunk]))
    else:
        for piece in pieces(chunk):
            fast = rows.by_arrow(piece)
            yield from [fast] if fast is not None else rows.batches(iter([piece]))


class _Rows:
    """Reads the rows of one file, by Arrow or field by field."""

    def __init__(
        self, header: CsvHeader, layout: Layout, bad_rows: BadRows, times: TimeColumn | None
    ) -> None:
        self.header = header
        self.layout = layout
        self.bad_rows = bad_rows
        self.times = times
        self.width = len(header.names.spelled)
        self.index = [
            None if column is None else header.names.spelled.index(column)
            for column in layout.columns
        ]
        self.collector = RowCollector(
            layout,
            times,
            None,
            number=number_in_text,
            moment=None if times is None else times.from_text,
        )

    def by_arrow(self, chunk: Chunk) -> Batch | None:
        """All rows at once, or None where one needs a closer look."""
        header = self.header
        return batch_by_arrow(
            chunk, header.names.spelled, header.delimiter, self.layout, self.times
        )

    def batches(self, parts: Iterator[Chunk]) -> Iterator[Batch]:
        collector = self.collector
        lines = _Lines(parts)
        for line, fields in self._rows(lines):
            if not fields or (len(fields) == 1 and not fields[0].strip()):
                continue
            try:
                collector.add(line, self._picked(fields, lines.is_ascii))
            except BadRow as bad:
                self.bad_rows.add(line, bad, is_torn=lines.is_torn)
            if len(collector) == ROWS_PER_BATCH:
                yield collector.batch()
        yield collector.batch()

    def _picked(self, fields: list[str], is_ascii: bool) -> Sequence[str | None]:
        if len(fields) != self.width:
            what = "field" if len(fields) == 1 else "fields"
            raise BadRow(
                "",
                f"{len(fields)} {what} in {shown(self.header.delimiter.join(fields))}",
                "a row must have as many fields as the header",
                f"{self.width} separated by {shown(self.header.delimiter)}",
            )
        if not is_ascii:
            for name, field in zip(self.header.names, fields, strict=True):
                if _NOT_UTF8.search(field):
                    raise BadRow(name, shown(field), "text must be UTF-8")
        return [None if i is None else fields[i] for i in self.index]

    def _rows(self, lines: _Lines) -> Iterator[tuple[int, list[str]]]:
        """(line where the row begins, its fields)."""
        reader = csv.reader(lines, delimiter=self.header.delimiter, strict=True)
        while True:
            lines.first = 0
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                bad = BadRow("", shown(lines.text), "quotes must be closed and lines end in LF")
                bad.hint = str(error)
                self.bad_rows.add(lines.first, bad, is_torn=lines.is_torn)
                continue
            yield lines.first, fields


class _Lines:
    """Lines of chunks as text with the line end.

    Attributes:
        line: Number of the last line handed out, from 1.
        first: Number of the first line handed out since this was last set to 0.
        text: The last line.
        is_torn: Whether it ends the file without a newline.
        is_ascii: Whether all of its chunk is ASCII.
    """

    def __init__(self, parts: Iterator[Chunk]) -> None:
        self._parts = parts
        self._lines: list[str] = []
        self._next = 0
        self._chunk_is_torn = False
        self.line = 0
        self.first = 0
        self.text = ""
        self.is_torn = False
        self.is_ascii = True

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while self._next == len(self._lines):
            chunk = next(self._parts)
            self.is_ascii = chunk.data.isascii()
            text = chunk.data.decode("utf-8", errors="surrogateescape")
            self._lines = text.split("\n")
            if not self._lines[-1]:
                self._lines.pop()
            self._next, self._chunk_is_torn = 0, chunk.is_torn
            self.line = chunk.first_line - 1
        self.text = self._lines[self._next]
        self._next += 1
        self.line += 1
        self.first = self.first or self.line
        self.is_torn = self._chunk_is_torn and self._next == len(self._lines)
        return self.text.removesuffix("\r") + "\n"


def _after_header(header: CsvHeader) -> Iterator[Chunk]:
    """The file's chunks without the lines up to the header."""
    for chunk in chunks(header.path):
        if chunk.first_line > header.line:
            yield chunk
            continue
        data, line = chunk.data, chunk.first_line
        while data and line <= header.line:
            data = data[data.find(b"\n") + 1 or len(data) :]
            line += 1
        if data:
            yield Chunk(data, line, chunk.is_torn)
