"""A prefix store experiment as text: the question, the answer, every system on one workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twin.report import count, duration, new_table, percent, print_warnings

GIGA = 1e9
MILLI = 1e3
TIER_TITLES = {
    "gpu": "GPU",
    "memory": "own memory",
    "replica": "replica",
    "remote": "remote",
    "ssd": "SSD",
    "computed": "computed",
}


def print_prefix(summary: Mapping[str, Any], console: Console) -> None:
    """Print every section."""
    plain = not console.is_terminal
    console.print()
    console.print(deployment_table(summary, plain))
    console.print()
    console.print(Text("Answer", style="bold"))
    for line in answer_lines(summary):
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    console.print()
    tables = [latency_table, tier_table]
    if any(row["blocks"] for row in summary["rows"]):
        tables.append(link_table)
    for table in tables:
        console.print(table(summary, plain))
        console.print()
    print_warnings(summary["warnings"], console)


def deployment_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """Workload, model, cluster, links, systems."""
    d, workload = summary["deployment"], summary["workload"]
    links = d["links"]
    table = new_table("What was asked", plain, "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    table.add_row("workload", Text(_workload_text(workload)))
    table.add_row(
        "model",
        f"{d['model']}, {d['token_bytes']:,} bytes of keys and values a token; prefill at "
        f"{percent(d['mfu'], 0)} of the GPU's peak",
    )
    memory = f"{d['memory_bytes_per_node'] / GIGA:,.3g} GB of memory"
    ssd = f", {d['ssd_bytes_per_node'] / GIGA:,.3g} GB of SSD" if d["ssd_bytes_per_node"] else ""
    table.add_row(
        "cluster",
        f"{d['nodes']} nodes, {d['gpus']} GPUs with {d['cache_tokens_per_gpu']:,} tokens of cache "
        f"each; {memory}{ssd} a node",
    )
    table.add_row(
        "links",
        f"to device {_speed(links['host_to_device_bytes_per_s'])}, network "
        f"{_speed(links['client_bytes_per_s'])} a GPU and {_speed(links['nic_bytes_per_s'])} a "
        f"node, SSD {_speed(links['ssd_bytes_per_s'])}, request {duration(links['rpc_s'], 3)}",
    )
    table.add_row("routing", f"{d['routing']}; owner of a region by {d['owners']}")
    for mode in summary["modes"]:
        table.add_row(mode["label"], Text(_mode_text(mode)))
    return table


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIGA:.3g} GB/s"


def _workload_text(workload: Mapping[str, Any]) -> str:
    if workload["kind"] != "documents":
        return (
            f"{workload['name']}: {workload['num_requests']:,} requests in "
            f"{duration(workload['duration_s'], 3)}, {count(workload['mean_prompt_tokens'])} "
            "prompt tokens in the mean"
        )
    arrivals = workload["arrivals"]
    when = (
        f"one every {arrivals['gap_s']:g} s"
        if arrivals["kind"] == "spread"
        else f"Poisson, {arrivals['rate_per_s']:g} a second"
    )
    lengths = ", ".join(f"{tokens:,}" for tokens in workload["prompt_tokens"])
    return (
        f"{workload['documents']} documents, {workload['questions']} questions each, prompts of "
        f"{lengths} tokens of which {workload['question_tokens']} are the question's own; {when}"
    )


def _mode_text(mode: Mapping[str, Any]) -> str:
    store = mode["store"]
    if store is None:
        return "caches of single GPUs, LRU" if mode["has_gpu_tier"] else "computes every prompt"
    replicas = {
        "none": "no replicas",
        "soft": f"replicas up to {percent(store['replica_share'], 0)} of memory",
        "static": f"replicas in {percent(store['replica_share'], 0)} of memory",
        "unified": "every copy priced",
    }[store["replicas"]]
    parts = [
        "GPU cache before memory" if mode["has_gpu_tier"] else "memory pooled",
        store["eviction"],
        replicas,
        "fetches or computes, whatever is cheaper" if mode["may_recompute"] else "always loads",
        f"lookup {duration(mode['lookup_s'], 3)}",
    ]
    if mode["overlap"]:
        parts.append(f"{percent(mode['overlap'], 0)} of the network behind the copy")
    return ", ".join(parts)


def answer_lines(summary: Mapping[str, Any]) -> list[str]:
    """Who is first, and how much longer the others take, by stream."""
    lines = []
    for stream in dict.fromkeys(row["stream"] for row in summary["rows"]):
        rows = sorted((row for row in summary["rows"] if row["stream"] == stream), key=_mean)
        best, others = rows[0], rows[1:]
        text = f"{stream}: {best['label']} {duration(_mean(best), 3)} to the first token"
        times = [f"{row['label']} {_mean(row) / _mean(best):.2f} times" for row in others]
        lines.append(f"{text}; {', '.join(times)} as long." if times else f"{text}.")
    return lines


class _Rows:
    """The rows of a table over systems: a column of streams only where there are several."""

    def __init__(self, summary: Mapping[str, Any], title: str, plain: bool, *columns: str) -> None:
        streams = list(dict.fromkeys(row["stream"] for row in summary["rows"]))
        self._has_streams = len(streams) > 1
        first = ("requests", "system") if self._has_streams else ("system",)
        self.table = new_table(title, plain, *first, *columns)
        if self._has_streams:
            self.table.columns[1].justify = "left"
        self._before: str | None = None

    def add(self, row: Mapping[str, Any], *cells: str) -> None:
        first = [row["label"]]
        if self._has_streams:
            first.insert(0, "" if row["stream"] == self._before else row["stream"])
        self.table.add_row(*(Text(name) for name in first), *cells)
        self._before = row["stream"]


def _mean(row: Mapping[str, Any]) -> float:
    return float(row["ttft_s"]["mean"]["mean"])


def _interval(estimate: Mapping[str, Any]) -> str:
    """Milliseconds."""
    mean, half = MILLI * estimate["mean"], estimate["half_width"]
    text = f"{mean:,.1f}" if mean < 1000 else f"{mean:,.0f}"
    if half is None:
        return text
    half *= MILLI
    if half < 0.05:
        return text
    return f"{text}±{half:.1f}" if half < 100 else f"{text}±{half:,.0f}"


def latency_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """Time to first token by system and stream."""
    columns = ("mean", "p50", "p90", "p99", "load", "queue", "vs GPU")
    rows = _Rows(summary, "Time to first token, milliseconds", plain, *columns)
    for row in summary["rows"]:
        gap = row.get("local_prefix_less_this")
        verdict = (
            "" if gap is None else gap["verdict"] or ("faster" if gap["mean_s"] > 0 else "slower")
        )
        rows.add(
            row,
            *(_interval(row["ttft_s"][name]) for name in ("mean", "p50", "p90", "p99")),
            *(f"{MILLI * row[name]:,.1f}" for name in ("load_s", "queue_s")),
            verdict,
        )
    return rows.table


def tier_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """Where the tokens of prompts came from."""
    title = "Tokens of prompts by where they came from"
    rows = _Rows(summary, title, plain, "hit rate", *TIER_TITLES.values())
    for row in summary["rows"]:
        shares = (_share(row["token_shares"][tier]) for tier in TIER_TITLES)
        rows.add(row, percent(row["hit_rate"], 1), *shares)
    return rows.table


def _share(share: float) -> str:
    return percent(share, 1) if share > 0 else "-"


def link_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """Bytes over each kind of link and how full its fullest link was."""
    kinds = {"network in": "network", "to device": "to device", "from device": "from device"}
    kinds |= {"SSD": "SSD"}
    rows = _Rows(
        summary, "GB over links (utilization of the fullest of them)", plain, *kinds.values()
    )
    for row in summary["rows"]:
        if row["blocks"]:
            rows.add(row, *(_link(row["links"][kind]) for kind in kinds))
    return rows.table


def _link(link: Mapping[str, float]) -> str:
    if link["bytes"] <= 0:
        return "-"
    return f"{link['bytes'] / GIGA:,.1f} ({percent(link['highest_utilization'], 1)})"
