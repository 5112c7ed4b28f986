"""The part of the page about prefix caches: hit rates of eviction policies by size."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import streamlit as st

from dashboard.answers import Summary, summary_json
from dashboard.layout import draw_chart, show_warnings
from dashboard.prefix_form import PrefixForm
from dashboard.prefix_pictures import curves_picture
from dashboard.report_tables import table_html
from dashboard.uploads import without_folder
from traces.readers import read_trace
from twin.cache_curves import run_curves
from twin.cache_tables import answer_lines, curve_tables, question_table
from twin.cache_workload import CacheWorkload, generated_workload, traced_workload

NUM_REMEMBERED = 16  # answers of one open page
CHARTS = {
    "block_hit_share": ("Block hits", "share of prompt blocks hit"),
    "saved_share": ("Prefill saved", "share of prefill seconds saved"),
}


def show_prefix_question(form: PrefixForm) -> None:
    """Simulate what the form asks, with a progress bar, and show it.

    Raises:
        ValueError: If the question cannot be asked; the message is for the person at the screen.
    """
    if not form.trace:
        st.info("Choose a trace on the left, or type its path.")
        return
    summary = _answer(form)
    show_prefix_answer(summary)
    st.markdown("##### Take it along")
    st.caption("The same numbers on the command line:")
    st.code(without_folder(form.command_line()), language=None, wrap_lines=True)
    st.download_button(
        "Download summary (JSON)",
        summary_json(summary),
        file_name=f"{summary['name']}-cache.json",
        mime="application/json",
        on_click="ignore",
        key="take.prefix_json",
    )


def show_prefix_answer(summary: Summary) -> None:
    """Headline, warnings, charts and tables of a summary of ``twin cache``."""
    asked = f"{summary['workload']['name']}, {summary['model']['name']}"
    sentences = [escape(line[:1].upper() + line[1:]) for line in answer_lines(summary)]
    st.html(
        f'<div class="asked">{escape(without_folder(asked))}</div>'
        + "".join(f'<div class="sure">{sentence}</div>' for sentence in sentences)
    )
    show_warnings(summary)
    for column, (measure, (title, y_title)) in zip(st.columns(2), CHARTS.items(), strict=True):
        with column:
            st.markdown(f"##### {title}")
            draw_chart(curves_picture(summary, measure, y_title), f"prefix.{measure}")
    for table in (question_table(summary, False), *curve_tables(summary, False)):
        if table.title:
            st.markdown(f"##### {table.title}")
        st.html(without_folder(table_html(table)))


def _answer(form: PrefixForm) -> Summary:
    answers: dict[str, Mapping[str, Any]] = st.session_state.setdefault("prefix.answers", {})
    if form.key not in answers:
        place = st.empty()
        place.progress(0.0, "Reading the requests")
        workload = _workload(form)

        def on_progress(label: str, done: int, total: int) -> None:
            place.progress(done / total, f"{done} of {total}: {label}")

        answer = run_curves(form.question, workload, on_progress=on_progress)
        while len(answers) >= NUM_REMEMBERED:
            del answers[next(iter(answers))]
        answers[form.key] = answer
        place.empty()
    return answers[form.key]


def _workload(form: PrefixForm) -> CacheWorkload:
    if form.is_file:
        trace = read_trace(form.trace)
        return traced_workload(trace, seed=form.seed, num_requests=form.num_requests)
    return generated_workload(form.trace, seed=form.seed, num_requests=form.num_requests)
