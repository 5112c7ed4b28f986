"""One paged-weight experiment end to end: the asked policy and others on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.precision_settings import PagedWeightScenario, PrecisionPolicyName
from models.scenario_file import scenario_tables
from models.streams import stream
from models.workload import ResolvedWorkload, resolve_workload, workload_summary
from models.workload_settings import TraceArrivals
from traces.decisions import DecisionLog
from traces.environment import commit, versions
from traces.record import Columns
from traces.workloads import BUNDLED
from twin.input_checksums import checksum
from twin.paged_weight_damage import MANIFEST, SYNTHETIC
from twin.paged_weight_engine import PagedWeightEngine, weights_of
from twin.paged_weight_log import PagedWeightRun
from twin.paged_weight_model import PagedWeightModel, build_model
from twin.paged_weight_summary import (
    capacity,
    comparison,
    deployment_summary,
    label,
    policy_summary,
    reference_damage,
    unfit_summary,
)
from twin.paged_weight_weights import DoesNotFitError

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedWeightResult:
    """What one experiment found.

    Attributes:
        name: Short name for directories.
        scenario: The question.
        summary: JSON-ready: everything that is printed, drawn and saved.
        decisions: Calls of the asked policy in its first replication, and its orders.
        requests: Column -> values, one row a request, policy and replication.
        timeseries: Column -> samples of the asked policy's first replication.
    """

    name: str
    scenario: PagedWeightScenario
    summary: Mapping[str, Any]
    decisions: DecisionLog
    requests: Columns
    timeseries: Columns


def run_paged_weight(
    scenario: PagedWeightScenario, *, on_progress: OnProgress | None = None
) -> PagedWeightResult:
    """Serve the scenario's requests under its policy, then under those it is compared with.

    Raises:
        TraceError: If the trace breaks a rule.
        ScenarioError: If the scenario's parts do not fit together.
        HfConfigError: If the model's configuration cannot be used.
    """
    model = build_model(scenario)
    workload = resolve_workload(scenario.workload, seed=scenario.run.seed)
    asked = scenario.precision.policy
    policies = [asked, *(p for p in dict.fromkeys(scenario.precision.compare) if p != asked)]
    log = DecisionLog(max_calls=scenario.run.decision_log_calls)
    reference_bits, reference = reference_damage(model)
    rows: list[dict[str, Any]] = []
    runs_by_policy: dict[PrecisionPolicyName, list[PagedWeightRun]] = {}
    for at, policy in enumerate(policies):
        if on_progress is not None:
            on_progress(label(policy), at, len(policies))
        try:
            runs = _runs(model, workload, policy, log if policy == asked else None)
        except DoesNotFitError as error:
            rows.append(unfit_summary(policy, str(error)))
            continue
        runs_by_policy[policy] = runs
        confidence = scenario.run.confidence
        row = policy_summary(
            policy, runs, reference=reference, slo=scenario.slo, confidence=confidence
        )
        if rows:
            row["asked_less_this"] = comparison(rows[0], row, confidence)
        rows.append(row)
    first = runs_by_policy.get(asked, [None])[0]
    summary = {
        "kind": "paged-weight",
        "scenario": scenario_tables(scenario),
        "seed": scenario.run.seed,
        "versions": versions(),
        "commit": commit(),
        "inputs": _inputs(scenario),
        "workload": workload_summary(workload),
        "deployment": deployment_summary(model),
        "capacity": capacity(model),
        "damage_unit_bits": reference_bits,
        "damage_source": (
            "synthetic" if scenario.precision.damage == SYNTHETIC else scenario.precision.damage
        ),
        "policies": rows,
        "series": {} if first is None else _thin(first.series, model.page_bytes, reference),
        "warnings": _warnings(scenario, rows),
    }
    return PagedWeightResult(
        name=f"paged-weight-{workload.name}",
        scenario=scenario,
        summary=summary,
        decisions=log,
        requests=_request_table(runs_by_policy),
        timeseries={} if first is None else dict(first.series),
    )


def _runs(
    model: PagedWeightModel,
    workload: ResolvedWorkload,
    policy: PrecisionPolicyName,
    log: DecisionLog | None,
) -> list[PagedWeightRun]:
    scenario = model.scenario
    runs = []
    for replication in range(scenario.run.replications):
        requests = workload.open_loop_requests(stream(scenario.run.seed, "arrivals", replication))
        first_log = log if replication == 0 else None
        engine = PagedWeightEngine(
            model,
            weights_of(model, policy, replication, log=first_log),
            requests,
            policy=label(policy),
            horizon_s=scenario.run.horizon_s,
            log=first_log,
        )
        runs.append(engine.run())
    return runs


def _inputs(scenario: PagedWeightScenario) -> dict[str, str]:
    """Path -> sha256 of the files that were read."""
    trace, model = scenario.workload.trace, Path(scenario.llm.model)
    files = []
    if scenario.workload.lengths is None and trace is not None and trace not in BUNDLED:
        files.append(Path(trace))
    if model.is_file() or (model / "config.json").is_file():
        files.append(model if model.is_file() else model / "config.json")
    if scenario.precision.damage != SYNTHETIC:
        damage = Path(scenario.precision.damage)
        files.append(damage / MANIFEST if damage.is_dir() else damage)
    found = {}
    for path in files:
        try:
            found[str(path)] = checksum(path)
        except OSError:
            continue
    return found


def _thin(
    series: Mapping[str, NDArray[np.float64]], page_bytes: int, reference: float
) -> dict[str, list[float]]:
    """The samples that are drawn, in bytes and in units of damage."""
    return {
        "time_s": series["time_s"].tolist(),
        "mean_bits": series["mean_bits"].tolist(),
        "damage": (series["damage"] / reference).tolist(),
        "weight_bytes": (series["weight_pages"] * page_bytes).tolist(),
        "kv_bytes": (series["kv_pages"] * page_bytes).tolist(),
        "free_bytes": (series["free_pages"] * page_bytes).tolist(),
        "running": series["running"].tolist(),
        "waiting": series["waiting"].tolist(),
    }


def _warnings(scenario: PagedWeightScenario, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    warnings = []
    estimated = [
        str(b) for b in (*range(2, 9), 16) if str(b) not in scenario.hardware.bandwidth_share
    ]
    if estimated:
        warnings.append(
            f"step times at {', '.join(estimated)} bits are static estimates (roofline times an "
            "assumed share); give measured shares in [hardware.bandwidth_share]"
        )
    if scenario.precision.damage == SYNTHETIC:
        warnings.append(
            "damage is synthetic (log-normal); give a quantized checkpoint in precision.damage"
        )
    for row in rows:
        if not row["fits"]:
            warnings.append(f"{row['label']}: {row['reason']}")
            continue
        if row["refused"]:
            warnings.append(
                f"{row['label']}: {row['refused']:,} requests are longer than the arena holds and "
                "were refused; its latencies are those of the others"
            )
        if row["unfinished"]:
            warnings.append(
                f"{row['label']}: {row['unfinished']:,} requests were not finished at the end and "
                "have no latencies"
            )
    settings = scenario.workload.arrivals
    if scenario.run.replications > 1 and (settings is None or isinstance(settings, TraceArrivals)):
        warnings.append(
            "a recorded trace is the same in every replication: intervals show what the drift of "
            "experts does, not what other requests would"
        )
    return warnings


def _request_table(runs_by_policy: Mapping[PrecisionPolicyName, list[PagedWeightRun]]) -> Columns:
    columns: dict[str, list[Any]] = {"policy": [], "replication": []}
    names = (
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "admitted_s",
        "first_token_s",
        "last_token_s",
        "ttft_s",
        "tpot_s",
        "e2e_s",
        "preemptions",
        "is_refused",
    )
    columns.update({name: [] for name in names})
    for policy, runs in runs_by_policy.items():
        for replication, run in enumerate(runs):
            count = len(run.arrival_s)
            columns["policy"].append(np.full(count, label(policy)))
            columns["replication"].append(np.full(count, replication))
            for name in names:
                columns[name].append(getattr(run, name))
    return {
        name: np.concatenate(values) if values else np.zeros(0) for name, values in columns.items()
    }
