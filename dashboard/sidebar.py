"""Other ways to ask than the form: a scenario file, and a saved run."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboard.commands import SCENARIO_FILE
from models.scenario_file import default_scenario, scenario_toml

SOURCES = ("Question", "Scenario file", "Saved run", "Prefix cache")
SCENARIO_TEXT, RUN_PATH = "scenario.text", "saved.path"
RUNS_FOLDER = "results"


def ask_file() -> tuple[str, bytes]:
    """Name and text of a scenario file: uploaded, or written here."""
    upload = st.file_uploader("Scenario (TOML)", key="upload.scenario")
    if upload is not None:
        content: bytes = upload.getvalue()
        st.code(content.decode("utf-8", "replace"), language="toml", wrap_lines=True)
        return upload.name, content
    st.session_state.setdefault(SCENARIO_TEXT, scenario_toml(default_scenario()))
    text = st.text_area("or write it here (Ctrl + Enter applies)", key=SCENARIO_TEXT, height=420)
    return SCENARIO_FILE, text.encode()


def ask_saved_run() -> str:
    """Path of a run directory."""
    found = sorted(str(head.parent) for head in Path(RUNS_FOLDER).glob("*/run.json"))
    if found:
        st.selectbox(
            f"Runs under {RUNS_FOLDER}/",
            found,
            index=None,
            placeholder="choose one",
            key="saved.found",
            on_change=_use_found_run,
        )
    path = st.text_input(
        "Run directory", key=RUN_PATH, placeholder=f"{RUNS_FOLDER}/azure-2023-conversation-001"
    )
    st.caption("A directory written by `twin run` or `twin cache`, on this machine.")
    return path.strip()


def _use_found_run() -> None:
    if st.session_state["saved.found"]:
        st.session_state[RUN_PATH] = st.session_state["saved.found"]


def edit_as_file(text: str) -> None:
    """Open the scenario file with this text; a callback, since it moves another widget."""
    st.session_state[SCENARIO_TEXT] = text
    st.session_state["source"] = SOURCES[1]
