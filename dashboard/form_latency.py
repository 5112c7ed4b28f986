"""The part of the form about the latency of attention, FFN and the transfer between them."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard.fields import KEEP, number
from dashboard.questions import filled
from dashboard.uploads import path_of
from models.calibration import NAMED, load_calibration
from models.scenario import SECONDS_PER
from twin.theory import DEFAULT_CALIBRATION

COEFFICIENTS, CALIBRATION_FILE = "six coefficients", "calibration file"


def ask_latency() -> dict[str, Any]:
    """The keys of ``[attention_ffn]`` that say how long a stage takes."""
    source = st.selectbox(
        "Calibration", (*NAMED, COEFFICIENTS, CALIBRATION_FILE), key="form.calibration"
    )
    if source == COEFFICIENTS:
        return {"coefficients": _ask_coefficients(), "num_layers": _ask_layers()}
    if source == CALIBRATION_FILE:
        return {"calibration": _ask_calibration_file()}
    return {} if source == DEFAULT_CALIBRATION else {"calibration": source}


def _ask_coefficients() -> dict[str, Any]:
    """Time per layer of a stage: alpha times its tokens or requests, plus beta."""
    known = load_calibration(DEFAULT_CALIBRATION).coefficients
    unit = st.selectbox("Unit", tuple(SECONDS_PER), index=2, key="form.unit", persist_state=KEEP)
    table: dict[str, Any] = {"unit": unit}
    left, right = st.columns(2)
    for stage, called, what in (
        ("attention", "attention", "KV token"),
        ("ffn", "FFN", "request"),
        ("communication", "transfer", "request"),
    ):
        for column, name, label in (
            (left, f"alpha_{stage}", f"{called}, per {what}"),
            (right, f"beta_{stage}", f"{called}, fixed"),
        ):
            known_us = float(f"{getattr(known, name) / SECONDS_PER['us']:.9g}")
            table[name] = number(column, label, name, known_us, least=0.0, empty="")
    table["communication"] = st.selectbox(
        "A transfer's batch is that of",
        ("worker", "bundle"),
        key="form.communication",
        persist_state=KEEP,
        help="Communication time grows with B of one worker, or with r B of the bundle.",
    )
    return filled(**table)


def _ask_layers() -> int | None:
    known = load_calibration(DEFAULT_CALIBRATION).num_layers
    layers: int | None = number(
        st.container(), "Layers of the model", "num_layers", known, least=1, most=10_000
    )
    return layers


def _ask_calibration_file() -> str:
    upload = st.file_uploader("Calibration (JSON)", key="upload.calibration")
    path = st.text_input(
        "or its path on this machine", key="form.calibration_path", persist_state=KEEP
    )
    if upload is not None:
        return str(path_of(upload))
    return path.strip()
