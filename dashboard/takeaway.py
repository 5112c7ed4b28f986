"""What one takes away from the page: command lines, the scenario, the numbers."""

from __future__ import annotations

import streamlit as st

from dashboard.answers import Summary, summary_json
from dashboard.commands import SCENARIO_FILE, command_line
from dashboard.sidebar import edit_as_file
from dashboard.uploads import without_folder
from models.scenario import Scenario
from models.scenario_file import scenario_toml


def show_takeaway(summary: Summary, scenario: Scenario | None) -> None:
    """The same question for the command line and as a file, and the answer as JSON."""
    st.markdown("##### Take it along")
    if scenario is not None:
        _show_commands(scenario)
    with st.container(horizontal=True):
        if scenario is not None:
            _offer_scenario(scenario_toml(scenario))
        _offer_summary(summary)
    if scenario is not None:
        with st.expander("Scenario"):
            text = without_folder(scenario_toml(scenario))
            st.code(text, language="toml", wrap_lines=True)


def _show_commands(scenario: Scenario) -> None:
    st.caption("The same numbers on the command line, closed forms and simulation:")
    for command in (command_line("theory", scenario, "--json"), command_line("run", scenario)):
        st.code(without_folder(command), language=None, wrap_lines=True)


def _offer_scenario(text: str) -> None:
    st.button("Edit as scenario file", on_click=edit_as_file, args=(text,), key="take.edit")
    st.download_button(
        "Download scenario (TOML)",
        without_folder(text),
        file_name=SCENARIO_FILE,
        mime="application/toml",
        on_click="ignore",
        key="take.toml",
    )


def _offer_summary(summary: Summary) -> None:
    st.download_button(
        "Download summary (JSON)",
        summary_json(summary),
        file_name=f"{summary.get('workload', {}).get('name', 'summary')}.json",
        mime="application/json",
        on_click="ignore",
        key="take.json",
    )
