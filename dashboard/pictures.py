"""A run's summary as Plotly figures: the pictures of ``twin.plots``, to be pointed at.

Everything drawn is a number of the summary; tokens per second are those of the whole model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from twin.plots import ATTENTION, FFN, LEVEL_STYLE, TWIN, barrier_points

Summary = Mapping[str, Any]

RATIO_AXIS = "attention workers per FFN server, r"
INK, MARK, GRID = "#475467", "#667085", "rgba(102, 112, 133, 0.16)"


def throughput_picture(summary: Summary, *, log_ratio: bool = False) -> go.Figure:
    """Tokens per second and instance against r: four levels, simulated points, the answer."""
    layers = summary["bundle"]["num_layers"]
    figure = new_picture("output tokens/s per instance", 400)
    for name, level in summary["levels"].items():
        curve = [value / layers for value in level["curve"]["throughput_per_instance"]]
        _add_level(figure, summary, name, curve, ":,.0f")
    points = _points(summary)
    if points:
        estimates = [point["throughput_per_instance"] for point in points]
        _add_points(
            figure,
            [point["r"] for point in points],
            [estimate["mean"] / layers for estimate in estimates],
            [_over(estimate["half_width"], layers) for estimate in estimates],
            "simulated twin",
            TWIN,
            ":,.0f",
        )
    figure.update_yaxes(rangemode="tozero", tickformat=",.0f")
    return _on_ratios(figure, summary, log_ratio)


def idle_picture(summary: Summary, *, log_ratio: bool = False) -> go.Figure:
    """Idle shares of attention and FFN against r."""
    figure = new_picture("share of a cycle spent idle", 340)
    points = _points(summary)
    for name, label, colour in (
        ("attention_idle", "attention", ATTENTION),
        ("ffn_idle", "FFN", FFN),
    ):
        curve = summary["levels"]["exact"]["curve"][name]
        _add_curve(figure, summary, label, curve, colour, "solid", ":.1%")
        if points:
            _add_points(
                figure,
                [point["r"] for point in points],
                [point[name]["mean"] for point in points],
                [point[name]["half_width"] for point in points],
                f"{label}, twin",
                colour,
                ":.1%",
                hollow=True,
            )
    if points:
        _explain_hollow_points(figure)
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    return _on_ratios(figure, summary, log_ratio)


def barrier_picture(summary: Summary, *, log_ratio: bool = False) -> go.Figure:
    """What waiting for the slowest worker adds to the cycle, against r."""
    figure = new_picture("cycle longer than with equal loads", 340)
    for name, level in summary["levels"].items():
        if name != "mean_field":
            _add_level(figure, summary, name, level["curve"]["barrier_overhead"], ":.2%")
    points = _points(summary)
    if points:
        overhead, half_width = barrier_points(summary)
        ratios = [point["r"] for point in points]
        _add_points(figure, ratios, overhead.tolist(), half_width.tolist(), "twin", TWIN, ":.2%")
    figure.update_yaxes(rangemode="tozero", tickformat=".1~%")
    return _on_ratios(figure, summary, log_ratio)


def load_picture(summary: Summary) -> go.Figure:
    """Law of the token load of one attention worker: theory and what the twin met."""
    load = summary["load_distribution"]
    edges = load["edges_tokens"]
    pairs = list(itertools.pairwise(edges))
    centres = [0.5 * (low + high) for low, high in pairs]
    figure = new_picture("share of steps per bin", 340)
    figure.add_bar(
        x=centres,
        y=load["twin_share"],
        width=[high - low for low, high in pairs],
        marker={"color": TWIN, "opacity": 0.4, "line": {"width": 0}},
        name="twin",
        hovertemplate="%{y:.2%}",
    )
    figure.add_scatter(
        x=centres,
        y=load["theory_share"],
        mode="lines",
        line={"color": LEVEL_STYLE["exact"][1], "width": 2},
        name="exact law",
        hovertemplate="%{y:.2%}",
    )
    _mark(figure, load["mean_tokens"], "mean", dash="dot", is_left=True)
    _mark(figure, load["mean_max_tokens"], "mean of the slowest")
    name_x(figure, "KV tokens one worker reads in a step")
    figure.update_xaxes(tickformat=",.0f")
    tallest = max(*load["twin_share"], *load["theory_share"])
    figure.update_yaxes(range=[0, 1.15 * tallest], tickformat=".0%")
    return figure


def latency_picture(summary: Summary) -> go.Figure:
    """Distribution of TTFT, TPOT and end-to-end time of an open-loop run, with the targets."""
    run = summary["open_loop"]
    figure = new_picture("share of requests at most this slow", 400)
    name_x(figure, "seconds (log scale)")
    figure.update_xaxes(type="log")
    for name, label, colour in (
        ("ttft_s", "TTFT", ATTENTION),
        ("tpot_s", "TPOT", FFN),
        ("e2e_s", "end to end", TWIN),
    ):
        row = run["latency"].get(name)
        if row and row["quantiles_s"]:
            figure.add_scatter(
                x=row["quantiles_s"],
                y=row["quantile_levels"],
                mode="lines",
                line={"color": colour, "width": 2},
                name=label,
                hovertemplate="%{y:.0%} within %{x:.4~g} s",
            )
        target = run["slo"].get(name)
        if target:
            _mark(figure, target, f"{label} target", dash="dot", colour=colour)
    figure.update_yaxes(range=[0, 1.01], tickformat=".0%")
    return figure.update_layout(hovermode="closest")


def new_picture(y_title: str, height: int) -> go.Figure:
    """An empty picture in the page's style, ``height`` pixels high."""
    figure = go.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        font={"family": "Source Sans, sans-serif", "size": 12.5, "color": INK},
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
        hovermode="x unified",
        hoverlabel={"bgcolor": "white"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        bargap=0,
    )
    figure.update_yaxes(
        title={"text": y_title, "font": {"size": 13}},
        gridcolor=GRID,
        zeroline=False,
        automargin=True,
    )
    figure.update_xaxes(
        showgrid=False, zeroline=False, showline=True, linecolor=GRID, automargin=True
    )
    return figure


