"""The answer on the page, part by part; every number is a value of the summary."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import streamlit as st
from rich.console import RenderableType
from streamlit.delta_generator import DeltaGenerator

from dashboard.pictures import (
    barrier_picture,
    idle_picture,
    latency_picture,
    load_picture,
    throughput_picture,
)
from dashboard.report_tables import table_html, tables_of
from dashboard.uploads import without_folder
from models.scenario import SECONDS_PER
from twin.plots import barrier_points
from twin.report import (
    duration,
    faults_table,
    headline,
    how_sure,
    levels_table,
    open_loop_table,
    percent,
    rate,
    simulation_table,
    stragglers_table,
    with_interval,
    workload_table,
)

Summary = Mapping[str, Any]

MANY_RATIOS = 100


def show_answer(summary: Summary) -> None:
    """Metrics, warnings, charts and tables of whatever the summary holds."""
    if "recommendation" in summary:
        show_metrics(summary)
    show_warnings(summary)
    if summary.get("open_loop"):
        _show_latency(summary)
    if "levels" in summary:
        _show_curves(summary)
    if summary.get("load_distribution"):
        _show_load(summary)
    _show_tables(summary)


def show_headline(summary: Summary) -> None:
    """The ratio, why it is that one, and how sure that is."""
    best, workload, bundle = summary["recommendation"], summary["workload"], summary["bundle"]
    origin = bundle["calibration"] or "own coefficients"
    asked = (
        f"{workload['name']} on {origin}, B = {bundle['batch_per_worker']}, {bundle['semantics']}"
    )
    lines = [
        f'<div class="asked">{escape(asked)}</div>',
        f'<div><span class="ratio" data-testid="ratio">r = {best["r"]}</span>'
        f'<span class="why">{escape(headline(best))}</span></div>',
        f'<div class="sure">{escape(_sentence(how_sure(best)))}</div>',
    ]
    if best["binding"]:
        held = "held back by " + ", ".join(best["binding"])
        lines.append(f'<div class="held">{escape(held)}</div>')
    st.html("".join(lines))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def show_origin(summary: Summary, path: str) -> None:
    """Where and how a saved run was made."""
    versions = ", ".join(f"{name} {of}" for name, of in summary.get("versions", {}).items())
    facts = [f"saved run {path}", f"seed {summary.get('seed')}"]
    if summary.get("commit"):
        facts.append(f"commit {summary['commit'][:10]}")
    st.caption("; ".join([*facts, versions]))


# --- numbers ----------------------------------------------------------------------------------


def show_metrics(summary: Summary) -> None:
    """Six numbers at the ratio in use; below the predicted ones what the twin measured."""
    best, layers = summary["recommendation"], summary["bundle"]["num_layers"]
    twin = _measured(summary)
    st.html(
        '<div class="metrics">'
        + "".join(
            _metric_html(name, label, value, twin.get(name, ""), meaning)
            for name, label, value, meaning in (
                (
                    "throughput",
                    "Tokens/s per instance",
                    rate(best["throughput_per_instance"] / layers),
                    "Output tokens per second of the whole bundle, per unit of price",
                ),
                (
                    "tpot",
                    "Time per output token",
                    duration(best["tpot_s"]),
                    "Layers x microbatches x cycle",
                ),
                (
                    "cycle",
                    "Cycle a layer",
                    duration(best["cycle_s"]),
                    "Time of one microbatch period in one layer",
                ),
                (
                    "barrier",
                    "Barrier overhead",
                    percent(best["barrier_overhead"]),
                    "What waiting for the slowest attention worker adds to the cycle",
                ),
                (
                    "attention_idle",
                    "Attention idle",
                    percent(best["attention_idle"], 1),
                    "Share of a cycle in which the mean attention worker does nothing",
                ),
                (
                    "ffn_idle",
                    "FFN idle",
                    percent(best["ffn_idle"], 1),
                    "Share of a cycle in which the FFN server does nothing",
                ),
            )
        )
        + "</div>"
    )


def _metric_html(name: str, label: str, value: str, twin: str, meaning: str) -> str:
    return (
        f'<div class="metric" data-name="{name}" title="{escape(meaning)}">'
        f'<div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f'<div class="twin">{escape(twin)}</div></div>'
    )


def _measured(summary: Summary) -> dict[str, str]:
    """Metric -> mean and interval of the simulated point at the ratio in use."""
    points = summary.get("simulation", {}).get("points", ())
    ratios = [point["r"] for point in points]
    if summary["recommendation"]["r"] not in ratios:
        return {}
    at = ratios.index(summary["recommendation"]["r"])
    point, (overhead, half_width) = points[at], barrier_points(summary)
    twin = {
        "throughput": with_interval(
            point["throughput_per_instance"], 1.0 / summary["bundle"]["num_layers"]
        ),
        "tpot": _duration_interval(point["tpot_s"]),
        "cycle": _duration_interval(point["cycle_s"]),
        "barrier": _percent_interval(float(overhead[at]), float(half_width[at]), 2),
        **{
            name: _percent_interval(point[name]["mean"], point[name]["half_width"], 1)
            for name in ("attention_idle", "ffn_idle")
        },
    }
    return {name: f"twin {text}" for name, text in twin.items()}


def _duration_interval(estimate: Mapping[str, float]) -> str:
    """Mean and half width in the unit that suits the mean."""
    mean, _, unit = duration(estimate["mean"]).rpartition(" ")
    return f"{mean} ± {estimate['half_width'] / SECONDS_PER[unit]:.2g} {unit}"


def _percent_interval(mean: float, half_width: float, digits: int) -> str:
    return f"{percent(mean, digits).removesuffix(' %')} ± {percent(half_width, digits)}"


def show_warnings(summary: Summary) -> None:
    """What limits the numbers on the page; nothing if there is nothing."""
    warnings = summary.get("warnings", ())
    if warnings:
        items = "".join(f"<li>{escape(without_folder(str(text)))}</li>" for text in warnings)
        st.html(f'<div class="mind"><b>Mind</b><ul>{items}</ul></div>')


# --- charts -----------------------------------------------------------------------------------


def _show_curves(summary: Summary) -> None:
    is_long = len(summary["ratios"]) > MANY_RATIOS
    with st.container(horizontal=True, horizontal_alignment="distribute"):
        st.markdown("##### Throughput per instance")
        log_ratio = st.toggle("Log scale of r", value=is_long, key=f"chart.log_ratio.{is_long}")
    draw_chart(throughput_picture(summary, log_ratio=log_ratio), "throughput")
    left, right = st.columns(2, gap="medium")
    with left:
        st.markdown("##### Idle time")
        draw_chart(idle_picture(summary, log_ratio=log_ratio), "idle")
    with right:
        st.markdown("##### Straggler overhead")
        draw_chart(barrier_picture(summary, log_ratio=log_ratio), "barrier")


def _show_load(summary: Summary) -> None:
    r = summary["load_distribution"]["r"]
    st.markdown(f"##### Token load of one attention worker at r = {r}")
    draw_chart(load_picture(summary), "load")


def _show_latency(summary: Summary) -> None:
    st.markdown(f"##### Latency of requests at r = {summary['open_loop']['r']}")
    draw_chart(latency_picture(summary), "latency")
    _show_section(open_loop_table, summary)


def show_error(error: Exception, place: DeltaGenerator | None = None) -> None:
    """The message of an error, to the letter: signs of Markdown are no Markdown here."""
    if type(error) in (ValueError, MemoryError):  # no reader has said so: worth a look
        logging.getLogger("serving-twin").warning("a question was refused", exc_info=error)
    text = re.sub(r"([\\`*_{}\[\]()#+.!|~$:<>-])", r"\\\1", without_folder(str(error)))
    (place or st).error(text)


def draw_chart(figure: Any, key: str) -> None:
    """A chart of the page; ``key`` is its name among all of them."""
    st.plotly_chart(figure, key=f"chart.{key}", theme=None, config={"displayModeBar": False})


# --- tables -----------------------------------------------------------------------------------

Section = Callable[[Summary, bool], RenderableType]


def _show_tables(summary: Summary) -> None:
    for name, section in (
        ("stragglers", stragglers_table),
        ("simulation", simulation_table),
        ("faults", faults_table),
        ("levels", levels_table),
        ("workload", workload_table),
    ):
        if summary.get(name):
            _show_section(section, summary)


def _show_section(section: Section, summary: Summary) -> None:
    for table in tables_of(section(summary, False)):
        if table.title:
            st.markdown(f"##### {table.title}")
        st.html(without_folder(table_html(table)))
