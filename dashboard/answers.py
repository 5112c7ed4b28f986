"""Calls into the twin, each answer remembered by its question."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.uploads import without_folder
from models.scenario import Scenario
from models.scenario_file import scenario_toml
from models.workload import ResolvedWorkload, resolve_workload
from models.workload_settings import Workload
from twin.experiment import OnProgress, run_experiment
from twin.theory import solve_theory, theory_summary

INPUT_ERRORS = (ValueError, MemoryError)
"""What a question can be refused with; readers, models and policies raise kinds of ValueError
whose messages are for the person at the screen."""

Summary = Mapping[str, Any]


def closed_forms(scenario: Scenario) -> Summary:
    """What ``twin theory --json`` prints for the scenario.

    Raises:
        One of ``INPUT_ERRORS``.
    """
    summary: Summary = _closed_forms(question_key(scenario), scenario)
    return summary


def simulated(scenario: Scenario) -> Summary | None:
    """The summary of an earlier ``simulate`` of the same question, or None."""
    return _simulations().get(question_key(scenario))


def simulate(scenario: Scenario, on_progress: OnProgress) -> Summary:
    """What ``twin run --json`` prints for the scenario, but for the run directory.

    Raises:
        One of ``INPUT_ERRORS``.
    """
    result = run_experiment(scenario, workload=_resolved(scenario), on_progress=on_progress)
    _simulations().put(question_key(scenario), result.summary)
    return result.summary


def question_key(scenario: Scenario) -> str:
    """Equal for equal questions: the scenario, and the state of the files that it names."""
    files = (scenario.workload.trace, scenario.attention_ffn.calibration)
    return scenario_toml(scenario) + "".join(_file_state(name) for name in files)


def summary_json(summary: Summary) -> str:
    """The summary as the command line prints it; uploads are called by their name alone."""
    return without_folder(json.dumps(summary, indent=2, allow_nan=False)) + "\n"


def _file_state(name: str | None) -> str:
    path = Path(name or "")
    if not name or not path.exists():
        return ""
    state = path.stat()
    return f"# {name} {state.st_size} {state.st_mtime_ns}\n"


@st.cache_data(max_entries=64, show_spinner=False)
def _closed_forms(key: str, _scenario: Scenario) -> dict[str, Any]:
    return theory_summary(solve_theory(_scenario, _resolved(_scenario)))


def _resolved(scenario: Scenario) -> ResolvedWorkload:
    settings, seed = scenario.workload, scenario.run.seed
    key = f"{settings!r} {seed} {_file_state(settings.trace)}"
    workload: ResolvedWorkload = _workload(key, settings, seed)
    return workload


@st.cache_resource(max_entries=8, show_spinner=False)
def _workload(key: str, _settings: Workload, _seed: int) -> ResolvedWorkload:
    return resolve_workload(_settings, seed=_seed)


class _Remembered:
    """The last few summaries by question, for all open pages."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._summaries: OrderedDict[str, Summary] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Summary | None:
        with self._lock:
            if key in self._summaries:
                self._summaries.move_to_end(key)
            return self._summaries.get(key)

    def put(self, key: str, summary: Summary) -> None:
        with self._lock:
            self._summaries[key] = summary
            while len(self._summaries) > self._max_entries:
                self._summaries.popitem(last=False)


@st.cache_resource(show_spinner=False)
def _simulations() -> _Remembered:
    return _Remembered(max_entries=32)
