"""A paged-weight experiment as text: the question, the answer, all policies on one workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twin.report import count, duration, new_table, percent, print_warnings, rate

GIGA = 1e9
WIDE_COLUMNS = 140


def print_paged_weight(summary: Mapping[str, Any], console: Console) -> None:
    """Print every section."""
    plain = not console.is_terminal
    console.print()
    console.print(deployment_table(summary, plain))
    console.print()
    console.print(Text("Answer", style="bold"))
    for line in answer_lines(summary):
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    console.print()
    wide = console.width >= WIDE_COLUMNS
    for table in policy_tables(summary, plain, wide=wide):
        console.print(table)
        console.print()
    print_warnings(summary["warnings"], console)


def gigabytes(num_bytes: float | None, digits: int = 1) -> str:
    """Bytes as 10^9 bytes."""
    return "-" if num_bytes is None else f"{num_bytes / GIGA:,.{digits}f} GB"


def deployment_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """Model, device, arena, workload, and what step times rest on."""
    d, workload = summary["deployment"], summary["workload"]
    table = new_table("What was asked", plain, "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    table.add_row("workload", Text(f"{workload['name']} ({workload['source']})"))
    for name, column in (
        ("prompt tokens", workload["prompt_tokens"]),
        ("output tokens", workload["output_tokens"]),
    ):
        table.add_row(
            name,
            f"mean {count(column['mean'], 1)}, p50 {count(column['p50'])}, "
            f"p99 {count(column['p99'])}, max {count(column['max'])}",
        )
    table.add_row(
        "model",
        f"{d['model']}: {d['layers']} layers, {d['experts']} experts, {d['experts_per_token']} a "
        f"token; {d['num_blocks']:,} weight blocks, {gigabytes(d['expert_bytes_16_bits'])} at 16 "
        f"bits; all else {gigabytes(d['other_bytes'])}",
    )
    table.add_row(
        "device",
        f"{d['device']}, {gigabytes(d['memory_bytes'])} used; {d['memory_bytes_per_s'] / 1e12:.3g} "
        f"TB/s, link {d['link_bytes_per_s'] / GIGA:.3g} GB/s",
    )
    table.add_row(
        "arena",
        f"{gigabytes(d['arena_bytes'])} for expert weights and KV cache: {d['arena_pages']:,} "
        f"pages of {d['page_bytes'] // 1024} KiB",
    )
    shares = ", ".join(f"{bits}: {share:.2f}" for bits, share in d["share_by_bits"].items())
    table.add_row("step times", f"{d['step_times']}; share of bandwidth by bits {shares}")
    table.add_row(
        "damage",
        f"{summary['damage_source']}; 1 = all blocks at {summary['damage_unit_bits']} bits",
    )
    return table


def answer_lines(summary: Mapping[str, Any]) -> list[str]:
    """How far the weights shrank, what the cache got, and what that was worth."""
    asked = summary["policies"][0]
    if not asked["fits"]:
        return [f"{asked['label']}: {asked['reason']}."]
    d = summary["deployment"]
    kv = asked["kv_pages_peak"] * d["page_bytes"]
    lines = [
        f"{asked['label']}: expert weights ran at {asked['mean_bits']:.2f} bits on average and "
        f"{asked['least_bits']:.2f} at the narrowest; the KV cache grew to "
        f"{asked['kv_tokens_peak']:,} tokens, {gigabytes(kv)} or "
        f"{percent(kv / d['arena_bytes'], 0)} of the arena.",
        _capacity_line(summary),
    ]
    lines += _trade_lines(asked, summary["policies"][1:])
    return lines


def _capacity_line(summary: Mapping[str, Any]) -> str:
    rows = {row["bits"]: row for row in summary["capacity"]}
    shown = [bits for bits in (min(rows), 4, 8, 16) if bits in rows]
    parts = [f"{bits} bits: {_room(rows[bits])}" for bits in dict.fromkeys(shown)]
    return f"KV tokens beside weights of one fixed width: {'; '.join(parts)}."


def _room(row: Mapping[str, Any]) -> str:
    if not row["fits"]:
        return "do not fit"
    return "no limit" if row["kv_tokens"] is None else count(row["kv_tokens"])


def _trade_lines(asked: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Against the fixed widths just below and above in damage."""
    fixed = [
        row
        for row in others
        if row["fits"] and isinstance(row["policy"], int) and row["latency"]["ttft_s"]
    ]
    if not fixed or not asked["latency"]["ttft_s"] or asked["damage"] is None:
        return []
    lines = []
    worse = [row for row in fixed if row["damage"] > asked["damage"]]
    better = [row for row in fixed if row["damage"] <= asked["damage"]]
    ttft = asked["latency"]["ttft_s"]["p99"]
    if worse:
        row = min(worse, key=lambda one: float(one["damage"]))
        times = row["damage"] / asked["damage"] if asked["damage"] else float("inf")
        lines.append(
            f"Against {row['label']} for all: {times:.3g} times less damage, TTFT p99 "
            f"{duration(ttft, 3)} against {duration(row['latency']['ttft_s']['p99'], 3)}, "
            f"{rate(asked['requests_per_s'])} requests/s against {rate(row['requests_per_s'])}."
        )
    if better:
        row = max(better, key=lambda one: float(one["damage"]))
        lines.append(
            f"The next fixed width with less damage is {row['label']}: TTFT p99 "
            f"{duration(row['latency']['ttft_s']['p99'], 3)}, {rate(row['requests_per_s'])} "
            f"requests/s, {row['preemptions']:,} preemptions"
            + (f", {row['refused']:,} requests refused" if row["refused"] else "")
            + f" (here {asked['preemptions']:,})."
        )
    else:
        lines.append("No fixed width that fits has less damage.")
    return lines


