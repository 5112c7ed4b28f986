"""The numbers of a paged-weight experiment, policy by policy. JSON-ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.kv_bytes import kv_token_bytes, kv_tokens_in_pages
from models.moe_step_time import FULL_BITS
from models.precision_settings import PrecisionPolicyName
from models.scenario import Slo
from models.weight_memory import full_expert_bytes, other_bytes
from twin.comparisons import paired_difference
from twin.output_statistics import replications
from twin.paged_weight_log import PagedWeightRun
from twin.paged_weight_model import PagedWeightModel

Floats = NDArray[np.float64]

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
REFERENCE_BITS = 4


def label(policy: PrecisionPolicyName) -> str:
    """What reports call a policy."""
    return f"{policy} bits" if isinstance(policy, int) else policy


def reference_damage(model: PagedWeightModel) -> tuple[int, float]:
    """A width (4, or the nearest there is) and the damage of all blocks at it: the unit of damage.

    Under the long-run popularity of experts.
    """
    levels = model.scenario.precision.levels
    bits = min(levels, key=lambda width: abs(width - REFERENCE_BITS))
    return bits, float(model.damage[:, bits - 2].sum())


def policy_summary(
    policy: PrecisionPolicyName,
    runs: Sequence[PagedWeightRun],
    *,
    reference: float,
    slo: Slo,
    confidence: float,
) -> dict[str, Any]:
    """One policy over its replications.

    Rates count what was finished between the first and the last arrival; latencies are those of
    all requests that were served, damage and bits are means over the time of all steps.
    """
    totals = [run.totals for run in runs]
    busy = sum(total.busy_s for total in totals)
    tokens = sum(total.generated_tokens for total in totals)
    served = [int(np.isfinite(run.last_token_s).sum()) for run in runs]
    refused = sum(int(run.is_refused.sum()) for run in runs)
    arrived = [int((run.arrival_s <= run.end_s).sum()) for run in runs]
    rate = [_served_per_s(run) for run in runs]
    ttft = [_mean(run.ttft_s) for run in runs]
    return {
        "policy": policy,
        "label": label(policy),
        "fits": True,
        "replications": len(runs),
        "arrived": sum(arrived),
        "served": sum(served),
        "refused": refused,
        "unfinished": sum(arrived) - sum(served) - refused,
        "requests_per_s": float(np.mean(rate)),
        "requests_per_s_interval": _interval(rate, confidence),
        "output_tokens_per_s": float(np.mean([_tokens_per_s(run) for run in runs])),
        "makespan_s": float(np.mean([run.end_s for run in runs])),
        "latency": {name: _latency([getattr(run, name) for run in runs]) for name in LATENCIES},
        "ttft_mean_interval": _interval(ttft, confidence),
        "good_share": _good_share(runs, slo),
        "preemptions": sum(total.preemptions for total in totals),
        "recomputed_tokens": sum(total.recomputed_tokens for total in totals),
        "held_back": sum(total.held_back for total in totals),
        "kv_tokens_peak": max(total.kv_tokens_peak for total in totals),
        "kv_pages_peak": max(total.kv_pages_peak for total in totals),
        "running_mean": sum(total.running_s for total in totals) / busy if busy else 0.0,
        "running_peak": max(total.running_peak for total in totals),
        "steps": sum(total.steps for total in totals),
        "busy_s": busy,
        "mean_bits": sum(total.bits_s for total in totals) / busy if busy else None,
        "least_bits": min(total.least_bits for total in totals),
        "damage": sum(total.damage_s for total in totals) / busy / reference if busy else None,
        "damage_per_token": (
            sum(total.damage_tokens for total in totals) / tokens / reference if tokens else None
        ),
        "moved_bytes": sum(run.moved_bytes for run in runs),
        "wasted_bytes": sum(run.wasted_bytes for run in runs),
        "decisions": _sum_counts([run.decisions for run in runs]),
        "faults": _sum_counts([run.faults for run in runs]),
        "damage_by_replication": [
            total.damage_s / total.busy_s / reference if total.busy_s else None for total in totals
        ],
        "requests_per_s_by_replication": rate,
        "ttft_mean_by_replication": ttft,
    }


def unfit_summary(policy: PrecisionPolicyName, reason: str) -> dict[str, Any]:
    """A policy whose weights do not fit into the memory."""
    return {"policy": policy, "label": label(policy), "fits": False, "reason": reason}


def comparison(
    first: Mapping[str, Any], other: Mapping[str, Any], confidence: float
) -> dict[str, Any] | None:
    """The asked policy less another on the same requests; None without replications of both."""
    if not other["fits"] or not first["fits"] or first["replications"] < 2:
        return None
    found = {}
    for name in ("requests_per_s", "ttft_mean", "damage"):
        a, b = first[f"{name}_by_replication"], other[f"{name}_by_replication"]
        if None in a or None in b:
            continue
        difference = paired_difference(a, b, confidence=confidence)
        found[name] = {
            "mean": difference.mean,
            "half_width": difference.half_width,
            "verdict": {"a": "larger", "b": "smaller"}.get(difference.verdict, "cannot tell"),
        }
    return found


def capacity(model: PagedWeightModel) -> list[dict[str, Any]]:
    """KV tokens that the arena holds beside weights of every width, before any run."""
    sequences = model.scenario.serving.max_running
    rows = []
    for bits in (*model.scenario.precision.levels, FULL_BITS):
        pages = (
            model.full_pages
            if bits == FULL_BITS
            else int(model.held_pages([bits], "active", bits).sum())
        )
        left = model.arena_pages - pages
        tokens = (
            kv_tokens_in_pages(
                model.shape,
                left,
                num_sequences=sequences,
                page_bytes=model.page_bytes,
                value_bytes=model.scenario.llm.kv_value_bytes,
            )
            if left >= 0
            else None
        )
        rows.append(
            {
                "bits": bits,
                "weight_bytes": pages * model.page_bytes,
                "kv_tokens": tokens,
                "fits": left >= 0,
            }
        )
    return rows


def deployment_summary(model: PagedWeightModel) -> dict[str, Any]:
    """Device, model and arena, and the rates that step times rest on."""
    scenario, rates = model.scenario, model.time.rates
    measured = sorted(int(bits) for bits in scenario.hardware.bandwidth_share)
    token = kv_token_bytes(model.shape, value_bytes=scenario.llm.kv_value_bytes)
    return {
        "model": model.shape.name,
        "layers": len(model.shape.layers),
        "experts": model.sizes.experts,
        "experts_per_token": model.time.moe.experts_per_token,
        "num_blocks": model.sizes.num_blocks,
        "expert_bytes_16_bits": full_expert_bytes(model.shape),
        "other_bytes": other_bytes(model.shape),
        "kv_bytes_per_token": token.inside,
        "device": model.device.name,
        "device_source": model.device.source,
        "memory_bytes": scenario.hardware.memory_bytes,
        "reserve_bytes": 1e9 * scenario.hardware.reserve_gb,
        "arena_bytes": model.arena_pages * model.page_bytes,
        "arena_pages": model.arena_pages,
        "page_bytes": model.page_bytes,
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        "link_bytes_per_s": scenario.hardware.link_bytes_per_s,
        "share_by_bits": {str(bits): share for bits, share in sorted(rates.share_by_bits.items())},
        "measured_bits": measured,
        "step_times": "static estimate" if len(measured) < len(rates.share_by_bits) else "measured",
    }


def _served_per_s(run: PagedWeightRun) -> float:
    first, last = float(run.arrival_s[0]), min(float(run.arrival_s[-1]), run.end_s)
    if last <= first:
        last = run.end_s
    done = int((run.last_token_s <= last).sum())
    return done / (last - first) if last > first else 0.0


def _tokens_per_s(run: PagedWeightRun) -> float:
    span = run.end_s - float(run.arrival_s[0])
    return run.totals.generated_tokens / span if span > 0 else 0.0


def _mean(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _latency(values: Sequence[Floats]) -> dict[str, float] | None:
    finite = np.concatenate([column[np.isfinite(column)] for column in values])
    if not len(finite):
        return None
    p50, p90, p99, largest = np.quantile(finite, [0.5, 0.9, 0.99, 1.0])
    return {
        "mean": float(finite.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(largest),
    }


def _good_share(runs: Sequence[PagedWeightRun], slo: Slo) -> float | None:
    """Share of the requests that arrived and were served within every target."""
    targets = {name: getattr(slo, name) for name in LATENCIES if getattr(slo, name) is not None}
    if not targets:
        return None
    good = arrived = 0
    for run in runs:
        meets = np.isfinite(run.last_token_s)
        for name, target in targets.items():
            value = getattr(run, name)
            meets &= np.isnan(value) | (value <= target)
        good += int(meets.sum())
        arrived += int((run.arrival_s <= run.end_s).sum())
    return good / arrived if arrived else None


def _interval(values: Sequence[float | None], confidence: float) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if len(known) < 2 or len(known) < len(values):
        return None
    found = replications(known, confidence=confidence)
    return {"mean": found.mean, "half_width": found.half_width}


def _sum_counts(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for name, value in count.items():
            if value:
                total[name] = total.get(name, 0) + value
    return dict(sorted(total.items()))
