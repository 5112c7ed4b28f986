"""Pictures of a prefix store experiment, as PNG bytes; every number is one of the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.store.report import GIGA, MILLI, TIER_TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from twin.figures import bare, png

COLORS = {
    "vanilla": "#9aa5b1",
    "local_prefix": "#e0a030",
    "evostore": "#b5651d",
    "ptstore": "#3f8f5f",
    "product": "#1f4e8c",
}
TIER_COLORS = {
    "gpu": "#1f4e8c",
    "memory": "#3f8f5f",
    "replica": "#8fc29d",
    "remote": "#e0a030",
    "ssd": "#b5651d",
    "computed": "#c9ced4",
}


def draw_prefix(summary: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> PNG."""
    return {
        "ttft.png": png(ttft_figure(summary)),
        "tiers.png": png(tier_figure(summary)),
        "bytes.png": png(bytes_figure(summary)),
        "time.png": png(time_figure(summary)),
    }


def _streams(summary: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["stream"] for row in summary["rows"]))


def _of(summary: Mapping[str, Any], stream: str) -> list[Mapping[str, Any]]:
    return [row for row in summary["rows"] if row["stream"] == stream]


def _panels(summary: Mapping[str, Any], height: float) -> tuple[Figure, list[Axes], list[str]]:
    """One panel a stream, at most two in a row."""
    from matplotlib.figure import Figure

    streams = _streams(summary)
    columns = min(2, len(streams))
    rows = -(-len(streams) // columns)
    figure = Figure(figsize=(5.6 * columns + 1.0, height * rows), dpi=120, layout="constrained")
    axes = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
    for spare in axes[len(streams) :]:
        spare.set_visible(False)
    for panel, stream in zip(axes, streams, strict=False):
        panel.set_title(stream, loc="left", fontsize=10)
        bare(panel)
    return figure, axes, streams


def ttft_figure(summary: Mapping[str, Any]) -> Figure:
    """Distribution of the time to first token under every system."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes, streams = _panels(summary, 3.4)
    for panel, stream in zip(axes, streams, strict=False):
        for row in _of(summary, stream):
            curve = [max(value, 1e-9) * MILLI for value in row["ttft_curve_s"]]
            panel.plot(
                curve,
                np.linspace(0.0, 1.0, len(curve)),
                color=COLORS[row["mode"]],
                lw=2.2 if row["mode"] == "product" else 1.5,
                label=row["label"],
            )
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_ylim(0, 1)
        panel.set_xlabel("time to first token, milliseconds (log scale)")
        panel.set_ylabel("share of requests")
    _legend(figure, axes[0])
    _title(figure, summary, "time to first token, all replications")
    return figure


def tier_figure(summary: Mapping[str, Any]) -> Figure:
    """Where tokens came from, stacked, one bar a system and stream."""
    from matplotlib.figure import Figure

    rows = summary["rows"]
    figure = Figure(figsize=(9.4, 1.4 + 0.27 * len(rows)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    places = _places(summary)
    left = np.zeros(len(rows))
    for tier, title in TIER_TITLES.items():
        shares = np.array([row["token_shares"][tier] for row in rows])
        if not shares.any():
            continue
        axes.barh(places, shares, left=left, color=TIER_COLORS[tier], label=title, height=0.8)
        left = left + shares
    _name_bars(axes, summary, places)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the prompts' tokens")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False
    )
    _title(figure, summary, "where tokens came from")
    return figure


def bytes_figure(summary: Mapping[str, Any]) -> Figure:
    """Bytes over the links of each system."""
    from matplotlib.figure import Figure

    rows = summary["rows"]
    figure = Figure(figsize=(9.4, 1.4 + 0.27 * len(rows)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    places = _places(summary)
    kinds = {"network in": "#e0a030", "to device": "#1f4e8c", "from device": "#8fb3d9"}
    kinds |= {"SSD": "#b5651d"}
    left = np.zeros(len(rows))
    for kind, color in kinds.items():
        sizes = np.array([row["links"][kind]["bytes"] / GIGA for row in rows])
        if not sizes.any():
            continue
        label = "network" if kind == "network in" else kind
        axes.barh(places, sizes, left=left, color=color, label=label, height=0.8)
        left = left + sizes
    _name_bars(axes, summary, places)
    axes.set_xlabel("GB moved, loads and stores (mean of replications)")
    handles = axes.get_legend_handles_labels()
    if handles[0]:
        figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    _title(figure, summary, "bytes over links")
    return figure


def time_figure(summary: Mapping[str, Any]) -> Figure:
    """Computed share so far, and requests in the system, over time.

    Systems often do the same for long: later lines are narrower and on top, so that those they lie
    on show at both sides.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    stream = _streams(summary)[-1]
    figure = Figure(figsize=(8.6, 5.4), dpi=120, layout="constrained")
    share, queue = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (1.6, 1)})
    drawn = [series for series in summary["series"] if series["stream"] == stream]
    for series, width in zip(
        drawn, np.linspace(1.2 + 1.3 * len(drawn), 1.2, len(drawn)), strict=True
    ):
        color = COLORS[series["mode"]]
        share.plot(series["time_s"], series["computed_share"], color=color, lw=width)
        label = next(m["label"] for m in summary["modes"] if m["mode"] == series["mode"])
        queue.step(
            series["time_s"],
            np.add(series["num_requests_waiting"], series["num_requests_running"]),
            where="post",
            color=color,
            lw=width,
            label=label,
        )
    queue.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    share.set_ylim(0, 1.02)
    share.set_ylabel("tokens computed so far, share")
    queue.set_ylabel("requests in system")
    queue.set_xlabel("simulated seconds")
    queue.set_ylim(bottom=0)
    for axes in (share, queue):
        bare(axes)
    _legend(figure, queue)
    _title(figure, summary, f"over time, {stream}, first replication")
    return figure


def _places(summary: Mapping[str, Any]) -> list[float]:
    """Bars from the top, with a gap between streams."""
    places = []
    gaps = {stream: 0.7 * at for at, stream in enumerate(_streams(summary))}
    for at, row in enumerate(summary["rows"]):
        places.append(-(at + gaps[row["stream"]]))
    return places


def _name_bars(axes: Axes, summary: Mapping[str, Any], places: Sequence[float]) -> None:
    rows = summary["rows"]
    single = len(_streams(summary)) == 1
    axes.set_yticks(
        list(places),
        [row["label"] if single else f"{row['stream']}, {row['label']}" for row in rows],
        fontsize=8,
    )
    axes.margins(y=0.01)
    axes.grid(axis="x", alpha=0.25)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _title(figure: Figure, summary: Mapping[str, Any], what: str) -> None:
    d = summary["deployment"]
    figure.suptitle(
        f"{summary['workload']['name']} on {d['nodes']} nodes with {d['gpus']} GPUs, "
        f"{d['model']}: {what}",
        fontsize=11,
        x=0.01,
        ha="left",
    )


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
