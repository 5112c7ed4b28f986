"""The summary of an open-loop run: fates, rates, latencies and goodput over all replications."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.scenario import Slo
from twin.open_log import merge_gaps
from twin.open_loop import OpenLoopRun
from twin.open_loop_metrics import LATENCIES, TARGETS, Measured
from twin.output_statistics import batch_means, ratio_replications
from twin.simulation import estimate_summary
from twin.theory import Theory

FATES = ("injected", "completed", "running", "queued", "preparing")
CURVE_LEVELS = (*(0.01 * k for k in range(99)), 0.99, 0.995, 0.999, 1.0)
FEWEST_FOR_BATCH_MEANS = 200


def open_loop_summary(theory: Theory, measured: Sequence[Measured]) -> dict[str, Any]:
    """Every open-loop number, JSON-ready. Meanings: docs/metrics.md."""
    scenario, runs = theory.scenario, [one.run for one in measured]
    summary: dict[str, Any] = {
        "r": theory.r,
        "routing": scenario.routing.attention_worker,
        "replications": len(runs),
        "confidence": scenario.run.confidence,
        **{name: sum(getattr(run, name) for run in runs) for name in FATES},
        "beyond_horizon": sum(len(run.arrival_s) - run.injected for run in runs),
        "counted": sum(len(one.rows) for one in measured),
        "warm_up_requests": [one.window.first for one in measured],
        "windows": [_window_summary(one) for one in measured],
        "duration_s": float(np.mean([one.length_s for one in measured])),
        **_rates(theory, measured),
        "retries": sum(int(run.retries.sum()) for run in runs),
        "retried_tokens": sum(run.totals.retried_tokens for run in runs),
        "retry_wait_s": sum(run.totals.retry_wait_s for run in runs),
        "fault_s": sum(run.totals.fault_s for run in runs),
        "slo": {name: getattr(scenario.slo, name) for name in TARGETS},
        "latency": {name: _latency(name, measured, scenario.run.confidence) for name in LATENCIES},
        "goodput": _goodput(scenario.slo, measured, scenario.run.confidence),
    }
    summary["latency"]["itl_s"] = _gap_latency(runs, scenario.run.confidence)
    return summary


def _window_summary(one: Measured) -> dict[str, Any]:
    """What was measured of one replication, and where its requests were at the end."""
    return {
        "start_s": one.window.start_s,
        "end_s": one.window.end_s,
        "run_end_s": one.run.end_s,
        "arrived": one.arrived,
        "served": one.served,
        **{name: getattr(one.run, name) for name in FATES},
    }


def _rates(theory: Theory, measured: Sequence[Measured]) -> dict[str, Any]:
    """What was served and what was busy inside the windows, over all replications."""
    confidence = theory.scenario.run.confidence
    slots = theory.r * theory.bundle.batch_per_worker * theory.bundle.microbatches
    price = theory.bundle.price(theory.r)
    at_full_load = theory.at(theory.deciding.level, "throughput_per_instance", theory.r)
    capacity = at_full_load * price / theory.bundle.num_layers
    length_s = [one.length_s for one in measured]

    def per_s(amounts: Sequence[float]) -> float | None:
        return sum(amounts) / sum(length_s) if sum(length_s) > 0 else None

    def busy(name: str, units: int) -> float | None:
        share = per_s([getattr(one.sums, name) for one in measured])
        return None if share is None else min(1.0, share / units)

    def idle(name: str, units: int) -> float | None:
        share = busy(name, units)
        return None if share is None else 1.0 - share

    served = [float(one.served) for one in measured]
    tokens = [one.sums.tokens for one in measured]
    asked_for = [float(one.offered_tokens) for one in measured]
    offered = per_s(asked_for) if any(asked_for) else None
    return {
        "requests_per_s": per_s(served),
        "requests_per_s_interval": _ratio_interval(served, length_s, confidence),
        "output_tokens_per_s": per_s(tokens),
        "output_tokens_per_s_interval": _ratio_interval(tokens, length_s, confidence),
        "slot_utilisation": busy("slot_s", slots),
        "attention_idle": idle("attention_s", theory.r),
        "ffn_idle": idle("ffn_s", 1),
        "barrier_share": busy("barrier_wait_s", 1),
        "offered_tokens_per_s": offered,
        "capacity_tokens_per_s": capacity,
        "offered_share": None if offered is None else offered / capacity,
    }


def _ratio_interval(
    above: Sequence[float], below: Sequence[float], confidence: float
) -> dict[str, Any] | None:
    """Interval of a ratio of sums over replications; None for a single one."""
    if len(above) < 2 or sum(below) <= 0:
        return None
    return estimate_summary(ratio_replications(above, below, confidence=confidence))


def _latency(name: str, measured: Sequence[Measured], confidence: float) -> dict[str, Any] | None:
    pooled = np.concatenate([one.finite(name) for one in measured])
    if len(pooled) == 0:
        return None
    quantiles = np.quantile(pooled, CURVE_LEVELS)
    return {
        "mean": float(pooled.mean()),
        **_quantile_columns(pooled),
        "interval": _interval([one.finite(name) for one in measured], confidence),
        "quantile_levels": list(CURVE_LEVELS),
        "quantiles_s": [float(q) for q in quantiles],
    }


def _quantile_columns(values: NDArray[np.float64]) -> dict[str, float]:
    p50, p90, p99, largest = np.quantile(values, [0.5, 0.9, 0.99, 1.0])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(largest)}


def _interval(series: Sequence[NDArray[np.float64]], confidence: float) -> dict[str, Any] | None:
    """Interval of the mean: over replications, or by batch means within the only one."""
    if len(series) > 1:
        sums = [float(values.sum()) for values in series]
        return _ratio_interval(sums, [float(len(values)) for values in series], confidence)
    if len(series[0]) >= FEWEST_FOR_BATCH_MEANS:
        return estimate_summary(batch_means(series[0], confidence=confidence))
    return None


def _gap_latency(runs: Sequence[OpenLoopRun], confidence: float) -> dict[str, Any] | None:
    """All gaps of all replications, warm-up and unfinished requests included."""
    gaps = merge_gaps([run.gaps for run in runs])
    if len(gaps.gap_s) == 0:
        return None
    p50, p90, p99, largest = (float(v) for v in gaps.quantiles([0.5, 0.9, 0.99, 1.0]))
    return {
        "mean": gaps.mean_s,
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": largest,
        "interval": _ratio_interval(
            [run.gaps.total_s for run in runs],
            [float(run.gaps.num_gaps.sum()) for run in runs],
            confidence,
        ),
    }


def _goodput(slo: Slo, measured: Sequence[Measured], confidence: float) -> dict[str, Any] | None:
    targets = [
        f"{label} <= {value:g} s"
        for label, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
        if value is not None
    ]
    length_s = [one.length_s for one in measured]
    if not targets or sum(length_s) <= 0:
        return None
    served = [float(one.good_served(slo)) for one in measured]
    good = [float(one.good_arrivals(slo)) for one in measured]
    arrived = [float(one.arrived) for one in measured]
    return {
        "requests_per_s": sum(served) / sum(length_s),
        "requests_per_s_interval": _ratio_interval(served, length_s, confidence),
        "share": sum(good) / sum(arrived) if sum(arrived) else None,
        "share_interval": _ratio_interval(good, arrived, confidence),
        "arrived": int(sum(arrived)),
        "unfinished": int(sum(arrived)) - sum(len(one.rows) for one in measured),
        "targets": ", ".join(targets),
    }
