"""Pictures of a paged-weight experiment: the arena over time, and damage against speed."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIGA = 1e9
WEIGHTS, KV, FREE, BITS = "#1f4e8c", "#e0a030", "#e9edf0", "#c0392b"
MOVING, FIXED = "#c0392b", "#1f4e8c"


def draw_paged_weight(summary: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> PNG of every picture the summary has numbers for."""
    pictures = {}
    if summary["series"]:
        pictures["arena.png"] = _png(arena_figure(summary))
    if sum(row["fits"] and bool(row["latency"]["ttft_s"]) for row in summary["policies"]) > 1:
        pictures["frontier.png"] = _png(frontier_figure(summary))
    return pictures


def arena_figure(summary: Mapping[str, Any]) -> Figure:
    """Who holds the arena over time; bits per weight; sequences running and waiting."""
    from matplotlib.figure import Figure

    series, d, asked = summary["series"], summary["deployment"], summary["policies"][0]
    figure = Figure(figsize=(8.6, 6.8), dpi=120, layout="constrained")
    arena, bits, queue = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1.6, 1.2)}
    )
    time = series["time_s"]
    arena.stackplot(
        time,
        *(
            [value / GIGA for value in series[name]]
            for name in ("weight_bytes", "kv_bytes", "free_bytes")
        ),
        labels=("expert weights", "KV cache", "free"),
        colors=(WEIGHTS, KV, FREE),
        linewidth=0,
        step="post",
    )
    arena.set_ylim(0, d["arena_bytes"] / GIGA)
    arena.set_ylabel("arena, GB")
    arena.set_title(
        f"{d['model']} on {d['device']}, {d['memory_bytes'] / GIGA:.3g} GB, "
        f"{summary['workload']['name']}: {asked['label']}",
        loc="left",
        fontsize=11,
    )
    arena.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    bits.step(time, series["mean_bits"], where="post", color=BITS, lw=1.3)
    bits.set_ylabel("bits per weight")
    bits.set_ylim(bottom=0)
    queue.step(time, series["running"], where="post", color=WEIGHTS, lw=1.2, label="running")
    queue.step(time, series["waiting"], where="post", color="#777777", lw=1.2, label="waiting")
    queue.set_ylabel("sequences")
    queue.set_xlabel("simulated seconds")
    queue.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    for axes in (arena, bits, queue):
        axes.set_xlim(0, max(time[-1], 1e-9))
        _bare(axes)
    return figure


def frontier_figure(summary: Mapping[str, Any]) -> Figure:
    """Damage of every policy against what it served and how long the first token took."""
    from matplotlib.figure import Figure

    d = summary["deployment"]
    figure = Figure(figsize=(10.4, 4.8), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rows = [row for row in summary["policies"] if row["fits"] and row["latency"]["ttft_s"]]
    rows = [row for row in rows if row["damage"] is not None]
    positive = [row["damage"] for row in rows if row["damage"] > 0.0] or [1.0]
    floor = min(positive) / 4.0
    values: tuple[Callable[[Mapping[str, Any]], float], ...] = (
        lambda row: float(row["requests_per_s"]),
        lambda row: float(row["latency"]["ttft_s"]["p99"]),
    )
    names = ("requests served per second", "TTFT p99, seconds")
    for axes, value, name in zip((left, right), values, names, strict=True):
        fixed = [row for row in rows if isinstance(row["policy"], int)]
        axes.plot(
            [value(row) for row in fixed],
            [row["damage"] or floor for row in fixed],
            color=FIXED,
            lw=0.8,
            alpha=0.5,
        )
        for row in rows:
            is_fixed = isinstance(row["policy"], int)
            _point(axes, value(row), row, floor, is_asked=row is rows[0], is_fixed=is_fixed)
        axes.set_xlabel(name)
        axes.set_yscale("log")
        _bare(axes)
    right.set_xscale("log")
    left.set_xlim(left=0)
    left.set_ylabel(f"damage, 1 = all at {summary['damage_unit_bits']} bits (log scale)")
    figure.suptitle(
        f"{d['model']} on {d['device']}, {d['memory_bytes'] / GIGA:.3g} GB, the same requests: "
        "lower is better; right is better (left picture), left is better (right picture)",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    return figure


def _point(
    axes: Axes, x: float, row: Mapping[str, Any], floor: float, *, is_asked: bool, is_fixed: bool
) -> None:
    y = row["damage"] or floor
    axes.plot(
        [x],
        [y],
        marker="o" if is_fixed else "D",
        ms=8 if is_asked else 6,
        color=FIXED if is_fixed else MOVING,
        mfc="white" if not is_asked and not is_fixed else None,
        linestyle="none",
        zorder=5 if is_asked else 4,
    )
    text = row["label"] if row["damage"] else f"{row['label']} (no damage)"
    shift = {"hull": (8, -12), "greedy": (8, 6), "uniform": (8, 2)}.get(str(row["policy"]), (7, 3))
    axes.annotate(text, (x, y), xytext=shift, textcoords="offset points", fontsize=8)


def _bare(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
