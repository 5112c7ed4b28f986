"""The numbers of a replay, JSON-ready, under the names that the twin gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.scenario import Slo
from runtime.replay_requests import ReplayRequests
from runtime.replay_run import SERIES, ReplayRun
from traces.record import Columns

Floats = NDArray[np.float64]
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
DRAWN = 1000


def request_table(requests: ReplayRequests, run: ReplayRun, label: str) -> Columns:
    """One row a request: the columns of the twin, then those that only an engine knows."""
    fates, count = run.fates, len(requests)
    latencies = request_latencies(requests, run)
    return {
        "policy": np.full(count, label),
        "replication": np.zeros(count, dtype=np.int64),
        "arrival_s": run.arrival_s,
        "prompt_tokens": requests.prompt_tokens,
        "output_tokens": requests.output_tokens,
        "admitted_s": fates.admitted_s,
        "first_token_s": fates.first_token_s,
        "last_token_s": fates.last_token_s,
        **latencies,
        "preemptions": fates.preemptions,
        "is_refused": np.array([bool(error) for error in fates.errors]),
        "planned_arrival_s": requests.arrival_s,
        "added_s": fates.added_s,
        "asked_prompt_tokens": requests.asked_prompt_tokens,
        "asked_output_tokens": requests.asked_output_tokens,
        "generated_tokens": fates.generated_tokens,
        "cached_tokens": fates.cached_tokens,
        "session": requests.session,
        "follows": requests.follows,
        "think_s": requests.think_s,
        "error": np.array(fates.errors, dtype=object),
    }


def request_latencies(requests: ReplayRequests, run: ReplayRun) -> dict[str, Floats]:
    """[n] TTFT, TPOT (mean gap between tokens, NaN for one token) and end to end, in seconds."""
    fates = run.fates
    gaps = np.where(requests.output_tokens > 1, requests.output_tokens - 1, 1)
    span = fates.last_token_s - fates.first_token_s
    return {
        "ttft_s": fates.first_token_s - run.arrival_s,
        "tpot_s": np.where(requests.output_tokens > 1, span / gaps, np.nan),
        "e2e_s": fates.last_token_s - run.arrival_s,
    }


def run_row(
    requests: ReplayRequests,
    run: ReplayRun,
    *,
    policy: str | int,
    label: str,
    reference: float,
    slo: Slo,
) -> dict[str, Any]:
    """One row of the table of policies, as ``twin run`` has it, with the same keys.

    Args:
        requests, run: What was asked and what came of it.
        policy: Planner or width.
        label: What reports call it.
        reference: Damage that is reported as 1; 0: none is known.
        slo: Targets.
    """
    fates, totals = run.fates, run.totals
    latencies = request_latencies(requests, run)
    arrived = np.isfinite(run.arrival_s)
    served = np.isfinite(fates.last_token_s)
    first = float(np.nanmin(run.arrival_s)) if arrived.any() else 0.0
    span = run.end_s - first
    busy = totals.busy_s
    generated = int(fates.generated_tokens.sum())
    return {
        "policy": policy,
        "label": label,
        "fits": True,
        "replications": 1,
        "arrived": int(arrived.sum()),
        "served": int(served.sum()),
        "refused": fates.num_failed,
        "unfinished": int(arrived.sum()) - int(served.sum()) - fates.num_failed,
        "requests_per_s": _per_s(int(served.sum()), span),
        "requests_per_s_interval": None,
        "output_tokens_per_s": _per_s(generated, span),
        "prompt_tokens_per_s": _per_s(int(requests.prompt_tokens[served].sum()), span),
        "makespan_s": run.end_s,
        "latency": {name: _latency(values) for name, values in latencies.items()},
        "ttft_mean_interval": None,
        "good_share": _good_share(latencies, served, int(arrived.sum()), slo),
        "preemptions": int(run.counters.get("preemptions_total", fates.preemptions.sum()) or 0),
        "held_back": run.counters.get("held_back", 0),
        "kv_tokens_peak": totals.kv_tokens_peak,
        "kv_pages_peak": totals.kv_pages_peak,
        "running_mean": totals.running_s / busy if busy else 0.0,
        "running_peak": totals.running_peak,
        "steps": totals.steps,
        "busy_s": busy,
        "mean_bits": totals.bits_s / busy if busy and totals.first_bits else None,
        "least_bits": totals.least_bits,
        "first_bits": totals.first_bits,
        "last_bits": totals.last_bits,
        "bits_at_first_preemption": _known(totals.bits_at_first_preemption),
        "first_preemption_s": _known(totals.first_preemption_s),
        "damage": totals.damage_s / busy / reference if busy and reference else None,
        "moved_bytes": run.counters.get("moved_bytes_total", 0),
        "decisions": run.counters.get("planner_moves", {}),
        "cached_tokens": int(fates.cached_tokens.sum()),
        "cached_share": (
            float(fates.cached_tokens.sum() / requests.prompt_tokens[served].sum())
            if served.any()
            else None
        ),
        "generated_tokens": generated,
    }


def request_counts(requests: ReplayRequests, run: ReplayRun) -> dict[str, Any]:
    """What was asked, what was cut to fit the model, and what is not finished."""
    return {
        "requests": len(requests),
        "sent": int(np.isfinite(run.fates.added_s).sum()),
        "mean_prompt_tokens": float(requests.prompt_tokens.mean()),
        "mean_output_tokens": float(requests.output_tokens.mean()),
        "cut_prompts": requests.cut_prompts,
        "cut_outputs": requests.cut_outputs,
        "cut_tokens": requests.cut_tokens,
        "sessions": int(requests.session.max(initial=-1)) + 1,
        "following_turns": int((requests.follows >= 0).sum()),
        "with_blocks": requests.block_ids is not None,
        "was_stopped": run.was_stopped,
    }


def drawn_series(
    columns: Mapping[str, Floats], *, page_bytes: int, reference: float
) -> dict[str, list[float]]:
    """At most ``DRAWN`` samples of what is drawn, in bytes and in units of damage."""
    length = len(columns["time_s"])
    if not length:
        return {}
    kept = np.unique(np.linspace(0, length - 1, min(length, DRAWN)).astype(np.int64))
    series = {name: columns[name][kept] for name in SERIES}
    return {
        "time_s": series["time_s"].tolist(),
        "mean_bits": series["mean_bits"].tolist(),
        "damage": (series["damage"] / reference).tolist() if reference else [],
        "weight_bytes": (series["weight_pages"] * page_bytes).tolist(),
        "kv_bytes": (series["kv_pages"] * page_bytes).tolist(),
        "free_bytes": (series["free_pages"] * page_bytes).tolist(),
        "running": series["running"].tolist(),
        "waiting": series["waiting"].tolist(),
    }


def warnings_of(requests: ReplayRequests, run: ReplayRun) -> list[str]:
    """What limits the figures, one sentence each."""
    warnings = list(requests.notes)
    if requests.cut_tokens:
        warnings.append(
            f"{requests.cut_prompts:,} prompts and {requests.cut_outputs:,} answers were cut to "
            f"fit the model, by {requests.cut_tokens:,} tokens"
        )
    if run.fates.num_failed:
        example = next(error for error in run.fates.errors if error)
        warnings.append(f"{run.fates.num_failed:,} requests got an error, such as: {example}")
    if run.was_stopped:
        left = int((~np.isfinite(run.fates.last_token_s)).sum()) - run.fates.num_failed
        warnings.append(f"stopped before its end: {left:,} requests have no complete answer")
    short = np.isfinite(run.fates.last_token_s) & (
        run.fates.generated_tokens < requests.output_tokens
    )
    if short.any():
        warnings.append(f"{int(short.sum()):,} answers are shorter than asked for")
    return warnings


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _per_s(count: int, span_s: float) -> float:
    return count / span_s if span_s > 0 else 0.0


def _latency(values: Floats) -> dict[str, float] | None:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    found = np.quantile(finite, list(QUANTILES.values()))
    return {"mean": float(finite.mean()), **dict(zip(QUANTILES, found.tolist(), strict=True))}


def _good_share(
    latencies: Mapping[str, Floats], served: NDArray[np.bool_], arrived: int, slo: Slo
) -> float | None:
    """Share of the requests that arrived and were served within every target."""
    targets = {name: getattr(slo, name) for name in LATENCIES if getattr(slo, name) is not None}
    if not targets or not arrived:
        return None
    good = served.copy()
    for name, target in targets.items():
        good &= np.isnan(latencies[name]) | (latencies[name] <= target)
    return float(good.sum() / arrived)
