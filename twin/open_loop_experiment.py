"""An open-loop scenario: its replications, what they warn of, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.streams import stream
from models.workload_settings import TraceArrivals
from policies.catalog import routing_policy
from traces.decisions import DecisionLog
from traces.record import Columns
from twin.logged_routing import LoggedRouting
from twin.open_loop import OpenLoopRun, simulate_open_loop
from twin.open_loop_metrics import Measured
from twin.open_loop_summary import open_loop_summary
from twin.simulation import fault_events
from twin.stages import StageInterval
from twin.theory import Theory
from twin.theory_warnings import kv_warning

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoopAnswer:
    """What an open-loop scenario found.

    Attributes:
        summary: JSON-ready.
        warnings: What limits the numbers.
        timeline: Stage intervals of the first steps of the first replication.
        requests: Column name -> values, one row a request, all replications.
        timeseries: Column name -> values of the first replication over time.
    """

    summary: dict[str, Any]
    warnings: tuple[str, ...]
    timeline: tuple[StageInterval, ...]
    requests: Columns
    timeseries: Columns


def run_open_loop(
    theory: Theory, log: DecisionLog, on_progress: OnProgress | None = None
) -> OpenLoopAnswer:
    """Replay or generate the arrivals on the ratio in use.

    Raises:
        ScenarioError: If the workload has no arrival times and none are configured.
    """
    is_recorded = _is_recorded(theory)
    count = 1 if is_recorded else theory.scenario.run.replications
    runs = [_replication(theory, log, n, count, on_progress) for n in range(count)]
    measured = [Measured(run, cut_warm_up=not is_recorded) for run in runs]
    summary = open_loop_summary(theory, measured)
    summary["is_recorded"] = is_recorded
    return OpenLoopAnswer(
        summary=summary,
        warnings=_warnings(theory, summary, runs),
        timeline=runs[0].timeline,
        requests=_request_table(runs),
        timeseries=_series_table(runs[0]),
    )


def _is_recorded(theory: Theory) -> bool:
    """Whether arrivals and lengths are those of a trace: then every replication is the same."""
    settings = theory.workload.settings.arrivals
    return theory.workload.trace is not None and (
        settings is None or isinstance(settings, TraceArrivals)
    )


def _replication(
    theory: Theory,
    log: DecisionLog,
    replication: int,
    count: int,
    on_progress: OnProgress | None,
) -> OpenLoopRun:
    scenario, seed = theory.scenario, theory.scenario.run.seed
    requests = theory.workload.open_loop_requests(stream(seed, "arrivals", replication))
    name = scenario.routing.attention_worker
    policy = routing_policy(name, stream(seed, "routing", replication))
    if replication == 0:
        log.policies["routing"] = {
            "kind": "routing",
            "name": name,
            "seed": seed,
            "stream": "routing",
            "replication": replication,
        }
        policy = LoggedRouting(policy, log)
    total = len(requests.arrival_s)

    def report(done: int) -> None:
        if on_progress is not None:
            on_progress("requests", replication * total + done, count * total)

    return simulate_open_loop(
        theory.bundle,
        theory.r,
        requests.arrival_s,
        requests.prompt_tokens,
        requests.output_tokens,
        seed=seed,
        replication=replication,
        routing=policy,
        faults=fault_events(scenario.faults),
        prefill_s_per_token=scenario.prefill.s_per_token,
        prefill_base_s=scenario.prefill.base_s,
        horizon_s=scenario.run.horizon_s,
        on_progress=report,
        timeline_cycles=scenario.run.timeline_cycles if replication == 0 else 0,
    )


def _warnings(
    theory: Theory, summary: dict[str, Any], runs: Sequence[OpenLoopRun]
) -> tuple[str, ...]:
    warnings = list(dict.fromkeys(note for run in runs for note in run.notes))
    fullest = max((point.max_load_tokens for run in runs for point in run.series), default=0)
    warnings += kv_warning(theory, fullest)
    unfinished = summary["running"] + summary["queued"] + summary["preparing"]
    if unfinished:
        warnings.append(
            f"{unfinished:,} of {summary['injected']:,} requests were not finished at the end: "
            "latencies are those of the completed ones and look better than they are"
        )
    if summary["completed"] == 0:
        warnings.append("no request was completed: there are no latencies to report")
    share = summary["offered_share"]
    if share is not None and share >= 1.0:
        warnings.append(
            f"overloaded: the trace asks for {100 * share:.0f} % of what r = {theory.r} can serve; "
            "the queue grows as long as requests arrive"
        )
    if summary["is_recorded"] and theory.scenario.run.replications > 1:
        warnings.append(
            "a recorded trace is replayed once: intervals come from batch means, "
            "run.replications is not used"
        )
    if summary["beyond_horizon"]:
        warnings.append(
            f"{summary['beyond_horizon']:,} requests had not arrived by the horizon of "
            f"{theory.scenario.run.horizon_s:g} s and are not part of the run"
        )
    end_to_end = summary["latency"]["e2e_s"]
    if end_to_end and summary["duration_s"] < end_to_end["p99"]:
        warnings.append(
            f"the measured window of {summary['duration_s']:.3g} s is shorter than slow requests "
            f"last (p99 end to end {end_to_end['p99']:.3g} s): rates may be those of a bundle that "
            "still fills up; more requests are needed"
        )
    skipped = summary["warm_up_requests"]
    if any(skipped):
        warnings.append(
            f"warm-up: the first {max(skipped):,} requests (at most, MSER-5) are left out of "
            "latencies, and rates count from the arrival of the next one"
        )
    return tuple(warnings)


def _request_table(runs: Sequence[OpenLoopRun]) -> Columns:
    columns: dict[str, NDArray[Any]] = {
        "replication": np.repeat(
            [run.replication for run in runs], [len(run.arrival_s) for run in runs]
        )
    }
    for name in (
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "ready_s",
        "admitted_s",
        "first_token_s",
        "last_token_s",
        "ttft_s",
        "tpot_s",
        "e2e_s",
        "queue_s",
        "worker",
        "retries",
    ):
        columns[name] = np.concatenate([getattr(run, name) for run in runs])
    return columns


def _series_table(run: OpenLoopRun) -> Columns:
    names = ("time_s", "queue_length", "live_slots", "load_tokens", "max_load_tokens", "step_s")
    return {name: np.asarray([getattr(point, name) for point in run.series]) for name in names}