def policy_tables(summary: Mapping[str, Any], plain: bool, *, wide: bool) -> list[Table]:
    """All policies: one wide table, or two narrow ones."""
    rows = summary["policies"]
    has_target = any(row["fits"] and row["good_share"] is not None for row in rows)
    service = ["req/s", "TTFT p50", "p99", "TPOT p50", "p99", "preempts"]
    service += ["good"] if has_target else []
    memory = ["KV tokens", "bits", "least", "damage", "per token", "copied"]
    title = "The same requests under every policy"
    if wide:
        table = new_table(title, plain, "policy", *service, *memory)
        for row in rows:
            cells = [*_service(row, has_target), *_memory(row)] if row["fits"] else _unfit(row)
            table.add_row(row["label"], *cells)
        return [table]
    first = new_table(f"{title}: service", plain, "policy", *service)
    second = new_table("... and memory", plain, "policy", *memory)
    for row in rows:
        unfit = None if row["fits"] else _unfit(row)
        first.add_row(row["label"], *(unfit or _service(row, has_target)))
        second.add_row(row["label"], *(unfit or _memory(row)))
    return [first, second]


def _unfit(row: Mapping[str, Any]) -> list[str]:
    return ["too big"]


def _service(row: Mapping[str, Any], has_target: bool) -> list[str]:
    ttft, tpot = row["latency"]["ttft_s"] or {}, row["latency"]["tpot_s"] or {}
    interval = row["requests_per_s_interval"]
    cells = [
        rate(row["requests_per_s"]) + (f" ± {interval['half_width']:.2g}" if interval else ""),
        duration(ttft.get("p50"), 3),
        duration(ttft.get("p99"), 3),
        duration(tpot.get("p50"), 3),
        duration(tpot.get("p99"), 3),
        count(row["preemptions"]),
    ]
    return [*cells, percent(row["good_share"], 1)] if has_target else cells


def _memory(row: Mapping[str, Any]) -> list[str]:
    return [
        count(row["kv_tokens_peak"]),
        "-" if row["mean_bits"] is None else f"{row['mean_bits']:.2f}",
        f"{row['least_bits']:.2f}",
        "-" if row["damage"] is None else f"{row['damage']:.3g}",
        "-" if row["damage_per_token"] is None else f"{row['damage_per_token']:.3g}",
        gigabytes(row["moved_bytes"]) if row["moved_bytes"] else "-",
    ]
