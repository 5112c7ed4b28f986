"""Curves of a prefix cache as Plotly figures: the pictures of ``twin.cache_plots``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from dashboard.pictures import GRID, MARK, name_x, new_picture
from twin.cache_plots import BOUND_COLOUR, policy_style

Summary = Mapping[str, Any]

SIZE_AXIS = "cache size, share of the different blocks (log scale)"
HEIGHT = 460


def curves_picture(summary: Summary, measure: str, y_title: str) -> go.Figure:
    """One line a policy, Belady's bound dashed above them, the unbounded cache dotted."""
    figure = new_picture(y_title, HEIGHT)
    x = [100.0 * size["share_of_distinct"] for size in summary["sizes"]]
    sizes = [f"{size['blocks']:,} blocks" for size in summary["sizes"]]
    if summary["bound"] is not None and measure != "saved_share":
        above = [row[measure] for row in summary["bound"]]
        line = {"color": BOUND_COLOUR, "dash": "8px,4px", "width": 2}
        _add(figure, x, above, sizes, "Belady's bound", line, None)
    for name, rows in summary["curves"].items():
        colour = policy_style(summary)[name][0]
        values = [row[measure] for row in rows]
        _add(figure, x, values, sizes, name, {"color": colour, "width": 2}, {"size": 6})
    most = summary["unbounded"][measure]
    figure.add_hline(most, line={"color": MARK, "width": 1.2, "dash": "dot"})
    figure.add_annotation(
        x=0, xref="paper", y=most, text="unbounded", showarrow=False, xanchor="left",
        yanchor="bottom", font={"size": 12, "color": MARK},
    )  # fmt: skip
    name_x(figure, SIZE_AXIS)
    figure.update_xaxes(type="log", tickvals=x, ticktext=[f"{share:.3g}%" for share in x])
    figure.update_xaxes(showgrid=True, gridcolor=GRID)
    return figure.update_yaxes(rangemode="tozero", tickformat=".0%")


def _add(
    figure: go.Figure,
    x: list[float],
    y: list[float],
    sizes: list[str],
    name: str,
    line: Mapping[str, Any],
    marker: Mapping[str, Any] | None,
) -> None:
    figure.add_scatter(
        x=x,
        y=y,
        customdata=sizes,
        mode="lines" if marker is None else "lines+markers",
        line=line,
        marker=marker,
        name=name,
        hovertemplate="%{y:.1%} at %{customdata}",
    )
