"""What the runs of a prefix store experiment say, JSON-ready: latencies, tiers, bytes, warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.prefix_settings import DocumentsWorkload, PrefixScenario, TracedWorkload
from traces.request import Trace
from twin.output_statistics import Estimate, batch_means, paired_difference, replications
from twin.store.cluster_log import TIERS, ClusterRun
from twin.store.deployment import Deployment
from twin.store.modes import LABELS, Mode

PERCENTILES = (50, 90, 99)
_MAX_CURVE_POINTS = 200
_NUM_BATCHES = 20

Runs = Sequence[Sequence[ClusterRun]]


def summarize(
    scenario: PrefixScenario,
    deployment: Deployment,
    modes: Sequence[Mode],
    runs: Runs,
    trace: Trace | None,
) -> dict[str, Any]:
    """Results of all systems.

    Args:
        scenario: The question.
        deployment: What they ran on.
        modes: The systems.
        runs: [replication][stream and system] in the order they ran.
        trace: Of a recorded workload.
    """
    cells: dict[tuple[str, str], list[ClusterRun]] = {}
    for of_replication in runs:
        for run in of_replication:
            cells.setdefault((run.stream, run.mode), []).append(run)
    confidence = scenario.run.confidence
    streams = list(dict.fromkeys(stream for stream, _ in cells))
    rows = []
    for stream in streams:
        reference = cells.get((stream, "local_prefix"))
        for mode in modes:
            row = _row(cells[(stream, mode.name)], confidence)
            if reference is not None and mode.name != "local_prefix":
                row["local_prefix_less_this"] = _difference(
                    reference, cells[(stream, mode.name)], confidence
                )
            rows.append(row)
    return {
        "workload": _workload(scenario, runs[0][0], trace),
        "deployment": _deployment(deployment, scenario),
        "modes": [_mode(mode) for mode in modes],
        "rows": rows,
        "series": _drawn_series(runs[0]),
        "warnings": _warnings(scenario, rows, trace),
    }


def _row(runs: Sequence[ClusterRun], confidence: float) -> dict[str, Any]:
    """One system on one stream, over all replications."""
    first = runs[0]
    ttft = [np.asarray(run.requests["ttft_s"], dtype=np.float64) for run in runs]
    queue = [run.requests["start_s"] - run.requests["ready_s"] for run in runs]
    load = [run.requests["ready_s"] - run.requests["arrival_s"] for run in runs]
    tokens = {
        name: float(sum(run.requests[f"tokens_{name}"].sum() for run in runs)) for name in TIERS
    }
    total = sum(tokens.values())
    return {
        "mode": first.mode,
        "label": LABELS[first.mode],
        "stream": first.stream,
        "prompt_tokens": first.prompt_tokens,
        "num_requests": sum(map(len, ttft)),
        "ttft_s": {
            "mean": _estimate([float(one.mean()) for one in ttft], ttft[0], confidence),
            **{f"p{level}": _quantile(ttft, level / 100.0, confidence) for level in PERCENTILES},
            "max": max(float(one.max()) for one in ttft),
        },
        "load_s": float(np.mean(np.concatenate(load))),
        "queue_s": float(np.mean(np.concatenate(queue))),
        "prefill_s": float(
            np.mean(
                np.concatenate([r.requests["first_token_s"] - r.requests["start_s"] for r in runs])
            )
        ),
        "token_shares": {name: value / total for name, value in tokens.items()},
        "hit_rate": 1.0 - tokens["computed"] / total,
        "links": {
            kind: {
                name: float(np.mean([run.links[kind][name] for run in runs]))
                for name in first.links[kind]
            }
            for kind in first.links
        },
        "blocks": {
            name: float(np.mean([run.counts[name] for run in runs])) for name in first.counts
        },
        "duration_s": float(np.mean([run.duration_s for run in runs])),
        "ttft_curve_s": _curve(np.concatenate(ttft)),
    }


def _estimate(
    means: Sequence[float], series: NDArray[np.float64], confidence: float
) -> dict[str, Any]:
    """Over replications; of a single one over batches of requests in order of arrival."""
    if len(means) >= 2:
        return _plain(replications(means, confidence=confidence))
    if len(series) >= 2 * _NUM_BATCHES:
        return _plain(batch_means(series, confidence=confidence, num_batches=_NUM_BATCHES))
    return {"mean": float(np.mean(means)), "half_width": None, "method": "too few requests"}


def _quantile(
    samples: Sequence[NDArray[np.float64]], level: float, confidence: float
) -> dict[str, Any]:
    """A quantile of each replication and its interval over them; one replication has none."""
    values = [float(np.quantile(one, level)) for one in samples]
    if len(values) >= 2:
        return _plain(replications(values, confidence=confidence))
    return {"mean": values[0], "half_width": None, "method": "one replication"}


def _plain(estimate: Estimate) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(estimate).items()
    }


def _difference(
    reference: Sequence[ClusterRun], runs: Sequence[ClusterRun], confidence: float
) -> dict[str, Any]:
    """Seconds that the GPU caches alone take longer, on the same requests."""
    pairs = [
        (np.asarray(a.requests["ttft_s"]), np.asarray(b.requests["ttft_s"]))
        for a, b in zip(reference, runs, strict=True)
    ]
    gaps = np.concatenate([a - b for a, b in pairs])
    found: dict[str, Any] = {
        "mean_s": float(gaps.mean()),
        "half_width_s": None,
        "share_of_requests_slower": float(np.mean(gaps < -1e-9)),
        "most_slower_s": float(max(0.0, -gaps.min())),
        "verdict": None,
    }
    if len(pairs) >= 2:
        gap = paired_difference(
            [float(a.mean()) for a, _ in pairs],
            [float(b.mean()) for _, b in pairs],
            confidence=confidence,
        )
        words = {"a": "faster", "b": "slower", "cannot tell": "cannot tell"}
        found |= {"half_width_s": gap.half_width, "verdict": words[gap.verdict]}
    return found


def _curve(values: NDArray[np.float64]) -> list[float]:
    """Sorted values, thinned to evenly spaced quantiles, for drawing a distribution."""
    levels = np.linspace(0.0, 1.0, min(_MAX_CURVE_POINTS, len(values)) + 1)
    curve: list[float] = np.quantile(values, levels).tolist()
    return curve


def _drawn_series(runs: Sequence[ClusterRun]) -> list[dict[str, Any]]:
    """The first replication's looks that are drawn."""
    names = ("time_s", "num_requests_waiting", "num_requests_running", "memory_used_bytes")
    return [
        {
            "mode": run.mode,
            "stream": run.stream,
            **{name: run.series[name].tolist() for name in names},
            "computed_share": _running_share(run),
        }
        for run in runs
    ]


