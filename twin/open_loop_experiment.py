"""An open-loop scenario: replications, latency tables, goodput, load against capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.scenario import Slo
from models.streams import stream
from models.workload_settings import TraceArrivals
from policies.catalog import routing_policy
from traces.decisions import DecisionLog
from traces.record import Columns
from twin.logged_routing import LoggedRouting
from twin.open_loop import OpenLoopRun, simulate_open_loop
from twin.output_statistics import batch_means, mser5, replications
from twin.simulation import estimate_summary, fault_events
from twin.stages import StageInterval
from twin.theory import Theory, kv_warning

LATENCIES = ("queue_s", "ttft_s", "tpot_s", "e2e_s")
CURVE_LEVELS = (*(0.01 * k for k in range(99)), 0.99, 0.995, 0.999, 1.0)
FEWEST_FOR_BATCH_MEANS = 200

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
    first = [0 if is_recorded else _warm_up(run) for run in runs]
    kept = [_Kept(run, skip) for run, skip in zip(runs, first, strict=True)]
    summary = _summary(theory, runs, kept)
    summary["is_recorded"] = is_recorded
    summary["warm_up_requests"] = first
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


def _warm_up(run: OpenLoopRun) -> int:
    """Requests that a run from an empty bundle needs before it is as usual (MSER-5 on TTFT)."""
    series = run.ttft_s[np.isfinite(run.ttft_s)]
    return mser5(series).first if len(series) >= FEWEST_FOR_BATCH_MEANS else 0


class _Kept:
    """The completed requests of one run past its warm-up."""

    def __init__(self, run: OpenLoopRun, first: int) -> None:
        done = np.isfinite(run.last_token_s)
        done[:first] = False
        self.rows = np.flatnonzero(done)
        self.values = {name: getattr(run, name)[self.rows] for name in LATENCIES}
        self.output_tokens = run.output_tokens[self.rows]
        self.duration_s = run.end_s - (float(run.arrival_s[first]) if first else 0.0)

    def good(self, slo: Slo) -> NDArray[np.bool_]:
        """Which of them meet every target; a request of one token has no TPOT to miss."""
        meets = np.ones(len(self.rows), dtype=np.bool_)
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            target = getattr(slo, name)
            if target is not None:
                value = self.values[name]
                meets &= np.isnan(value) | (value <= target)
        return meets


def _summary(theory: Theory, runs: Sequence[OpenLoopRun], kept: Sequence[_Kept]) -> dict[str, Any]:
    slo, confidence = theory.scenario.slo, theory.scenario.run.confidence
    duration_s = sum(one.duration_s for one in kept)
    completed = sum(len(one.rows) for one in kept)
    tokens = sum(int(one.output_tokens.sum()) for one in kept)
    first = runs[0]
    slots = theory.r * theory.bundle.batch_per_worker * theory.bundle.microbatches
    summary: dict[str, Any] = {
        "r": theory.r,
        "routing": theory.scenario.routing.attention_worker,
        "replications": len(runs),
        "injected": sum(run.injected for run in runs),
        "completed": sum(run.completed for run in runs),
        "running": sum(run.running for run in runs),
        "queued": sum(run.queued for run in runs),
        "preparing": sum(run.preparing for run in runs),
        "counted": completed,
        "duration_s": duration_s,
        "requests_per_s": completed / duration_s if duration_s > 0 else None,
        "output_tokens_per_s": tokens / duration_s if duration_s > 0 else None,
        "slot_utilisation": _mean_live_slots(first) / slots,
        "attention_idle": first.attention_idle,
        "ffn_idle": first.ffn_idle,
        "barrier_share": first.totals.barrier_wait_s / first.end_s if first.end_s else None,
        "retries": sum(int(run.retries.sum()) for run in runs),
        "retried_tokens": sum(run.totals.retried_tokens for run in runs),
        "retry_wait_s": sum(run.totals.retry_wait_s for run in runs),
        "fault_s": sum(run.totals.fault_s for run in runs),
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s},
        "latency": {name: _latency(name, kept, confidence) for name in LATENCIES},
        "goodput": _goodput(slo, kept, duration_s),
    }
    summary["latency"]["itl_s"] = _gap_latency(first)
    summary.update(_offered(theory, first))
    return summary


def _latency(name: str, kept: Sequence[_Kept], confidence: float) -> dict[str, Any] | None:
    pooled = np.concatenate([one.values[name] for one in kept])
    pooled = pooled[np.isfinite(pooled)]
    if len(pooled) == 0:
        return None
    quantiles = np.quantile(pooled, CURVE_LEVELS)
    return {
        "mean": float(pooled.mean()),
        **_quantile_columns(pooled),
        "interval": _interval(name, kept, confidence),
        "quantile_levels": list(CURVE_LEVELS),
        "quantiles_s": [float(q) for q in quantiles],
    }


def _quantile_columns(values: NDArray[np.float64]) -> dict[str, float]:
    p50, p90, p99, largest = np.quantile(values, [0.5, 0.9, 0.99, 1.0])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(largest)}


def _interval(name: str, kept: Sequence[_Kept], confidence: float) -> dict[str, Any] | None:
    """Interval of the mean: over replications, or by batch means within the only one."""
    series = [one.values[name][np.isfinite(one.values[name])] for one in kept]
    if len(series) > 1 and all(len(values) for values in series):
        means = [float(values.mean()) for values in series]
        return estimate_summary(replications(means, confidence=confidence))
    if len(series[0]) >= FEWEST_FOR_BATCH_MEANS:
        return estimate_summary(batch_means(series[0], confidence=confidence))
    return None


def _gap_latency(run: OpenLoopRun) -> dict[str, Any] | None:
    if len(run.gaps.gap_s) == 0:
        return None
    p50, p90, p99, largest = (float(v) for v in run.gaps.quantiles([0.5, 0.9, 0.99, 1.0]))
    return {"mean": run.gaps.mean_s, "p50": p50, "p90": p90, "p99": p99, "max": largest}


def _goodput(slo: Slo, kept: Sequence[_Kept], duration_s: float) -> dict[str, Any] | None:
    targets = [
        f"{label} <= {value:g} s"
        for label, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
        if value is not None
    ]
    if not targets or duration_s <= 0:
        return None
    good = sum(int(one.good(slo).sum()) for one in kept)
    completed = sum(len(one.rows) for one in kept)
    return {
        "requests_per_s": good / duration_s,
        "share": good / completed if completed else None,
        "targets": ", ".join(targets),
    }


def _mean_live_slots(run: OpenLoopRun) -> float:
    """Time-weighted mean of filled slots, from the sampled series."""
    if len(run.series) < 2:
        return float(run.series[0].live_slots) if run.series else 0.0
    time_s = np.asarray([point.time_s for point in run.series])
    live = np.asarray([point.live_slots for point in run.series], dtype=np.float64)
    return float(np.sum(live[1:] * np.diff(time_s)) / (time_s[-1] - time_s[0]))


def _offered(theory: Theory, run: OpenLoopRun) -> dict[str, Any]:
    """Output tokens asked for per second, beside what the ratio can serve when saturated."""
    span_s = float(run.arrival_s[-1] - run.arrival_s[0]) if len(run.arrival_s) > 1 else 0.0
    offered = float(run.output_tokens.sum()) / span_s if span_s > 0 else None
    price = theory.bundle.price(theory.r)
    at_full_load = theory.at(theory.deciding.level, "throughput_per_instance", theory.r)
    capacity = at_full_load * price / theory.bundle.num_layers
    return {
        "offered_tokens_per_s": offered,
        "capacity_tokens_per_s": capacity,
        "offered_share": None if offered is None else offered / capacity,
    }


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
    skipped = summary["warm_up_requests"]
    if any(skipped):
        warnings.append(
            f"warm-up: the first {max(skipped):,} requests (at most, MSER-5) are left out of "
            "latencies and rates"
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
