"""Pictures of a trace, as PNG bytes: lengths, how they go together, arrivals, latencies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from traces.request import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from twin.figures import png

PROMPT, OUTPUT, NEUTRAL = "#1f4e8c", "#b5651d", "#4a5560"
SHORTEST_SHOWN_S = 1e-4
PICTURES = ("lengths.png", "joint.png", "arrivals.png", "latencies.png")
NUM_WINDOWS = 120  # a picture shows the arrivals of about this many windows
_ROUND_WINDOWS_S = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 21600, 86400)


def draw_trace(trace: Trace) -> dict[str, bytes]:
    """File name -> PNG of every picture the trace has data for."""
    pictures = {
        "lengths.png": png(lengths_figure(trace)),
        "joint.png": png(joint_figure(trace)),
    }
    if trace.arrival_s is not None and trace.duration_s > 0.0:
        pictures["arrivals.png"] = png(arrivals_figure(trace))
    if _latencies(trace):
        pictures["latencies.png"] = png(latencies_figure(trace))
    return pictures


def lengths_figure(trace: Trace) -> Figure:
    """Histogram of prompt and output tokens, and the share of requests that are longer."""
    figure, (histogram, tail) = _new(f"Lengths, {_title(trace)}", 2)
    columns = (
        ("prompt tokens", trace.prompt_tokens, PROMPT),
        ("output tokens", trace.output_tokens, OUTPUT),
    )
    both = np.concatenate([trace.prompt_tokens, trace.output_tokens])
    edges = _log_edges(both, int(np.clip(2.0 * len(trace) ** 0.5, 12, 60)))
    for label, tokens, colour in columns:
        share, _ = np.histogram(tokens, edges)
        histogram.stairs(share / len(tokens), edges, fill=True, alpha=0.45, color=colour)
        mean = float(tokens.mean())
        histogram.axvline(mean, color=colour, lw=1.0, ls=(0, (4, 2)))
        ordered, above = _longer_share(tokens)
        tail.step(ordered, above, where="pre", color=colour, lw=1.6)
        tail.plot([], [], color=colour, lw=4, label=f"{label}, mean {mean:,.0f}")
    histogram.set_ylabel("share of requests per bin")
    tail.set_ylabel("share of requests at least this long")
    tail.set_yscale("log")
    for axes in (histogram, tail):
        axes.set_xscale("log")
        axes.set_xlabel("tokens")
        _plain_thousands(axes, "x")
    histogram.yaxis.set_major_formatter(_percent)
    tail.yaxis.set_major_formatter(_percent)
    figure.legend(
        *tail.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    return figure


def joint_figure(trace: Trace) -> Figure:
    """How prompt and output lengths go together: hexagons, and mean output by prompt length."""
    figure, (axes,) = _new(f"Prompt and output together, {_title(trace)}", 1)
    prompts, outputs = trace.prompt_tokens, np.maximum(trace.output_tokens, 1)
    if len(trace) < 500:
        axes.scatter(prompts, outputs, s=12, color=PROMPT, alpha=0.6, linewidths=0)
    else:
        cells = axes.hexbin(
            prompts, outputs, gridsize=55, xscale="log", yscale="log", bins="log",
            cmap="Blues", mincnt=1, linewidths=0.1,
        )  # fmt: skip
        figure.colorbar(cells, ax=axes, label="requests per hexagon", pad=0.01)
    middle, mean = _mean_by_bin(prompts, outputs)
    if len(middle) > 1:
        axes.plot(middle, mean, color=OUTPUT, lw=1.8, label="mean output at that prompt length")
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("output tokens")
    _plain_thousands(axes, "x")
    _plain_thousands(axes, "y")
    return figure


def arrivals_figure(trace: Trace) -> Figure:
    """Requests and tokens per second over time, and the dispersion of counts by window."""
    if trace.arrival_s is None:
        raise ValueError("a trace without arrival times has no picture of arrivals")
    figure, (over_time, tokens, burst) = _new(f"Arrivals, {_title(trace)}", 3, height=7.6, rows=3)
    relative = trace.arrival_s - trace.arrival_s[0]
    window_s = next(
        (w for w in _ROUND_WINDOWS_S if w * NUM_WINDOWS >= relative[-1]), _ROUND_WINDOWS_S[-1]
    )
    num = max(1, int(relative[-1] / window_s))
    edges, unit = np.arange(num + 1) * window_s, _time_unit(float(relative[-1]))
    counts, _ = np.histogram(relative, edges)
    over_time.stairs(counts / window_s, edges / unit[1], fill=True, color=NEUTRAL, alpha=0.55)
    rate = (len(trace) - 1) / float(relative[-1])
    over_time.axhline(rate, color="#222222", lw=0.9, ls=(0, (4, 2)))
    over_time.set_ylabel("requests/s")
    over_time.annotate(
        f"mean {rate:,.3g}/s, windows of {window_s:g} s",
        (0.995, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize=9,
    )  # fmt: skip
    over_time.margins(y=0.15)
    for label, column, colour in (
        ("prompt", trace.prompt_tokens, PROMPT),
        ("output", trace.output_tokens, OUTPUT),
    ):
        load, _ = np.histogram(relative, edges, weights=column.astype(np.float64))
        per_s = np.where(load > 0, load / window_s, np.nan)
        marker = "o" if np.isnan(per_s).mean() > 0.2 else ""
        middle = 0.5 * (edges[1:] + edges[:-1]) / unit[1]
        tokens.plot(middle, per_s, color=colour, lw=1.3, marker=marker, ms=3)
        mean = column.sum() / relative[-1]
        tokens.plot([], [], color=colour, lw=4, label=f"{label}, mean {mean:,.0f}/s")
    tokens.set_ylabel("tokens/s asked for")
    tokens.set_yscale("log")
    tokens.margins(y=0.3)
    tokens.legend(frameon=False, fontsize=9, ncols=2, loc="upper right", borderaxespad=0.0)
    _plain_thousands(tokens, "y")
    for axes in (over_time, tokens):
        axes.set_xlabel(f"time ({unit[0]})")
        axes.set_xlim(0, edges[-1] / unit[1])
    _draw_dispersion(burst, relative)
    return figure


def latencies_figure(trace: Trace) -> Figure:
    """Distribution of every latency measured at the source."""
    figure, (axes,) = _new(f"Latencies measured at the source, {_title(trace)}", 1)
    for name, values in _latencies(trace).items():
        ordered = np.sort(np.maximum(values[~np.isnan(values)], SHORTEST_SHOWN_S))
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        label = {"queue_s": "queue", "e2e_s": "end to end"}.get(name, name[:-2].upper())
        axes.step(ordered, share, where="post", lw=1.6, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(0, 1.01)
    axes.set_xlabel("seconds")
    axes.set_ylabel("share of requests at most this slow")
    axes.yaxis.set_major_formatter(_percent)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _draw_dispersion(axes: Axes, relative_s: NDArray[np.float64]) -> None:
    """Variance / mean of counts in windows from a few gaps to an eighth of the trace."""
    shortest, longest = 2.0 * relative_s[-1] / len(relative_s), relative_s[-1] / 8.0
    axes.set_xlabel("window (s)")
    axes.set_ylabel("variance / mean of counts")
    if longest > 3.0 * shortest:
        windows = np.geomspace(shortest, longest, 25)
        values = []
        for window_s in windows:
            num = int(relative_s[-1] / window_s)
            counts = np.bincount((relative_s / window_s).astype(np.int64), minlength=num)[:num]
            values.append(counts.var() / counts.mean())
        axes.plot(windows, values, color=NEUTRAL, marker="o", ms=3, lw=1.3)
        axes.set_xscale("log")
        _plain_thousands(axes, "x")
        if max(values) > 10.0 * min(values):
            axes.set_yscale("log")
            _plain_thousands(axes, "y")
        else:
            axes.set_ylim(0.0, 1.1 * max(1.0, *values))
    else:
        axes.set_xticks([])
        axes.annotate(
            "too few requests to compare windows", (0.5, 0.5), xycoords="axes fraction",
            ha="center", fontsize=9,
        )  # fmt: skip
    axes.axhline(1.0, color="#222222", lw=0.9, ls=(0, (4, 2)))
    axes.annotate(
        "Poisson", (0.995, 1.0), xycoords=("axes fraction", "data"), ha="right", va="bottom",
        fontsize=9,
    )  # fmt: skip


def _latencies(trace: Trace) -> dict[str, NDArray[np.float64]]:
    return {
        name: values
        for name, values in trace.measured.items()
        if name != "session_time_s" and not np.all(np.isnan(values))
    }


def _longer_share(
    tokens: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Distinct lengths and the share of requests at least that long."""
    lengths, counts = np.unique(tokens, return_counts=True)
    longer = len(tokens) - np.concatenate(([0], np.cumsum(counts)[:-1]))
    return lengths, longer / len(tokens)