def _running_share(run: ClusterRun) -> list[float]:
    total = run.series["prefix_cache_queries"]
    share = np.divide(
        run.series["tokens_computed"], total, out=np.ones_like(total), where=total > 0
    )
    values: list[float] = share.tolist()
    return values


def _workload(scenario: PrefixScenario, run: ClusterRun, trace: Trace | None) -> dict[str, Any]:
    settings = scenario.workload
    arrivals = np.asarray(run.requests["arrival_s"])
    found: dict[str, Any] = {
        "kind": settings.kind,
        "num_requests": len(arrivals),
        "duration_s": float(arrivals[-1]),
        "mean_prompt_tokens": float(np.mean(run.requests["prompt_tokens"])),
    }
    if isinstance(settings, DocumentsWorkload):
        found |= {
            "name": "documents",
            "documents": settings.documents,
            "questions": settings.questions,
            "question_tokens": settings.question_tokens,
            "prompt_tokens": list(settings.prompt_tokens),
            "arrivals": asdict(settings.arrivals),
        }
    elif isinstance(settings, TracedWorkload):
        found |= {
            "name": settings.trace if trace is None else trace.name,
            "skipped": {} if trace is None else dict(trace.skipped),
            "notes": [] if trace is None else list(trace.notes),
        }
    else:
        found |= {"name": settings.generator}
    return found


def _deployment(deployment: Deployment, scenario: PrefixScenario) -> dict[str, Any]:
    return {
        "model": deployment.model,
        "nodes": deployment.nodes,
        "gpus": deployment.num_gpus,
        "token_bytes": deployment.token_bytes,
        "cache_tokens_per_gpu": deployment.cache_tokens,
        "memory_bytes_per_node": scenario.cluster.memory_bytes,
        "ssd_bytes_per_node": scenario.cluster.ssd_bytes,
        "links": asdict(deployment.links),
        "routing": deployment.routing,
        "owners": scenario.prefix.owners,
        "mfu": deployment.prefill.mfu,
    }


def _mode(mode: Mode) -> dict[str, Any]:
    store: Mapping[str, Any] | None = None
    if mode.store is not None:
        store = {
            "eviction": mode.store.eviction,
            "replicas": mode.store.replicas,
            "replica_share": mode.store.replica_share,
            "flush": mode.store.flush,
        }
    return {
        "mode": mode.name,
        "label": LABELS[mode.name],
        "has_gpu_tier": mode.has_gpu_tier,
        "may_recompute": mode.may_recompute,
        "lookup_s": mode.lookup_s,
        "overlap": mode.overlap,
        "store": store,
    }


def _warnings(
    scenario: PrefixScenario, rows: Sequence[Mapping[str, Any]], trace: Trace | None
) -> list[str]:
    warnings = []
    if scenario.run.replications == 1:
        warnings.append(
            "one replication: the interval of a mean comes from batches of requests, percentiles "
            "have none"
        )
    elif trace is not None:
        warnings.append(
            "a recorded trace is the same in every replication: intervals show what routing does, "
            "not what other requests would"
        )
    warnings += [
        f"{row['label']}, {row['stream']}: requests wait {row['queue_s']:.3g} s for a GPU and take "
        f"{row['prefill_s']:.3g} s there; the load is at or beyond what it can do"
        for row in rows
        if row["queue_s"] > 5.0 * row["prefill_s"]
    ]
    if trace is not None:
        for rule, count in trace.skipped.items():
            warnings.append(f"{count:,} rows of the trace were left out: {rule}")
        warnings += trace.notes
    return warnings
