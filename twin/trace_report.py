"""A trace's statistics as text: rich tables on a terminal, plain columns in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from traces.prefix_sharing import PrefixStatistics
from traces.spread import Spread
from traces.statistics import (
    ArrivalStatistics,
    LengthStatistics,
    SessionStatistics,
    TraceStatistics,
)
from twin.fetch_catalog import CatalogEntry
from twin.report import count, duration, percent

_MEASURED_NAMES = {"queue_s": "queue", "e2e_s": "end to end"}


def print_statistics(found: TraceStatistics, console: Console) -> None:
    """Print every part of the statistics that the trace has data for."""
    console.print()
    console.print(
        Text.assemble(
            (found.name, "bold"), f": {count(found.num_requests)} requests, format {found.format}"
        )
    )
    plain = not console.is_terminal
    sections = [_lengths(found.lengths, plain), _slot_load(found.lengths, plain)]
    if found.arrivals is not None:
        sections.append(_arrivals(found.arrivals, plain))
    if found.prefixes is not None:
        sections.append(_prefixes(found.prefixes, plain))
    if found.sessions is not None:
        sections.append(_sessions(found.sessions, plain))
    if found.measured:
        sections.append(_measured(found.measured, plain))
    for section in sections:
        console.print()
        console.print(section)
    _notes(found, console)


def print_catalog(entries: Iterable[CatalogEntry], console: Console) -> None:
    """Print what can be fetched."""
    table = _table("Traces that can be fetched", not console.is_terminal, "name", "what", "licence")
    table.columns[1].justify = "left"
    table.columns[2].justify = "left"
    table.add_column("size", justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(entry.name, entry.title, entry.licence, f"{entry.size_bytes / 1024:,.0f} KiB")
    console.print(table)


def _lengths(found: LengthStatistics, plain: bool) -> Table:
    table = _table("Lengths (tokens)", plain, "", "mean", "std", "p50", "p90", "p99", "max")
    for name, column in (("prompt", found.prompt_tokens), ("output", found.output_tokens)):
        table.add_row(name, *_tokens(column))
    return table


def _slot_load(found: LengthStatistics, plain: bool) -> Table:
    table = _facts("Load of a decode slot", plain)
    table.add_row(
        "theta",
        f"{count(found.theta_tokens, 1)} ± {_two_digits(found.theta_se)} tokens held at a random "
        f"decode step (one standard error), {count(found.theta_prompt_tokens, 1)} of them prompt",
    )
    table.add_row(
        "from means alone",
        f"{count(found.theta_from_means_tokens, 1)} tokens, as if lengths did not vary together",
    )
    table.add_row(
        "prompt with output",
        f"correlation {_signed(found.pearson)} (Pearson), {_signed(found.spearman)} (Spearman); "
        f"{found.prompt_tokens.mean / found.output_tokens.mean:.3g} prompt tokens per output token",
    )
    return table


def _arrivals(found: ArrivalStatistics, plain: bool) -> Table:
    table = _facts("Arrivals", plain)
    table.add_row(
        "rate",
        f"{found.rate_per_s:.4g} per s over {_long(found.duration_s)}, "
        f"{count(found.distinct_times)} distinct times",
    )
    table.add_row(
        "gaps",
        f"CV {found.gap_cv:.3g} (Poisson: 1), longest {duration(found.longest_gap_s)}",
    )
    if found.dispersion_by_window_s:
        windows = ", ".join(f"{w:g} s: {v:.3g}" for w, v in found.dispersion_by_window_s.items())
        table.add_row("variance / mean of counts", f"{windows} (Poisson: 1)")
    if found.peak_to_mean_rate is not None:
        table.add_row(
            "peak",
            f"{found.peak_to_mean_rate:.3g} x the mean rate in windows of "
            f"{found.peak_window_s:g} s",
        )
    rates = found.rate_by_window_per_s
    if 1 < len(rates) <= 24:
        table.add_row(
            f"rate by {found.rate_window_s / 60:g} minutes", ", ".join(f"{r:.3g}" for r in rates)
        )
    return table


def _prefixes(found: PrefixStatistics, plain: bool) -> Table:
    table = _facts("Shared prefixes", plain)
    table.add_row(
        "unbounded cache",
        f"{percent(found.unbounded_hit_share)} of prompt tokens hit, empty at the start",
    )
    table.add_row(
        "blocks",
        f"{count(found.num_references)} references to {count(found.num_distinct)} blocks of "
        f"{found.block_tokens} tokens, {percent(found.used_once_share, 1)} used once",
    )
    if found.lru_hit_share_by_blocks:
        sizes = ", ".join(
            f"{size:,}: {percent(share, 1)}"
            for size, share in found.lru_hit_share_by_blocks.items()
        )
        table.add_row("LRU cache of that many blocks", sizes)
    if found.reuse_gap_s is not None:
        table.add_row(
            "time between uses",
            f"p50 {duration(found.reuse_gap_s.p50)}, p90 {duration(found.reuse_gap_s.p90)}",
        )
    return table


def _sessions(found: SessionStatistics, plain: bool) -> Table:
    table = _table(
        f"Sessions ({count(found.num_sessions)})", plain, "", "mean", "p50", "p90", "p99", "max"
    )
    table.add_row("turns", *(f"{v:,.3g}" for v in _five(found.turns)))
    for name, column in (("think time", found.think_s), ("length", found.length_s)):
        if column is not None:
            table.add_row(name, *(_long(v) for v in _five(column)))
    return table


def _measured(measured: Mapping[str, Spread], plain: bool) -> Table:
    table = _table(
        "Latencies measured at the source", plain, "", "mean", "p50", "p90", "p99", "max", "known"
    )
    for name, column in measured.items():
        label = _MEASURED_NAMES.get(name, name.removesuffix("_s").upper())
        table.add_row(label, *(duration(v) for v in _five(column)), count(column.num))
    return table


def _notes(found: TraceStatistics, console: Console) -> None:
    lines = [f"left out: {count(number)} rows, {rule}" for rule, number in found.skipped.items()]
    lines += found.notes
    if found.prefixes is not None and not found.prefixes.lru_hit_share_by_blocks:
        lines.append("too many blocks for a quick pass through caches of limited size")
    if not lines:
        return
    console.print()
    console.print(Text("Mind", style="bold yellow"))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=2, justify="right")
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", Text(line))
    console.print(grid)


def _table(title: str, plain: bool, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.ASCII2 if plain else box.ROUNDED,
    )
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 else "right", overflow="fold")
    return table


def _facts(title: str, plain: bool) -> Table:
    table = _table(title, plain, "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    return table


def _tokens(column: Spread) -> tuple[str, ...]:
    values = (column.p50, column.p90, column.p99, column.max)
    return count(column.mean, 1), count(column.std, 1), *(count(v) for v in values)


def _five(column: Spread) -> tuple[float, ...]:
    return column.mean, column.p50, column.p90, column.p99, column.max


def _long(seconds: float) -> str:
    """Seconds, with larger units where they read better."""
    for scale, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2.0 * scale:
            return f"{seconds / scale:,.3g} {unit}"
    return duration(seconds, 3)


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.10g}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"
