"""Curves of a prefix cache as text: what was asked, the answer, hit rates by policy and size."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twin.report import duration, new_table, percent, print_warnings

SIZES_PER_TABLE = 7
MEASURES = {
    "block_hit_share": "Block hits, % of all prompt blocks",
    "token_hit_share": "Token hits, % of all prompt tokens",
    "saved_share": "Prefill saved, % of the seconds without a cache",
}
"""Measure of a row -> title of its table."""

Summary = Mapping[str, Any]


def print_cache(summary: Summary, console: Console) -> None:
    """Print every section."""
    plain = not console.is_terminal
    console.print()
    console.print(question_table(summary, plain))
    console.print()
    console.print(Text("Answer", style="bold"))
    for line in answer_lines(summary):
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    console.print()
    for table in curve_tables(summary, plain):
        # rich would wrap a caption to the width of the table
        caption, table.caption = table.caption, None
        console.print(table)
        console.print(Text(textwrap.fill(str(caption), console.width)))
        console.print()
    print_warnings(summary["warnings"], console)


def question_table(summary: Summary, plain: bool) -> Table:
    """Workload, model and what a block takes."""
    workload, model = summary["workload"], summary["model"]
    table = new_table("What was asked", plain, "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    table.add_row("workload", Text(f"{workload['name']} ({workload['source']})"))
    generated = workload["num_generated_blocks"]
    table.add_row(
        "blocks",
        f"{workload['num_references']:,} in {workload['num_requests']:,} prompts"
        + (f", {generated:,} generated" if generated else "")
        + f"; {workload['num_distinct_blocks']:,} different of {workload['block_tokens']} tokens",
    )
    table.add_row(
        "a block takes",
        f"{binary_bytes(model['block_bytes'])} ({model['name']}, {model['token_bytes']:,} bytes a "
        f"token); all different ones {binary_bytes(_all_bytes(summary))}",
    )
    table.add_row(
        "prefill",
        f"{duration(workload['prefill_s'])} of arithmetic on {model['device']} at "
        f"{percent(model['mfu'], 0)} of its peak without a cache",
    )
    unbounded = summary["unbounded"]
    table.add_row(
        "unbounded cache",
        f"hits {percent(unbounded['block_hit_share'], 1)} of the blocks, "
        f"{percent(unbounded['token_hit_share'], 1)} of the tokens; "
        f"saves {percent(unbounded['saved_share'], 1)} of the prefill",
    )
    return table


def answer_lines(summary: Summary) -> list[str]:
    """Which policy is best how often, by hits and by seconds, and how near the bound that is."""
    sizes = [size["asked"] for size in summary["sizes"]]
    lines = []
    rivals = (("block_hit_share", "block hits"), ("saved_share", "saved prefill"))
    for measure, what in rivals if len(summary["curves"]) > 1 else ():
        wins: dict[str, list[str]] = {}
        for size, names in zip(sizes, summary["best"][measure], strict=True):
            for name in names:
                wins.setdefault(name, []).append(size)
        most = max(len(won) for won in wins.values())
        name = next(name for name in summary["curves"] if len(wins.get(name, ())) == most)
        lines.append(
            f"by {what} {name} is the best, or level with it, at {most} of {len(sizes)} sizes"
            + (f" ({', '.join(wins[name])})" if most < len(sizes) else "")
        )
    shares = summary["share_of_bound"]
    if shares and any(share is not None for share in shares.values()):
        name = max(shares, key=lambda policy: shares[policy] or 0.0)
        lines.append(
            f"nearest to Belady's bound: {name} with {percent(shares[name], 1)} of its block hits, "
            "mean over sizes"
        )
    return lines


def curve_tables(summary: Summary, plain: bool) -> Iterator[Table]:
    """One table a measure; of many sizes several tables of ``SIZES_PER_TABLE``."""
    num = len(summary["sizes"])
    for measure, title in MEASURES.items():
        if measure == "token_hit_share" and _is_as_blocks(summary):
            continue
        for first in range(0, num, SIZES_PER_TABLE):
            shown = range(first, min(first + SIZES_PER_TABLE, num))
            yield _curve_table(summary, measure, title, shown, plain)


def _curve_table(
    summary: Summary, measure: str, title: str, shown: Sequence[int], plain: bool
) -> Table:
    shares = summary["share_of_bound"] if measure == "block_hit_share" else None
    best = summary["best"][measure]
    headers = [_size_header(summary["sizes"][at]) for at in shown]
    table = new_table(title, plain, "policy", *headers, *(["of bound"] if shares else []))
    for name, rows in summary["curves"].items():
        cells = [
            Text(_points(rows[at][measure]) + "*", style="bold")
            if name in best[at]
            else Text(_points(rows[at][measure]) + " ")
            for at in shown
        ]
        of_bound = [percent(shares[name], 1)] if shares else []
        table.add_row(name, *cells, *of_bound)
    table.add_section()
    if summary["bound"] is not None and measure != "saved_share":
        bound = [_points(summary["bound"][at][measure]) + " " for at in shown]
        table.add_row("bound", *bound, *(["100.0 %"] if shares else []))
    table.add_row("unbounded", *(_points(summary["unbounded"][measure]) + " " for _ in shown))
    table.caption = Text(
        "*: best policy, or within 0.05 points of it; below each size its blocks and memory"
        + ("; of bound: share of the bound's hits, mean over all sizes" if shares else "")
    )
    table.caption_justify = "left"
    return table


def binary_bytes(num_bytes: float) -> str:
    """Bytes in the power of 1024 that reads best."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= scale:
            scaled = num_bytes / scale
            return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{num_bytes:,.0f} B"


def _size_header(size: Mapping[str, Any]) -> str:
    asked, memory = size["asked"], binary_bytes(size["bytes"])
    blocks = f"{size['blocks']:,}"
    if asked.endswith("%"):
        return f"{asked}\n{blocks}\n{memory}"
    return f"{blocks}\n{memory}"


def _points(share: float) -> str:
    return f"{100.0 * share:.1f}"


def _all_bytes(summary: Summary) -> float:
    return float(summary["workload"]["num_distinct_blocks"] * summary["model"]["block_bytes"])


def _is_as_blocks(summary: Summary) -> bool:
    """Token hits say no more than block hits do: they round to the same everywhere."""
    rows = [row for curve in summary["curves"].values() for row in curve]
    return all(
        _points(row["block_hit_share"]) == _points(row["token_hit_share"])
        for row in (*rows, summary["unbounded"])
    )
