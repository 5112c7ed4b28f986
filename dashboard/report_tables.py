"""The tables of the command line's report, on the page: same rows, same words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def tables_of(section: RenderableType) -> Iterator[Table]:
    """The tables of one section of the report, in order."""
    if isinstance(section, Group):
        for part in section.renderables:
            yield from tables_of(part)
    elif isinstance(section, Padding):
        yield from tables_of(section.renderable)
    elif isinstance(section, Table):
        yield section


def table_html(table: Table) -> str:
    """One table as HTML: header, rows, caption; the title is left to the page."""
    columns = [list(column.cells) for column in table.columns]
    classes = [_class(column.justify) for column in table.columns]
    header = [_plain(column.header) for column in table.columns]
    parts = ['<table class="report">']
    if table.caption:
        parts.append(f"<caption>{escape(_plain(table.caption))}</caption>")
    if table.show_header and any(header):
        parts.append(_row("th", header, classes))
    for at, row in enumerate(table.rows):
        cells = [_plain(column[at]) for column in columns]
        parts.append(_row("td", cells, classes, is_bold="bold" in str(row.style or "")))
    return "".join([*parts, "</table>"])


def _plain(cell: RenderableType | str) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _class(justify: str) -> str:
    return "number" if justify == "right" else "text"


def _row(tag: str, cells: Sequence[str], classes: Sequence[str], *, is_bold: bool = False) -> str:
    inside = "".join(
        f'<{tag} class="{name}">{escape(cell)}</{tag}>'
        for cell, name in zip(cells, classes, strict=True)
    )
    return f'<tr class="chosen">{inside}</tr>' if is_bold else f"<tr>{inside}</tr>"
