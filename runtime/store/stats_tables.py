"""The store's answers as tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.store.ssd_verify import VerifyReport

_BYTES = ("_bytes",)


def render_stats(stats: Mapping[str, Any]) -> str:
    """Gauges and counters of a node."""
    if "node" not in stats:
        return "the server did not answer\n"
    gauges = Table(title=f"node {stats['node']}", title_justify="left")
    gauges.add_column("now")
    gauges.add_column("", justify="right")
    for name, value in stats["gauges"].items():
        gauges.add_row(name.replace("_", " "), _shown(name, value))
    counters = Table(title="since the start", title_justify="left")
    counters.add_column("count")
    counters.add_column("", justify="right")
    for name, value in stats["counters"].items():
        counters.add_row(name.replace("_", " "), _shown(name, value))
    for name, value in stats["ssd_counters"].items():
        if not value:
            continue  # most are of faults; --json has them all
        counters.add_row(f"SSD {name.replace('_', ' ')}", _shown(name, value))
    for name, value in stats["pool_counters"].items():
        if not value:
            continue
        counters.add_row(name.replace("_", " "), _shown(name, value))
    asked = stats["counters"].get("blocks_asked", 0)
    hit = stats["counters"].get("blocks_hit", 0)
    share = f"\nblocks hit: {hit:,} of {asked:,} asked ({hit / asked:.1%})\n" if asked else ""
    return _text(gauges) + _text(counters) + share


def render_verify(report: VerifyReport) -> str:
    """What a check of the SSD found."""
    table = Table()
    table.add_column("checked")
    table.add_column("", justify="right")
    table.add_row("blocks that are right", f"{report.blocks:,}")
    for what, count in report.bad.items():
        table.add_row(f"records that are not: {what}", f"{count:,}")
    table.add_row("damaged file headers", f"{report.damaged_segment_headers:,}")
    table.add_row("wrong index entries", f"{report.wrong_index_entries:,}")
    table.add_row("bytes used, recounted", _shown("used_bytes", report.used_bytes))
    table.add_row("bytes live, recounted", _shown("live_bytes", report.live_bytes))
    table.add_row("accounts exact", "yes" if report.is_exact else "NO")
    return _text(table)


def render_bench(found: Mapping[str, Any]) -> str:
    """What a measurement found: medians and spread."""
    table = Table(
        title=f"{found['num_blocks']} blocks of {found['block_bytes'] / 2**20:g} MiB, "
        f"{found['rounds']} rounds: median (least to most)",
        title_justify="left",
    )
    for column in ("what", "measured", "of memcpy"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in found["rows"]:
        low, middle, high = row["low"], row["median"], row["high"]
        share = "" if row["share"] is None else f"{row['share']:.0%}"
        table.add_row(
            row["what"], f"{middle:,.3g} ({low:,.3g} to {high:,.3g}) {row['unit']}", share
        )
    return _text(table) + (
        "of memcpy: a put beside memcpy into shared memory, loads and copies beside memcpy out of\n"
        "it, all others beside the plain one; in turns, block by block, median of the rounds\n"
    )


def _shown(name: str, value: float) -> str:
    if name.endswith(_BYTES) or name.startswith("bytes_"):
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:,.0f}"


def _text(table: Table) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=100).print(table)
    return buffer.getvalue()
