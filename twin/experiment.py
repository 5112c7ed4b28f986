"""One experiment end to end: workload, closed forms, simulation, and what they say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from models.scenario import Scenario
from models.scenario_file import scenario_tables
from models.strict_tables import ScenarioError
from models.workload import ResolvedWorkload, resolve_workload
from traces.decisions import DecisionLog
from traces.environment import commit, versions
from traces.record import Columns
from twin.faults import require_fits
from twin.input_checksums import input_checksums
from twin.kernel import is_available
from twin.open_loop_experiment import run_open_loop
from twin.saturated_run import SaturatedRun
from twin.simulation import Simulator, fault_events, simulated_ratios
from twin.stages import StageInterval
from twin.theory import Theory, solve_theory, theory_summary
from twin.theory_warnings import kv_warning

OnProgress = Callable[[str, int, int], None]

CYCLE_COLUMNS = (
    "cycle_end_s",
    "cycle_s",
    "max_load_tokens",
    "mean_load_tokens",
    "attention_max_s",
    "attention_mean_s",
    "ffn_s",
    "live_slots",
    "completed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentResult:
    """What one experiment found.

    Attributes:
        name: Short name for directories.
        summary: JSON-ready: everything that is printed, drawn and saved.
        theory: The closed forms, for callers that want arrays.
        decisions: Policy calls and orders.
        timeline: Stage intervals of the first cycles at the ratio in use.
        timeseries: Column name -> values of the first replication at the ratio in use: one row a
            cycle (saturated) or a sample of time (open loop).
        requests: Column name -> values, one row a request; None for a saturated run.
    """

    name: str
    summary: Mapping[str, Any]
    theory: Theory
    decisions: DecisionLog
    timeline: tuple[StageInterval, ...]
    timeseries: Columns
    requests: Columns | None = None


def run_experiment(
    scenario: Scenario,
    *,
    workload: ResolvedWorkload | None = None,
    on_progress: OnProgress | None = None,
) -> ExperimentResult:
    """Solve, simulate and compare.

    Args:
        scenario: The question.
        workload: Its workload, where the caller has read it already.
        on_progress: Told (label, done, total) now and then.

    Raises:
        TraceError: If the trace breaks a rule.
        ScenarioError: If the scenario and its workload do not fit together.
        InfeasibleError: If the limits cannot be met.
    """
    workload = workload or resolve_workload(scenario.workload, seed=scenario.run.seed)
    log = DecisionLog(max_calls=scenario.run.decision_log_calls)
    theory = solve_theory(scenario, workload, log)
    _require_workers(scenario, theory.r)
    summary: dict[str, Any] = {
        "scenario": scenario_tables(scenario),
        "seed": scenario.run.seed,
        "versions": versions(),
        "commit": commit(),
        "inputs": input_checksums(scenario),
        **theory_summary(theory),
    }
    if scenario.run.mode == "open_loop":
        answer = run_open_loop(theory, log, on_progress)
        summary["open_loop"] = answer.summary
        summary["warnings"] = [*summary["warnings"], *answer.warnings]
        return ExperimentResult(
            name=workload.name,
            summary=summary,
            theory=theory,
            decisions=log,
            timeline=answer.timeline,
            timeseries=answer.timeseries,
            requests=answer.requests,
        )
    first = _simulate(theory, summary, on_progress)
    return ExperimentResult(
        name=workload.name,
        summary=summary,
        theory=theory,
        decisions=log,
        timeline=first.timeline,
        timeseries={name: getattr(first, name) for name in CYCLE_COLUMNS},
    )


def _require_workers(scenario: Scenario, r: int) -> None:
    for fault in scenario.faults:
        if fault.worker is not None and fault.worker >= r:
            raise ScenarioError(
                f"[[faults]] worker: must be < r ({r}, the ratio in use), found {fault.worker}"
            )


def _simulate(
    theory: Theory, summary: dict[str, Any], on_progress: OnProgress | None
) -> SaturatedRun:
    """Add the saturated sections to ``summary``; returns the first run of the ratio in use."""
    run = theory.scenario.run
    ratios = _ratios(theory)
    total = run.replications * (
        len(ratios) + (3 if run.compare_routing else 0) + bool(theory.scenario.faults)
    )
    done = 0

    def on_run(label: str) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(label, done, max(total, done))

    simulator = Simulator(theory=theory, on_run=on_run)
    summary["simulation"] = simulator.points_summary(ratios)
    if run.compare_routing:
        summary["stragglers"] = simulator.stragglers_summary()
    if theory.scenario.faults:
        summary["faults"] = simulator.faults_summary()
    summary["load_distribution"] = simulator.load_distribution()
    summary["warnings"] = [*summary["warnings"], *_simulation_warnings(summary, simulator)]
    return simulator.point(theory.r).runs[0]


def _ratios(theory: Theory) -> list[int]:
    """The ratios to simulate, after the checks that need numba's presence and r."""
    if theory.scenario.run.engine == "compiled" and not is_available():
        raise ScenarioError(
            "[run] engine: 'compiled' needs numba: pip install 'serving-twin[fast]'"
        )
    try:
        require_fits(fault_events(theory.scenario.faults), theory.r)
    except ValueError as error:
        raise ScenarioError(f"[[faults]] {error}") from error
    try:
        return simulated_ratios(theory)
    except ValueError as error:
        raise ScenarioError(f"[run] {error}") from error


def _simulation_warnings(summary: Mapping[str, Any], simulator: Simulator) -> list[str]:
    theory = simulator.theory
    notes = dict.fromkeys(simulator.point(theory.r).runs[0].notes)
    is_chosen_here = theory.scenario.run.engine == "auto"
    warnings = [note for note in notes if not (is_chosen_here and note.endswith("as asked."))]
    fullest = max(int(run.max_load_tokens.max()) for run in simulator.point(theory.r).runs)
    warnings += kv_warning(theory, fullest)
    missed = [p["r"] for p in summary["simulation"]["points"] if not p["target_met"]]
    if missed:
        target = theory.scenario.run.target_relative_error
        warnings.append(
            f"standard error above {100 * target:g} % of the cycle at r = "
            f"{', '.join(map(str, missed))}: more replications or cycles are needed"
        )
    faults = summary.get("faults")
    if faults:
        late = [f for f in theory.scenario.faults if f.start_s >= faults["simulated_s"]]
        if late:
            warnings.append(
                f"{len(late)} fault(s) start after the {faults['simulated_s']:.3g} simulated "
                "seconds of a replication and never happened; raise run.num_cycles"
            )
        if any(f.kind == "lost" for f in theory.scenario.faults):
            warnings.append(
                f"requests restarted because their worker was lost: {faults['retries']}"
            )
    return warnings
