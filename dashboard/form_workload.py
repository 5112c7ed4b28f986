"""The part of the form about the workload: bundled, a trace file, or a length law."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard.fields import KEEP, number
from dashboard.questions import AUTO, filled
from dashboard.uploads import path_of
from models.scenario import SECONDS_PER
from traces.readers import FORMATS
from traces.workloads import BUNDLED

BUNDLED_KIND, TRACE_KIND, LAW_KIND = "Bundled", "Trace file", "Length law"

LENGTH_LAWS: dict[str, tuple[tuple[str, str, float, float], ...]] = {
    # field, label, default, smallest
    "geometric": (
        ("prompt_tokens", "Prompt tokens", 100, 0),
        ("mean_output_tokens", "Mean output tokens", 500.0, 1.0),
    ),
    "lognormal": (
        ("mean_prompt_tokens", "Mean prompt tokens", 1000.0, 1.0),
        ("mean_output_tokens", "Mean output tokens", 250.0, 1.0),
        ("sigma_prompt", "Sigma of prompts", 1.0, 0.0),
        ("sigma_output", "Sigma of outputs", 0.8, 0.0),
        ("correlation", "Correlation", 0.0, -0.99),
    ),
    "pareto": (
        ("prompt_tokens", "Prompt tokens", 100, 0),
        ("minimum_output_tokens", "Shortest output", 100, 1),
        ("tail_index", "Tail index", 3.5, 0.1),
        ("cap_tokens", "Cap, tokens", 100_000, 1),
    ),
    "fixed": (
        ("prompt_tokens", "Prompt tokens", 1000, 0),
        ("output_tokens", "Output tokens", 250, 1),
    ),
}


def ask_workload() -> dict[str, Any]:
    """The table ``[workload]``."""
    kind = st.segmented_control(
        "Kind of workload",
        (BUNDLED_KIND, TRACE_KIND, LAW_KIND),
        default=BUNDLED_KIND,
        required=True,
        key="form.workload",
        label_visibility="collapsed",
        width="stretch",
    )
    if kind == TRACE_KIND:
        return _ask_trace()
    if kind == LAW_KIND:
        return {"lengths": _ask_law()}
    return {
        "trace": st.selectbox(
            "Fitted to a public trace", BUNDLED, key="form.bundled", persist_state=KEEP
        )
    }


def _ask_trace() -> dict[str, Any]:
    upload = st.file_uploader(
        "Request trace",
        key="upload.trace",
        help="Packed files (.gz, .bz2, .xz, .zst) are unpacked. Known formats:\n\n"
        + "\n".join(f"- **{name}**: {text}" for name, text in FORMATS.items()),
    )
    path = st.text_input(
        "or its path on this machine",
        key="form.trace_path",
        persist_state=KEEP,
        placeholder="traces/conv.csv.gz",
    )
    skip_bad_rows = st.checkbox(
        "Leave out rows that break a rule",
        key="form.skip_bad_rows",
        persist_state=KEEP,
        help="They are counted and reported. Otherwise the first one is an error.",
    )
    with st.popover("How to read it", width="stretch"):
        how = _ask_how_to_read()
    if upload is not None:
        path = str(path_of(upload))
    return {"trace": path.strip(), "skip_bad_rows": skip_bad_rows, **how}


def _ask_how_to_read() -> dict[str, Any]:
    kind = st.selectbox("Format", (AUTO, *FORMATS), key="form.format", persist_state=KEEP)
    unit = st.selectbox(
        "Unit of arrival times",
        ("as the format says", *SECONDS_PER),
        key="form.time_unit",
        persist_state=KEEP,
    )
    columns = filled(
        **{
            role: st.text_input(
                f"Column of {label}",
                key=f"form.column_{role}",
                persist_state=KEEP,
                placeholder="guessed",
            )
            for role, label in (
                ("prompt", "prompt tokens"),
                ("output", "output tokens"),
                ("arrival", "arrival times"),
            )
        }
    )
    how: dict[str, Any] = {"format": kind}
    if unit in SECONDS_PER:
        how["time_unit"] = unit
    if columns:
        how["columns"] = columns
    return how


def _ask_law() -> dict[str, Any]:
    kind = st.selectbox(
        "Law of the lengths", tuple(LENGTH_LAWS), key="form.law", persist_state=KEEP
    )
    law: dict[str, Any] = {"kind": kind}
    columns = st.columns(2)
    for at, (name, label, default, least) in enumerate(LENGTH_LAWS[kind]):
        most = 0.99 if name == "correlation" else None
        law[name] = number(
            columns[at % 2], label, f"law_{kind}_{name}", default, least=least, most=most
        )
    return filled(**law)