def _log_edges(tokens: NDArray[np.int64], num: int) -> NDArray[np.float64]:
    low, high = max(1, int(tokens.min())), max(2, int(tokens.max()))
    return np.geomspace(low * 0.95, high * 1.05, num + 1)


def _mean_by_bin(
    prompts: NDArray[np.int64], outputs: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean output by bins of prompt length that hold enough requests to mean something."""
    edges = _log_edges(prompts, 24)
    index = np.clip(np.searchsorted(edges, prompts, side="right") - 1, 0, 23)
    counts = np.bincount(index, minlength=24)
    sums = np.bincount(index, outputs.astype(np.float64), minlength=24)
    keep = counts >= max(10, len(prompts) // 2000)
    return np.sqrt(edges[1:] * edges[:-1])[keep], sums[keep] / counts[keep]


def _time_unit(duration_s: float) -> tuple[str, float]:
    if duration_s > 3 * 86_400:
        return "days", 86_400.0
    if duration_s > 3 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if duration_s > 300 else ("s", 1.0)


def _title(trace: Trace) -> str:
    return f"{trace.name} ({len(trace):,} requests)"


def _percent(value: float, _: object) -> str:
    return f"{100.0 * value:.3g} %"


def _plain_thousands(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
    axis.set_minor_formatter(lambda value, _: "")


def _new(
    title: str, num_axes: int, *, height: float = 4.6, rows: int = 1
) -> tuple[Figure, tuple[Axes, ...]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, height), dpi=120, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    grid = figure.subplots(rows, num_axes // rows, squeeze=False)
    panels = tuple(grid.ravel())
    for axes in panels:
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, panels
