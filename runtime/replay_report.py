"""A replay's summary as text: rich tables on a terminal, plain columns in a pipe."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 100
MEBI = 1 << 20
NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def print_replay(summary: Mapping[str, Any], console: Console) -> None:
    """Print every section."""
    plain = not console.is_terminal
    console.print()
    console.print(_asked(summary, plain))
    console.print()
    console.print(_latencies(summary, plain))
    console.print()
    console.print(Text("Served", style="bold"))
    for line in _lines(summary):
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    if summary["warnings"]:
        console.print()
        console.print(Text("Mind", style="bold yellow"))
        for line in summary["warnings"]:
            console.print(Padding(Text(f"- {line}"), (0, 0, 0, 1)))


def report_text(summary: Mapping[str, Any]) -> bytes:
    """What a pipe would get."""
    buffer = io.StringIO()
    print_replay(summary, Console(file=buffer, width=PLAIN_WIDTH, highlight=False))
    return buffer.getvalue().encode()


def make_console() -> Console:
    """As wide as the terminal, or of one width in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def duration(seconds: float | None) -> str:
    """Seconds in the unit that reads best."""
    if seconds is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:,.3g} {unit}" if seconds < 1e4 else f"{seconds:,.0f} s"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0 s"


def new_table(title: str, plain: bool, *columns: str) -> Table:
    """Rounded on a terminal, ASCII in a pipe; first column left, others right."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.ASCII2 if plain else box.ROUNDED,
        pad_edge=False,
    )
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 else "right", overflow="fold")
    return table


def _asked(summary: Mapping[str, Any], plain: bool) -> Table:
    """Workload, model, memory, drive."""
    workload, d, counts = summary["workload"], summary["deployment"], summary["requests"]
    table = new_table("What was replayed", plain, "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    table.add_row("workload", Text(f"{workload['name']} ({workload['source']})"))
    turns = f", {counts['following_turns']:,} follow an answer" if counts["following_turns"] else ""
    blocks = ", equal blocks of prompts are equal tokens" if counts["with_blocks"] else ""
    table.add_row("requests", f"{counts['requests']:,}{turns}{blocks}")
    for name in ("prompt_tokens", "output_tokens"):
        column = workload[name]
        table.add_row(
            name.replace("_", " "),
            f"mean {column['mean']:,.1f}, p50 {column['p50']:,.0f}, p99 {column['p99']:,.0f}, "
            f"max {column['max']:,.0f}",
        )
    table.add_row(
        "as replayed",
        f"prompts mean {counts['mean_prompt_tokens']:,.1f}, answers mean "
        f"{counts['mean_output_tokens']:,.1f}",
    )
    table.add_row("drive", Text(summary["drive"]["text"]))
    table.add_row("engine", Text(d["text"]))
    return table


def _latencies(summary: Mapping[str, Any], plain: bool) -> Table:
    row = summary["policies"][0]
    table = new_table(f"Latency of {row['served']:,} answers", plain, "", *COLUMNS)
    for name, label in NAMES.items():
        found = row["latency"][name] or {}
        table.add_row(label, *(duration(found.get(column)) for column in COLUMNS))
    return table


def _lines(summary: Mapping[str, Any]) -> list[str]:
    row, d, counts = summary["policies"][0], summary["deployment"], summary["requests"]
    lines = [
        f"{row['served']:,} of {counts['requests']:,} requests in {duration(row['makespan_s'])}"
        + (f", {row['refused']:,} got an error" if row["refused"] else "")
        + f": {row['requests_per_s']:.4g} requests/s, {row['output_tokens_per_s']:,.4g} output "
        f"tokens/s, {row['prompt_tokens_per_s']:,.4g} prompt tokens/s"
    ]
    if row["good_share"] is not None:
        slo = summary["slo"]
        targets = ", ".join(f"{NAMES[n]} <= {duration(v)}" for n, v in slo.items() if v is not None)
        lines.append(
            f"goodput: {100 * row['good_share']:.1f} % of the requests that arrived meet {targets}"
        )
    if row["cached_share"] is not None:
        lines.append(
            f"prefixes: {row['cached_tokens']:,} prompt tokens were not computed "
            f"({100 * row['cached_share']:.1f} %)"
        )
    if not row["steps"]:
        return lines
    lines.append(
        f"{row['steps']:,} steps, {row['running_mean']:.1f} sequences running on average and "
        f"{row['running_peak']:,} at the peak; KV of {row['kv_tokens_peak']:,} tokens, "
        f"{row['kv_pages_peak'] * d['page_bytes'] / MEBI:,.1f} of "
        f"{d['arena_bytes'] / MEBI:,.1f} MiB; {row['preemptions']:,} preemptions"
    )
    if row["mean_bits"] is not None:
        moved = row["moved_bytes"] / MEBI
        lines.append(
            f"bits per expert weight: {row['mean_bits']:.2f} on average, {row['first_bits']:.2f} "
            f"at the start, {row['least_bits']:.2f} at the narrowest, {row['last_bits']:.2f} at "
            f"the end; {moved:,.1f} MiB copied"
        )
        if row["bits_at_first_preemption"] is not None:
            lines.append(
                f"the first preemption came at {duration(row['first_preemption_s'])}, with "
                f"{row['bits_at_first_preemption']:.2f} bits"
            )
    if summary["decision_calls"] is not None:
        calls = summary["decision_calls"]
        left_out = f", {calls['left_out']:,} left out" if calls["left_out"] else ""
        lines.append(f"decision log: {calls['kept']:,} calls{left_out}")
    return lines
