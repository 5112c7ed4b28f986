"""A saved run as its directory has it: the report as printed, and its pictures.

For runs that are no answer to the form's question: weights that shrink, replays on an engine.
"""

from __future__ import annotations

import streamlit as st

from dashboard.layout import show_warnings
from traces.record import RunRecord


def show_saved_report(record: RunRecord) -> None:
    """Report and pictures of a run directory; warnings, where no report has them."""
    report = record.files.get("report.txt")
    if report is None:
        show_warnings(record.summary)
    else:
        st.code(report.decode("utf-8", "replace").strip("\n"), language=None)
    for name, content in sorted(record.files.items()):
        if name.endswith(".png"):
            st.image(content, caption=name.removesuffix(".png"))
