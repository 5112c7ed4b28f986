"""Pictures of a run's summary, as PNG bytes. Everything drawn is a number of the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from twin.figures import png

LEVEL_STYLE = {
    "mean_field": ("mean field", "#9aa5b1", (0, (4, 2))),
    "gaussian": ("Gaussian", "#e0a030", (0, (1, 1))),
    "pearson3": ("Pearson III", "#3f8f5f", (0, (5, 1, 1, 1))),
    "exact": ("exact", "#1f4e8c", "solid"),
}
TWIN = "#c0392b"
ATTENTION, FFN = "#1f4e8c", "#b5651d"


def draw_all(summary: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> PNG of every picture the summary has numbers for."""
    pictures = {
        "throughput.png": png(throughput_figure(summary)),
        "idle.png": png(idle_figure(summary)),
        "barrier.png": png(barrier_figure(summary)),
    }
    if summary.get("load_distribution"):
        pictures["load.png"] = png(load_figure(summary))
    if summary.get("open_loop") and summary["open_loop"]["latency"]["ttft_s"]:
        pictures["latency.png"] = png(latency_figure(summary))
    return pictures


def _new(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _points(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    simulation = summary.get("simulation")
    return list(simulation["points"]) if simulation else []


def _mark_ratio(axes: Axes, summary: Mapping[str, Any]) -> None:
    r = summary["recommendation"]["r"]
    axes.axvline(r, color="#555555", linewidth=0.8, alpha=0.6)
    axes.annotate(
        f" r = {r}",
        (r, 1.0),
        xycoords=("data", "axes fraction"),
        va="top",
        fontsize=9,
        color="#333333",
    )


def throughput_figure(summary: Mapping[str, Any]) -> Figure:
    """Tokens per second and instance against r: four levels, simulated points, the answer."""
    layers = summary["bundle"]["num_layers"]
    figure, axes = _new(
        f"Throughput per instance, {summary['workload']['name']} "
        f"(B = {summary['bundle']['batch_per_worker']}, {summary['bundle']['semantics']})",
        "attention workers per FFN server, r",
        "output tokens/s per instance",
    )
    for name, level in summary["levels"].items():
        label, colour, dashes = LEVEL_STYLE[name]
        curve = np.asarray(level["curve"]["throughput_per_instance"]) / layers
        axes.plot(summary["ratios"], curve, color=colour, linestyle=dashes, label=label, lw=1.6)
    points = _points(summary)
    if points:
        axes.errorbar(
            [p["r"] for p in points],
            [p["throughput_per_instance"]["mean"] / layers for p in points],
            yerr=[p["throughput_per_instance"]["half_width"] / layers for p in points],
            fmt="o",
            ms=4,
            capsize=3,
            color=TWIN,
            label="simulated twin",
            zorder=5,
        )
    axes.set_ylim(bottom=0)
    _mark_ratio(axes, summary)
    axes.legend(frameon=False, fontsize=9)
    return figure


def idle_figure(summary: Mapping[str, Any]) -> Figure:
    """Idle shares of attention and FFN against r."""
    figure, axes = _new(
        "Idle time", "attention workers per FFN server, r", "share of a cycle spent idle"
    )
    curve = summary["levels"]["exact"]["curve"]
    for name, label, colour in (
        ("attention_idle", "attention", ATTENTION),
        ("ffn_idle", "FFN", FFN),
    ):
        axes.plot(summary["ratios"], curve[name], color=colour, label=f"{label}, exact level")
        points = _points(summary)
        if points:
            axes.errorbar(
                [p["r"] for p in points],
                [p[name]["mean"] for p in points],
                yerr=[p[name]["half_width"] for p in points],
                fmt="o",
                ms=4,
                capsize=3,
                color=colour,
                mfc="white",
                label=f"{label}, twin",
            )
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_ylim(0, 1)
    _mark_ratio(axes, summary)
    axes.legend(frameon=False, fontsize=9)
    return figure


def barrier_points(
    summary: Mapping[str, Any],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Simulated cycle over the mean-field cycle, minus 1: means and half widths by point."""
    points = _points(summary)
    mean_field = summary["levels"]["mean_field"]["curve"]["cycle_s"]
    base = np.asarray([mean_field[p["r"] - 1] for p in points])
    mean = np.asarray([p["cycle_s"]["mean"] for p in points])
    half_width = np.asarray([p["cycle_s"]["half_width"] for p in points], dtype=np.float64)
    return mean / base - 1.0, half_width / base


def barrier_figure(summary: Mapping[str, Any]) -> Figure:
    """What waiting for the slowest worker adds to the cycle, against r."""
    figure, axes = _new(
        "Straggler (barrier) overhead",
        "attention workers per FFN server, r",
        "cycle longer than with equal loads",
    )
    for name, level in summary["levels"].items():
        if name == "mean_field":
            continue
        label, colour, dashes = LEVEL_STYLE[name]
        axes.plot(
            summary["ratios"],
            level["curve"]["barrier_overhead"],
            color=colour,
            linestyle=dashes,
            label=label,
        )
    points = _points(summary)
    if points:
        overhead, half_width = barrier_points(summary)
        axes.errorbar(
            [p["r"] for p in points],
            overhead,
            yerr=half_width,
            fmt="o",
            ms=4,
            capsize=3,
            color=TWIN,
            label="simulated twin",
        )
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.1f} %")
    _mark_ratio(axes, summary)
    axes.legend(frameon=False, fontsize=9)
    return figure


def load_figure(summary: Mapping[str, Any]) -> Figure:
    """Law of the token load of one attention worker: theory and what the twin met."""
    load = summary["load_distribution"]
    figure, axes = _new(
        f"Token load of one attention worker at r = {load['r']}",
        "KV tokens read in one step",
        "share of steps per bin",
    )
    edges = np.asarray(load["edges_tokens"])
    axes.stairs(load["twin_share"], edges, fill=True, color=TWIN, alpha=0.35, label="twin")
    centres = 0.5 * (edges[1:] + edges[:-1])
    axes.plot(
        centres, load["theory_share"], color=LEVEL_STYLE["exact"][1], lw=1.8, label="exact law"
    )
    axes.axvline(load["mean_tokens"], color="#555555", lw=0.8, ls=(0, (4, 2)))
    axes.annotate(" mean", (load["mean_tokens"], 0.02), xycoords=("data", "axes fraction"), size=9)
    axes.axvline(load["mean_max_tokens"], color="#555555", lw=0.8)
    axes.annotate(
        " mean of the slowest",
        (load["mean_max_tokens"], 0.93),
        xycoords=("data", "axes fraction"),
        size=9,
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, fontsize=9)
    return figure


def latency_figure(summary: Mapping[str, Any]) -> Figure:
    """Distribution of TTFT, TPOT and end-to-end time of an open-loop run."""
    run = summary["open_loop"]
    figure, axes = _new(
        f"Latency at r = {run['r']}", "seconds", "share of requests at most this slow"
    )
    for name, label, colour in (
        ("ttft_s", "TTFT", ATTENTION),
        ("tpot_s", "TPOT", FFN),
        ("e2e_s", "end to end", TWIN),
    ):
        curve = run["latency"].get(name)
        if curve and curve["quantiles_s"]:
            axes.plot(curve["quantiles_s"], curve["quantile_levels"], color=colour, label=label)
    for name, label, colour in (
        ("ttft_s", "TTFT", ATTENTION),
        ("tpot_s", "TPOT", FFN),
        ("e2e_s", "end to end", TWIN),
    ):
        target = run["slo"].get(name)
        if target:
            label = f"target: {label} <= {target:g} s"
            axes.axvline(target, color=colour, lw=0.9, ls=(0, (2, 2)), label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.01)
    axes.legend(frameon=False, fontsize=9)
    return figure


def sweep_picture(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> bytes | None:
    """Throughput (or, open loop, the 99th percentile of TTFT) over one or two swept numbers.

    Args:
        rows: One a finished point, as in ``sweep.csv``.
        keys: Swept keys; one, or two of which the second becomes one line each.

    Returns:
        PNG, or None where the first key has no numbers or there are more than two keys.
    """
    usable = [row for row in rows if not row["infeasible"]]
    numbers = [_number(row[keys[0]]) for row in usable]
    x = [value for value in numbers if value is not None]
    if len(keys) > 2 or len(x) < 2 or len(x) < len(numbers):
        return None
    is_open_loop = usable[0]["completed"] != ""
    figure, axes = _new(
        "Sweep",
        keys[0],
        "TTFT p99, s" if is_open_loop else "output tokens/s per instance",
    )
    groups: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for at, row in zip(x, usable, strict=True):
        groups.setdefault(str(row[keys[1]]) if len(keys) == 2 else "", []).append((at, row))
    for number, (name, points) in enumerate(groups.items()):
        points.sort(key=lambda point: point[0])
        colour = f"C{number % 10}"
        places = [at for at, _ in points]
        label = f"{keys[1]} = {name}" if name else None
        if is_open_loop:
            values = [row["ttft_p99_s"] or np.nan for _, row in points]
            axes.plot(places, values, marker="o", ms=4, color=colour, label=label)
            continue
        axes.plot(
            places,
            [row["predicted_tokens_per_s_per_instance"] for _, row in points],
            color=colour,
            label=f"{label or 'theory'}",
        )
        axes.errorbar(
            places,
            [row["tokens_per_s_per_instance"] for _, row in points],
            yerr=[row["tokens_per_s_half_width"] for _, row in points],
            fmt="o",
            ms=4,
            capsize=3,
            color=colour,
            label=None if label else "twin",
        )
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    return png(figure)


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
