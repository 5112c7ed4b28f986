"""Pictures of a replay: latencies as distributions, memory and bits over time."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.record import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEBI = 1 << 20
WEIGHTS, KV, FREE, BITS = "#1f4e8c", "#e0a030", "#e9edf0", "#c0392b"
LATENCIES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "end to end"))


def draw_replay(summary: Mapping[str, Any], requests: Columns) -> dict[str, bytes]:
    """File name -> PNG of every picture there are numbers for."""
    pictures = {}
    if any(np.isfinite(requests[name]).any() for name, _ in LATENCIES):
        pictures["latency.png"] = _png(latency_figure(summary, requests))
    if len(summary["series"].get("time_s", ())) > 1:
        pictures["arena.png"] = _png(arena_figure(summary))
    return pictures


def latency_figure(summary: Mapping[str, Any], requests: Columns) -> Figure:
    """Share of requests below a latency, one panel a kind; targets as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(LATENCIES), sharey=True)
    for axes, (name, label) in zip(panels, LATENCIES, strict=True):
        values = np.sort(requests[name][np.isfinite(requests[name])])
        if len(values):
            axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=KV)
            axes.set_xscale("log")
        target = summary["slo"].get(name)
        if target is not None:
            axes.axvline(target, color=BITS, lw=1.0, linestyle="--")
        axes.set_xlabel(f"{label}, seconds (log scale)")
        _bare(axes)
    panels[0].set_ylabel("share of answers")
    panels[0].set_ylim(0, 1.02)
    figure.suptitle(_title(summary), fontsize=11, x=0.01, ha="left")
    return figure


def arena_figure(summary: Mapping[str, Any]) -> Figure:
    """Who holds the arena over time; bits per weight; sequences running and waiting."""
    from matplotlib.figure import Figure

    series, d = summary["series"], summary["deployment"]
    has_bits = max(series["mean_bits"]) > 0
    figure = Figure(figsize=(8.6, 6.8), dpi=120, layout="constrained")
    panels = figure.subplots(
        2 + has_bits, 1, sharex=True, gridspec_kw={"height_ratios": (3, *([1.6] * has_bits), 1.2)}
    )
    arena, queue = panels[0], panels[-1]
    time = series["time_s"]
    arena.stackplot(
        time,
        *(
            [value / MEBI for value in series[name]]
            for name in ("weight_bytes", "kv_bytes", "free_bytes")
        ),
        labels=("expert weights", "KV cache", "free"),
        colors=(WEIGHTS, KV, FREE),
        linewidth=0,
        step="post",
    )
    arena.set_ylim(0, d["arena_bytes"] / MEBI)
    arena.set_ylabel("arena, MiB")
    arena.set_title(_title(summary), loc="left", fontsize=11)
    arena.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    if has_bits:
        panels[1].step(time, series["mean_bits"], where="post", color=BITS, lw=1.3)
        panels[1].set_ylabel("bits per weight")
        panels[1].set_ylim(bottom=0)
    queue.step(time, series["running"], where="post", color=WEIGHTS, lw=1.2, label="running")
    queue.step(time, series["waiting"], where="post", color="#777777", lw=1.2, label="waiting")
    queue.set_ylabel("sequences")
    queue.set_xlabel("seconds")
    queue.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    for axes in panels:
        axes.set_xlim(0, max(time[-1], 1e-9))
        _bare(axes)
    return figure


def _title(summary: Mapping[str, Any]) -> str:
    d, row = summary["deployment"], summary["policies"][0]
    return f"{d['model']}, {summary['workload']['name']}: {row['label']}"


def _bare(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
