from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dashboard.report_tables import table_html, tables_of


def small_table() -> Table:
    table = Table(title="Levels", caption="as measured")
    table.add_column("level")
    table.add_column("best r", justify="right")
    table.add_row("exact", Text("23"), style="bold")
    table.add_row("<mean & field>", "22")
    return table


def test_a_table_keeps_header_rows_and_caption() -> None:
    assert table_html(small_table()) == (
        '<table class="report"><caption>as measured</caption>'
        '<tr><th class="text">level</th><th class="number">best r</th></tr>'
        '<tr class="chosen"><td class="text">exact</td><td class="number">23</td></tr>'
        '<tr><td class="text">&lt;mean &amp; field&gt;</td><td class="number">22</td></tr>'
        "</table>"
    )


def test_a_grid_has_no_header() -> None:
    grid = Table.grid()
    grid.add_row("requests", "2,000")
    assert "<th" not in table_html(grid)
    assert "2,000" in table_html(grid)


def test_tables_are_found_inside_groups_and_paddings() -> None:
    first, second = small_table(), Table.grid()
    assert list(tables_of(Group(first, Padding(second)))) == [first, second]
