"""Saved runs that are no answer to the form: their report and pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traces.record import RunRecord, write_run

pytest.importorskip("streamlit")
from streamlit.testing.v1 import AppTest

APP = str(Path(__file__).parents[2] / "dashboard" / "app.py")


def test_a_saved_replay_shows_its_report(tmp_path: Path) -> None:
    summary = {
        "kind": "runtime-replay",
        "scenario": {"workload": {"trace": "azure-2023-conversation"}, "llm": {"model": "m"}},
        "seed": 7,
        "versions": {"numpy": np.__version__},
        "commit": None,
        "workload": {"name": "azure-2023-conversation"},
        "policies": [{"label": "hull"}],
        "warnings": [],
    }
    record = RunRecord(summary=summary, files={"report.txt": b"Latency of 12 answers\n"})
    write_run(tmp_path / "run", record)
    page = AppTest.from_file(APP, default_timeout=120)
    page.session_state["source"] = "Saved run"
    page.session_state["saved.path"] = str(tmp_path / "run")
    page.run()
    assert not page.exception
    assert [code.value for code in page.code] == ["Latency of 12 answers"]
    assert any("seed 7" in caption.value for caption in page.caption)
