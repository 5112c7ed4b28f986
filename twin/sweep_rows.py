"""The table of a sweep: one flat row a finished point, what was predicted beside the twin's values.

Columns ``predicted_*`` come from the closed forms of the deciding level (random routing, no
faults); the others are simulated, with the scenario's routing and, if it has any, its faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = (
    "r",
    "best_r",
    "batch_per_worker",
    "regret",
    "predicted_tokens_per_s_per_instance",
    "predicted_tpot_s",
    "predicted_barrier_overhead",
    "predicted_attention_idle",
    "predicted_ffn_idle",
    "tokens_per_s_per_instance",
    "tokens_per_s_half_width",
    "tpot_s",
    "barrier_share",
    "attention_idle",
    "ffn_idle",
    "healthy_tokens_per_s_per_instance",
    "healthy_tokens_per_s_half_width",
    "fault_change",
    "fault_change_half_width",
    "completed",
    "unfinished",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "e2e_p99_s",
    "goodput_share",
    "goodput_per_s",
    "infeasible",
    "error",
)


def flat_row(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Every column of ``COLUMNS`` from a point's summary; None for what does not apply."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    for reason in ("infeasible", "error"):
        if reason in summary:
            return {**row, reason: summary[reason]}
    best, layers = summary["recommendation"], summary["bundle"]["num_layers"]
    for name in ("r", "best_r", "batch_per_worker", "regret"):
        row[name] = best[name]
    row["predicted_tokens_per_s_per_instance"] = best["throughput_per_instance"] / layers
    for name in ("tpot_s", "barrier_overhead", "attention_idle", "ffn_idle"):
        row[f"predicted_{name}"] = best[name]
    if "simulation" in summary:
        row.update(_saturated(summary, layers))
    if "open_loop" in summary:
        row.update(_open_loop(summary["open_loop"]))
    return row


def _saturated(summary: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The twin's values at the ratio in use: with the faults, where the scenario has any."""
    r = summary["recommendation"]["r"]
    point = next(p for p in summary["simulation"]["points"] if p["r"] == r)
    faults = summary.get("faults")
    side = faults["faulty"] if faults else point
    columns = _throughput("", side, layers)
    for name in ("tpot_s", "barrier_share", "attention_idle", "ffn_idle"):
        columns[name] = side[name]["mean"]
    if faults:
        columns.update(_throughput("healthy_", faults["healthy"], layers))
        columns["fault_change"] = faults["throughput_change"]["mean"]
        columns["fault_change_half_width"] = faults["throughput_change"]["half_width"]
    return columns


def _throughput(prefix: str, side: Mapping[str, Any], layers: int) -> dict[str, Any]:
    mean, half = (side["throughput_per_instance"][name] for name in ("mean", "half_width"))
    return {
        f"{prefix}tokens_per_s_per_instance": mean / layers,
        f"{prefix}tokens_per_s_half_width": None if half is None else half / layers,
    }


def _open_loop(run: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "completed": run["completed"],
        "unfinished": run["running"] + run["queued"] + run["preparing"],
        "barrier_share": run["barrier_share"],
        "attention_idle": run["attention_idle"],
        "ffn_idle": run["ffn_idle"],
    }
    for name, latency, statistic in (
        ("ttft_p50_s", "ttft_s", "p50"),
        ("ttft_p99_s", "ttft_s", "p99"),
        ("tpot_mean_s", "tpot_s", "mean"),
        ("e2e_p99_s", "e2e_s", "p99"),
    ):
        if run["latency"][latency]:
            columns[name] = run["latency"][latency][statistic]
    if run["goodput"]:
        columns["goodput_share"] = run["goodput"]["share"]
        columns["goodput_per_s"] = run["goodput"]["requests_per_s"]
    return columns
