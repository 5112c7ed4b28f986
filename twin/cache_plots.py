"""Pictures of prefix-cache curves, as PNG bytes. Everything drawn is a number of the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from twin.figures import bare, png

Summary = Mapping[str, Any]

BOUND_COLOUR = "#222222"
COLOURS = (
    "#1f4e8c", "#c0392b", "#3f8f5f", "#b5651d", "#7b4fa3", "#1a9aa8", "#c2549d",
    "#8a8f2a", "#5b7fd0", "#7a4a3a", "#5f6b76", "#d99a1c", "#2f6b3a",
)  # fmt: skip
MARKERS = "osD^vP*Xp<>hd"
LABEL_GAP = 0.045  # of the axes' height, between two labels
LABEL_DISTANCE, WIDER = 1.25, 3.2  # labels stand left of the first size by that factor; room


LABELS_IN_A_ROW = 40  # characters


def draw_cache(summary: Summary) -> dict[str, bytes]:
    """File name -> PNG."""
    return {
        "hits.png": png(curves_figure(summary, "block_hit_share", "share of prompt blocks hit")),
        "saved.png": png(curves_figure(summary, "saved_share", "share of prefill seconds saved")),
    }


def policy_style(summary: Summary) -> dict[str, tuple[str, str]]:
    """Policy -> colour and marker: the same in every picture of one run."""
    return {
        name: (COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)])
        for at, name in enumerate(summary["curves"])
    }


def curves_figure(summary: Summary, measure: str, what: str) -> Figure:
    """Left: the measure against the size. Right: points above or below the first policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 5.6), dpi=120, layout="constrained")
    workload = summary["workload"]
    figure.suptitle(
        f"Prefix cache, {workload['name']}: {workload['num_requests']:,} requests, "
        f"{workload['num_distinct_blocks']:,} different blocks ({workload['block_tokens']} tokens)",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    levels, differences = figure.subplots(1, 2)
    for axes in (levels, differences):
        _bare(axes, summary)
    _draw_levels(levels, summary, measure)
    levels.set_ylabel(what)
    _draw_differences(differences, summary, measure)
    return figure


def _draw_levels(axes: Axes, summary: Summary, measure: str) -> None:
    x = _sizes(summary)
    if summary["bound"] is not None and measure == "block_hit_share":
        above = [row[measure] for row in summary["bound"]]
        axes.plot(x, above, color=BOUND_COLOUR, ls=(0, (4, 2)), lw=1.8, label="Belady's bound")
    axes.axhline(summary["unbounded"][measure], color="#999999", lw=0.9, ls=(0, (1, 1)))
    axes.annotate(
        "unbounded", (0.01, summary["unbounded"][measure]), xycoords=("axes fraction", "data"),
        va="bottom", fontsize=8, color="#666666",
    )  # fmt: skip
    style = policy_style(summary)
    for name in _by_mean(summary, measure):
        colour, marker = style[name]
        y = [row[measure] for row in summary["curves"][name]]
        axes.plot(x, y, color=colour, marker=marker, ms=4, lw=1.3, label=name)
    axes.set_ylim(bottom=0.0)
    axes.margins(y=0.08)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100.0 * value:.3g} %")
    axes.legend(
        frameon=False, fontsize=8.5, loc="lower right", ncols=2, title="by mean, best first"
    )


def _draw_differences(axes: Axes, summary: Summary, measure: str) -> None:
    """Points of each policy above the first one, with its name where it differs most."""
    x, style = _sizes(summary), policy_style(summary)
    reference = "lru" if "lru" in summary["curves"] else next(iter(summary["curves"]))
    base = [row[measure] for row in summary["curves"][reference]]
    ends = {}
    for name in _by_mean(summary, measure):
        colour, marker = style[name]
        y = [
            100.0 * (row[measure] - below)
            for row, below in zip(summary["curves"][name], base, strict=True)
        ]
        axes.plot(x, y, color=colour, marker=marker, ms=4, lw=1.3)
        ends[name] = y
    axes.set_ylabel(f"points above {reference}")
    axes.margins(y=0.08)
    _label_left(axes, {name: y[0] for name, y in ends.items()}, x[0], style)


def _label_left(
    axes: Axes, heights: Mapping[str, float], x: float, style: Mapping[str, tuple[str, str]]
) -> None:
    """Names left of the first size, moved apart where they would touch."""
    low, high = axes.get_ylim()
    gap = LABEL_GAP * (high - low)
    names = sorted(heights, key=lambda name: heights[name])
    places = spread([heights[name] for name in names], gap)
    axes.set_ylim(min(low, places[0] - gap), max(high, places[-1] + gap))
    axes.set_xlim(left=x / WIDER)
    for name, place in zip(names, places, strict=True):
        axes.annotate(
            name, (x, heights[name]), xytext=(x / LABEL_DISTANCE, place), ha="right", va="center",
            fontsize=8.5, color=style[name][0],
            arrowprops={
                "arrowstyle": "-", "color": style[name][0], "lw": 0.6, "alpha": 0.6,
                "relpos": (1.0, 0.5), "shrinkA": 1,
            },
        )  # fmt: skip


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Places at least ``gap`` apart, in the same order, near the heights (ascending).

    Labels that touch form a stack centred on the mean of their heights.
    """
    stacks: list[list[float]] = []  # of each: heights in it
    for height in heights:
        stacks.append([height])
        while len(stacks) > 1 and _top(stacks[-2], gap) + gap > _bottom(stacks[-1], gap):
            last = stacks.pop()
            stacks[-1] = [*stacks[-1], *last]
    return [_bottom(stack, gap) + gap * at for stack in stacks for at in range(len(stack))]


def _bottom(stack: Sequence[float], gap: float) -> float:
    return sum(stack) / len(stack) - gap * (len(stack) - 1) / 2


def _top(stack: Sequence[float], gap: float) -> float:
    return sum(stack) / len(stack) + gap * (len(stack) - 1) / 2


def _by_mean(summary: Summary, measure: str) -> list[str]:
    """Policies by the mean of the measure over sizes, best first."""
    means = {
        name: sum(row[measure] for row in rows) / len(rows)
        for name, rows in summary["curves"].items()
    }
    return sorted(means, key=lambda name: -means[name])


def _sizes(summary: Summary) -> list[float]:
    return [100.0 * size["share_of_distinct"] for size in summary["sizes"]]


def _bare(axes: Axes, summary: Summary) -> None:
    x = _sizes(summary)
    axes.set_xscale("log")
    labels = [size["asked"] for size in summary["sizes"]]
    axes.set_xticks(x, labels)
    if sum(map(len, labels)) > LABELS_IN_A_ROW:
        axes.tick_params(axis="x", labelrotation=35, labelsize=8)
    axes.minorticks_off()
    axes.set_xlabel("cache size (log scale of its share of the different blocks)")
    bare(axes)