def _points(summary: Summary) -> list[Mapping[str, Any]]:
    simulation = summary.get("simulation")
    return list(simulation["points"]) if simulation else []


def _over(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _add_level(
    figure: go.Figure, summary: Summary, name: str, curve: Sequence[float], form: str
) -> None:
    label, colour, dashes = LEVEL_STYLE[name]
    _add_curve(figure, summary, label, curve, colour, _dash(dashes), form)


def _add_curve(
    figure: go.Figure,
    summary: Summary,
    label: str,
    curve: Sequence[float],
    colour: str,
    dash: str,
    form: str,
) -> None:
    figure.add_scatter(
        x=summary["ratios"],
        y=curve,
        mode="lines",
        line={"color": colour, "dash": dash, "width": 2},
        name=label,
        hovertemplate=f"%{{y{form}}}",
    )


def _add_points(
    figure: go.Figure,
    ratios: Sequence[int],
    means: Sequence[float],
    half_widths: Sequence[float | None],
    label: str,
    colour: str,
    form: str,
    *,
    hollow: bool = False,
) -> None:
    figure.add_scatter(
        x=ratios,
        y=means,
        error_y={"type": "data", "array": half_widths, "thickness": 1.4, "width": 4},
        mode="markers",
        marker={
            "size": 7,
            "color": "white" if hollow else colour,
            "line": {"color": colour, "width": 1.6},
        },
        name=label,
        showlegend=not hollow,
        hovertemplate=f"%{{y{form}}} ± %{{error_y.array{form}}}",
    )
    figure.data[-1].error_y.color = colour


def _explain_hollow_points(figure: go.Figure) -> None:
    """One legend entry for the points of every colour."""
    marker = {"size": 7, "color": "white", "line": {"color": MARK, "width": 1.6}}
    figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name="simulated twin")


def _dash(dashes: Any) -> str:
    """Matplotlib's dashes, (offset, lengths in line widths), as Plotly's, in pixels."""
    if isinstance(dashes, str):
        return dashes
    _, lengths = dashes
    return ",".join(f"{2 * length}px" for length in lengths)


def _on_ratios(figure: go.Figure, summary: Summary, log_ratio: bool) -> go.Figure:
    """Name the axis of r, and mark the ratio in use and where the best one may lie."""
    best = summary["recommendation"]
    last = summary["ratios"][-1]
    if log_ratio:
        name_x(figure, f"{RATIO_AXIS} (log scale)")
        figure.update_xaxes(type="log", dtick="D2", range=[-0.04, math.log10(1.1 * last)])
    else:
        name_x(figure, RATIO_AXIS)
        figure.update_xaxes(range=[0, 1.02 * last])
    if best["r_low"] < best["r_high"]:
        figure.add_vrect(
            best["r_low"], best["r_high"], fillcolor=MARK, opacity=0.1, line_width=0, layer="below"
        )
    _mark(figure, best["r"], f"r = {best['r']}")
    return figure


def name_x(figure: go.Figure, text: str) -> None:
    """Name the horizontal axis."""
    figure.update_xaxes(title={"text": text, "font": {"size": 13}})


def _mark(
    figure: go.Figure,
    x: float,
    text: str,
    *,
    dash: str = "solid",
    colour: str = MARK,
    is_left: bool = False,
) -> None:
    """A vertical line with its name beside it; on a log axis Plotly wants a text at log10(x)."""
    figure.add_vline(x, line={"color": colour, "width": 1.2, "dash": dash})
    figure.add_annotation(
        x=math.log10(x) if figure.layout.xaxis.type == "log" else x,
        y=1,
        yref="paper",
        text=text,
        font={"size": 13, "color": colour},
        showarrow=False,
        xanchor="right" if is_left else "left",
        yanchor="top",
        xshift=-3 if is_left else 3,
    )
