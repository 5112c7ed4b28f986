"""One prefix store experiment end to end: every system on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.prefix_settings import PREFIX_MODES, PrefixModeName, PrefixScenario, TracedWorkload
from models.scenario_file import scenario_tables
from models.strict_tables import ScenarioError
from policies.catalog import EVICTION
from traces.decisions import DecisionLog
from traces.environment import commit, versions
from traces.record import Columns
from twin.input_checksums import checksum
from twin.store.cluster import PrefixCluster
from twin.store.cluster_log import ClusterRun
from twin.store.deployment import build_deployment
from twin.store.modes import Mode, build_mode
from twin.store.requests import read_workload_trace, request_streams
from twin.store.summary import summarize

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixResult:
    """What one experiment found.

    Attributes:
        name: Short name for directories.
        scenario: The question.
        summary: JSON-ready: everything that is printed, drawn and saved.
        decisions: Calls of the store policies of the last pooled system, first stream, first
            replication, and their orders.
        requests: Column -> values, one row a request, system, stream and replication.
        timeseries: Column -> looks at every system and stream of the first replication.
    """

    name: str
    scenario: PrefixScenario
    summary: Mapping[str, Any]
    decisions: DecisionLog
    requests: Columns
    timeseries: Columns


def run_prefix(scenario: PrefixScenario, *, on_progress: OnProgress | None = None) -> PrefixResult:
    """Serve the scenario's requests under each of its systems.

    Raises:
        ScenarioError: If the scenario's parts do not fit together.
        TraceError: If the trace breaks a rule or has no prefix blocks.
        HfConfigError: If the model's configuration cannot be used.
    """
    if scenario.product.eviction not in EVICTION:
        raise ScenarioError(
            f"[product] eviction: must be one of {', '.join(map(repr, EVICTION))}, "
            f"found {scenario.product.eviction!r}"
        )
    deployment = build_deployment(scenario)
    settings = scenario.workload
    trace = read_workload_trace(settings) if isinstance(settings, TracedWorkload) else None
    modes = [build_mode(name, scenario) for name in scenario.prefix.modes]
    log = DecisionLog(max_calls=scenario.run.decision_log_calls)
    logged = _logged_mode(modes)
    runs: list[list[ClusterRun]] = []
    done = 0
    for replication in range(scenario.run.replications):
        streams = request_streams(scenario, replication, trace)
        total = scenario.run.replications * len(streams) * len(modes)
        of_replication = []
        for stream in streams:
            if stream.block_tokens * deployment.token_bytes > scenario.cluster.memory_bytes:
                raise ScenarioError(
                    "[cluster] memory_bytes: must hold at least one block of "
                    f"{stream.block_tokens * deployment.token_bytes:,} bytes, "
                    f"found {scenario.cluster.memory_bytes:,}"
                )
            for mode in modes:
                if on_progress is not None:
                    on_progress(f"{stream.name}, {mode.name}", done, total)
                is_logged = replication == 0 and stream is streams[0] and mode.name == logged
                cluster = PrefixCluster(deployment, mode, stream, log=log if is_logged else None)
                of_replication.append(cluster.run())
                done += 1
        runs.append(of_replication)
    summary = {
        "kind": "prefix",
        "scenario": scenario_tables(scenario),
        "seed": scenario.run.seed,
        "versions": versions(),
        "commit": commit(),
        "inputs": _inputs(scenario),
        **summarize(scenario, deployment, modes, runs, trace),
    }
    return PrefixResult(
        name=f"prefix-{_workload_name(scenario)}",
        scenario=scenario,
        summary=summary,
        decisions=log,
        requests=_request_table(runs),
        timeseries=_series_table(runs[0]),
    )


def _logged_mode(modes: Sequence[Mode]) -> PrefixModeName | None:
    """The system whose policy calls are written down: the richest one that pools memory."""
    pooled = [mode.name for mode in modes if mode.store is not None]
    return max(pooled, key=PREFIX_MODES.index) if pooled else None


def _workload_name(scenario: PrefixScenario) -> str:
    settings = scenario.workload
    if isinstance(settings, TracedWorkload):
        return Path(settings.trace).name.split(".")[0] or "trace"
    return settings.kind if settings.kind == "documents" else settings.generator


def _inputs(scenario: PrefixScenario) -> dict[str, str]:
    """Path -> sha256 of the files that were read."""
    files = []
    if isinstance(scenario.workload, TracedWorkload):
        files.append(Path(scenario.workload.trace))
    model = Path(scenario.llm.model)
    if model.is_file() or (model / "config.json").is_file():
        files.append(model if model.is_file() else model / "config.json")
    found = {}
    for path in files:
        try:
            found[str(path)] = checksum(path)
        except OSError:
            continue
    return found


def _request_table(runs: Sequence[Sequence[ClusterRun]]) -> Columns:
    columns: dict[str, list[Any]] = {}
    for replication, of_replication in enumerate(runs):
        for run in of_replication:
            count = len(run.requests["arrival_s"])
            labels = {
                "mode": np.full(count, run.mode),
                "stream": np.full(count, run.stream),
                "replication": np.full(count, replication),
            }
            for name, values in {**labels, **run.requests}.items():
                columns.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in columns.items()}


def _series_table(runs: Sequence[ClusterRun]) -> Columns:
    columns: dict[str, list[Any]] = {}
    for run in runs:
        count = len(run.series["time_s"])
        labels = {"mode": np.full(count, run.mode), "stream": np.full(count, run.stream)}
        for name, values in {**labels, **run.series}.items():
            columns.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in columns.items()}
