"""Pictures of a paged-weight experiment: the arena over time, and damage against speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from twin.figures import bare, png

GIGA = 1e9
WEIGHTS, KV, FREE, BITS = "#1f4e8c", "#e0a030", "#e9edf0", "#c0392b"
MOVING, FIXED = "#c0392b", "#1f4e8c"


def draw_paged_weight(summary: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> PNG of every picture the summary has numbers for."""
    pictures = {}
    if summary["series"]:
        pictures["arena.png"] = png(arena_figure(summary))
    if sum(row["fits"] and bool(row["latency"]["ttft_s"]) for row in summary["policies"]) > 1:
        pictures["frontier.png"] = png(frontier_figure(summary))
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
        bare(axes)
    return figure


def frontier_figure(summary: Mapping[str, Any]) -> Figure:
    """Damage of every policy against what it served and how long the first token took."""
    from matplotlib.figure import Figure

    d = summary["deployment"]
    figure = Figure(figsize=(10.4, 5.0), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rows = [
        row
        for row in summary["policies"]
        if row["fits"] and row["latency"]["ttft_s"] and row["damage"] is not None
    ]
    floor = min([row["damage"] for row in rows if row["damage"] > 0.0] or [1.0]) / 4.0
    _panel(left, rows, lambda row: float(row["requests_per_s"]), floor)
    _panel(right, rows, lambda row: float(row["latency"]["ttft_s"]["p99"]), floor)
    left.set_xlim(left=0)
    left.set_xlabel("requests served per second")
    left.set_ylabel(f"damage, 1 = all at {summary['damage_unit_bits']} bits (log scale)")
    left.set_title("better: down and to the right", loc="left", fontsize=10)
    right.set_xscale("log")
    right.set_xlabel("TTFT p99, seconds (log scale)")
    right.set_title("better: down and to the left", loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=9)
    figure.suptitle(
        f"{d['model']} on {d['device']}, {d['memory_bytes'] / GIGA:.3g} GB: the same requests "
        "under every policy",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    return figure


def _panel(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], float],
    floor: float,
) -> None:
    fixed = [row for row in rows if isinstance(row["policy"], int)]
    axes.plot(
        [value(row) for row in fixed],
        [row["damage"] or floor for row in fixed],
        marker="o",
        color=FIXED,
        lw=0.8,
        label="one width for ever",
    )
    for row in fixed:
        text = row["label"] if row["damage"] else f"{row['label']} (no damage)"
        place = value(row), row["damage"] or floor
        axes.annotate(text, place, xytext=(7, 3), textcoords="offset points", fontsize=8)
    markers = iter(("D", "s", "^", "v"))
    for row in [row for row in rows if not isinstance(row["policy"], int)]:
        axes.plot(
            [value(row)],
            [row["damage"]],
            marker=next(markers),
            ms=8 if row is rows[0] else 7,
            color=MOVING,
            mfc=MOVING if row is rows[0] else "none",
            linestyle="none",
            zorder=5,
            label=f"widths move, {row['label']}",
        )
    axes.set_yscale("log")
    axes.margins(x=0.12)
    bare(axes)
