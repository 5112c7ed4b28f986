"""The what-if page: a question in the sidebar, the twin's answer beside it."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard.answers import INPUT_ERRORS, Summary, closed_forms, simulate, simulated
from dashboard.form import ask_form
from dashboard.layout import show_answer, show_error, show_headline, show_origin
from dashboard.prefix_form import ask_prefix
from dashboard.prefix_page import show_prefix_answer, show_prefix_question
from dashboard.saved_report import show_saved_report
from dashboard.sidebar import SOURCES, ask_file, ask_saved_run
from dashboard.takeaway import show_takeaway
from dashboard.uploads import keep_upload
from models.scenario import Scenario
from models.scenario_file import load_scenario, parse_scenario
from models.strict_tables import ScenarioError
from traces.record import read_run
from twin.cache_curves import PREFIX_CACHE

STYLE = Path(__file__).with_name("page.css")


def main() -> None:
    """Draw the page once; Streamlit does so on every change."""
    st.set_page_config(page_title="Serving Twin", layout="wide", initial_sidebar_state=420)
    st.html(STYLE)
    with st.sidebar:
        st.html('<div class="brand">Serving Twin</div>')
        form, file, saved, prefix = st.tabs(SOURCES, key="source", on_change="rerun")
        with form:
            question = ask_form()
        with file:
            name, text = ask_file()
        with saved:
            path = ask_saved_run()
        with prefix:
            prefix_form = ask_prefix()
    try:
        if saved.open:
            _show_saved(path)
        elif prefix.open:
            show_prefix_question(prefix_form)
        elif file.open:
            _show_question(load_scenario(keep_upload(name, text)))
        elif question.is_complete:
            _show_question(parse_scenario(question.tables()))
        else:
            st.info("Choose a file on the left, or type its path.")
    except INPUT_ERRORS as error:
        show_error(error)


def _show_question(scenario: Scenario) -> None:
    """The closed forms at once, and the simulation once it has been asked for."""
    with st.spinner("Solving the closed forms"):
        summary = simulated(scenario) or closed_forms(scenario)
    left, right = st.columns([3.2, 1], vertical_alignment="center")
    with left:
        show_headline(summary)
    with right:
        is_asked, progress = _show_button(summary)
    show_answer(summary)
    show_takeaway(summary, scenario)
    if is_asked:
        _simulate(scenario, progress)


def _show_button(summary: Summary) -> tuple[bool, DeltaGenerator]:
    """Whether the button was pressed, and where progress may be shown."""
    is_done = "simulation" in summary or "open_loop" in summary
    is_pressed = st.button(
        "Simulated" if is_done else "Simulate",
        type="secondary" if is_done else "primary",
        disabled=is_done,
        width="stretch",
        key="simulate",
    )
    progress = st.empty()
    progress.caption("Theory and twin, with intervals" if is_done else "Closed forms so far")
    return is_pressed, progress


def _simulate(scenario: Scenario, progress: DeltaGenerator) -> None:
    """Run the twin with a progress bar, then draw the page again with what it found."""
    progress.progress(0.0, "Starting")

    def on_progress(label: str, done: int, total: int) -> None:
        progress.progress(min(1.0, done / total), f"{done} of {total}: {label}")

    try:
        simulate(scenario, on_progress)
    except INPUT_ERRORS as error:
        show_error(error, progress)
    else:
        st.rerun()


def _show_saved(path: str) -> None:
    if not path:
        st.info("Type the path of a run directory on the left.")
        return
    record = read_run(path)
    summary = record.summary
    if summary.get("kind") == PREFIX_CACHE:
        show_origin(summary, path)
        show_prefix_answer(summary)
        return
    if "bundle" not in summary:  # weights that shrink, or a replay
        show_origin(summary, path)
        show_saved_report(record)
        show_takeaway(summary, None)
        return
    if "recommendation" in summary:
        show_headline(summary)
    show_origin(summary, path)
    show_answer(summary)
    show_takeaway(summary, _scenario_of(summary, path))


def _scenario_of(summary: Summary, path: str) -> Scenario | None:
    """The question of a saved run, or None where it has none that this version can ask."""
    try:
        return parse_scenario(summary["scenario"], where=path)
    except (KeyError, ScenarioError):
        return None


main()
