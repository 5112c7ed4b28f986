"""Fits a bundled workload to a public trace: joint statistics of cells of requests, and rates.

    python benchmarks/fit_bundled_workload.py azure-2023-conversation TRACE_FILE

The trace is read, its requests are split into cells of similar (P, D), and of each cell only the
count, the means, the standard deviations and the correlation are kept. Expanding every cell to four
points gives back all second-order moments; no cell describes fewer than MIN_CELL_REQUESTS requests.
Cells are split like a regression tree: the cell with the largest spread first, where the cut takes
away most of it.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.lengths import LengthPairs
from traces.readers import read_trace
from traces.request import Trace
from traces.statistics import trace_statistics
from traces.workloads import expand_cells

MAX_CELLS, MIN_CELL_REQUESTS = 400, 10
RATE_WINDOW_S = 60.0

SOURCES = {
    "azure-2023-conversation": {
        "title": "Azure LLM inference trace 2023, conversation",
        "repository": "https://github.com/Azure/AzurePublicDataset",
        "commit": "b469a113cedca53ddc3bdea71a143dc4b7d8700c",
        "path": "data/AzureLLMInferenceTrace_conv.csv",
        "selection": "all requests",
        "licence": "CC-BY-4.0",
        "attribution": "Microsoft Corporation; changed: reduced to statistics",
        "citation": "Patel et al., Splitwise: Efficient generative LLM inference using phase "
        "splitting, ISCA 2024",
    },
    "mooncake-conversation": {
        "title": "Mooncake conversation trace (Kimi), first 30 minutes",
        "repository": "https://github.com/kvcache-ai/Mooncake",
        "commit": "3b5a594133958449a1feaf1c9e0fc1b553e34a28",
        "path": "FAST25-release/traces/conversation_trace.jsonl",
        "selection": "requests with timestamp < 1800000 ms",
        "licence": "Apache-2.0",
        "attribution": "Mooncake authors (Moonshot AI and others); changed: reduced to statistics",
        "citation": "Qin et al., Mooncake: Trading more storage for less computation, FAST 2025",
    },
}


def split_cells(columns: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Rows of each cell; columns [n, 2], scaled to unit variance."""
    heap: list[tuple[float, int, NDArray[np.int64]]] = []
    finished: list[NDArray[np.int64]] = []
    serial = 0

    def push(rows: NDArray[np.int64]) -> None:
        nonlocal serial
        spread = float(np.square(columns[rows] - columns[rows].mean(axis=0)).sum())
        heapq.heappush(heap, (-spread, serial, rows))
        serial += 1

    push(np.arange(len(columns)))
    while heap and len(heap) + len(finished) < MAX_CELLS:
        _, _, rows = heapq.heappop(heap)
        halves = best_cut(columns, rows)
        if halves is None:
            finished.append(rows)
        else:
            push(halves[0])
            push(halves[1])
    return finished + [rows for _, _, rows in heap]


def best_cut(
    columns: NDArray[np.float64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """The cut across one column that leaves the least spread; None if no cell may be cut off."""
    best: tuple[float, NDArray[np.int64], NDArray[np.int64]] | None = None
    for axis in range(columns.shape[1]):
        order = rows[np.argsort(columns[rows, axis], kind="stable")]
        at = np.arange(MIN_CELL_REQUESTS, len(order) - MIN_CELL_REQUESTS + 1)
        if len(at) == 0:
            continue
        at = at[columns[order[at - 1], axis] < columns[order[at], axis]]
        if len(at) == 0:
            continue
        below = np.cumsum(columns[order], axis=0)
        total = below[-1]
        kept = (np.square(below[at - 1]).sum(axis=1) / at) + (
            np.square(total - below[at - 1]).sum(axis=1) / (len(order) - at)
        )
        k = int(np.argmax(kept))
        if best is None or kept[k] > best[0]:
            best = (float(kept[k]), order[: at[k]], order[at[k] :])
    return None if best is None else best[1:]


def describe_cell(p: NDArray[np.float64], d: NDArray[np.float64]) -> list[float]:
    """Count, mean P, mean D, sd P, sd D, correlation."""
    sd_p, sd_d = float(p.std()), float(d.std())
    covariance = float(np.mean((p - p.mean()) * (d - d.mean())))
    correlation = covariance / (sd_p * sd_d) if sd_p * sd_d > 0.0 else 0.0
    return [
        len(p), round(float(p.mean()), 1), round(float(d.mean()), 1),
        round(sd_p, 1), round(sd_d, 1), round(correlation, 2),
    ]  # fmt: skip


def fit_cells(trace: Trace) -> list[list[float]]:
    p, d = trace.prompt_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    cells = split_cells(np.stack([p / p.std(), d / d.std()], axis=1))
    described = [describe_cell(p[rows], d[rows]) for rows in cells]
    return sorted(described, key=lambda cell: (cell[2], cell[1]))


def fit_arrivals(arrival_s: NDArray[np.float64]) -> dict[str, object]:
    """Rates per window over one period, and the CV of the gaps once the rate is taken out."""
    n = len(arrival_s)
    relative = arrival_s - arrival_s[0]
    period_s = float(relative[-1]) * n / (n - 1)
    edges = np.append(np.arange(0.0, period_s - RATE_WINDOW_S / 2, RATE_WINDOW_S), period_s)
    counts, _ = np.histogram(relative, edges)
    operational = np.interp(relative, edges, np.concatenate(([0.0], np.cumsum(counts))))
    gaps = np.diff(operational)
    distinct = 1 + int(np.count_nonzero(np.diff(arrival_s)))
    if distinct > 0.5 * n:
        gap_cv, method = float(gaps.std() / gaps.mean()), "gaps after taking the rate out"
    else:
        per_window = np.bincount((operational / 100.0).astype(int))[: n // 100]
        gap_cv = float(np.sqrt(per_window.var() / per_window.mean()))
        method = (
            f"time stamps are coarse ({distinct} distinct for {n} requests), so from the "
            "dispersion of counts per 100 expected requests"
        )
    return {
        "rate_window_s": RATE_WINDOW_S,
        "period_s": round(period_s, 3),
        "rate_per_s": [round(float(c / w), 4) for c, w in zip(counts, np.diff(edges), strict=True)],
        "gap_cv": round(gap_cv, 4),
        "gap_cv_method": method,
    }


def slot_moments(lengths: LengthPairs) -> tuple[float, float, float]:
    """theta, nu, skew of the load of a slot (renewal-reward)."""
    p, w = lengths.prompt_tokens.astype(np.float64), lengths.weight
    d = lengths.output_tokens.astype(np.float64)
    ages1, ages2, ages3 = d * (d - 1) / 2, d * (d - 1) * (2 * d - 1) / 6, (d * (d - 1) / 2) ** 2
    steps = float(w @ d)
    m1 = float(w @ (d * p + ages1)) / steps
    m2 = float(w @ (d * p**2 + 2 * p * ages1 + ages2)) / steps
    m3 = float(w @ (d * p**3 + 3 * p**2 * ages1 + 3 * p * ages2 + ages3)) / steps
    variance = m2 - m1**2
    return m1, variance**0.5, (m3 - 3 * m1 * m2 + 2 * m1**3) / variance**1.5


def main(name: str, path: Path) -> None:
    trace = read_trace(path)
    raw = path.read_bytes()
    content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    found = trace_statistics(trace)
    cells = fit_cells(trace)
    moments = slot_moments(trace.lengths())
    document = {
        "version": 1,
        "name": name,
        "num_requests": len(trace),
        "source": {**SOURCES[name], "sha256": hashlib.sha256(content).hexdigest()},
        "fit": {
            "method": "cells of a regression tree on (P, D), each expanded to four points",
            "min_cell_requests": min(int(cell[0]) for cell in cells),
            "script": "benchmarks/fit_bundled_workload.py",
        },
        "statistics": {
            "mean_prompt_tokens": round(found.lengths.prompt_tokens.mean, 4),
            "mean_output_tokens": round(found.lengths.output_tokens.mean, 4),
            "max_prompt_tokens": int(found.lengths.prompt_tokens.max),
            "max_output_tokens": int(found.lengths.output_tokens.max),
            "correlation": round(found.lengths.pearson or 0.0, 5),
            "theta_tokens": round(moments[0], 4),
            "nu_tokens": round(moments[1], 4),
            "skew": round(moments[2], 5),
            "theta_se_tokens": round(found.lengths.theta_se, 4),
        },
        "arrivals": fit_arrivals(trace.arrival_s) if trace.arrival_s is not None else None,
        "cell_columns": [
            "requests", "mean_prompt", "mean_output", "sd_prompt", "sd_output", "correlation",
        ],
        "cells": cells,
    }  # fmt: skip
    fitted = expand_cells(name, cells, len(trace))
    target = Path(__file__).parent.parent / "traces" / "data" / f"{name}.json"
    target.write_text(one_row_a_line(document))
    print(f"{target}: {target.stat().st_size} bytes, {len(cells)} cells")
    print("theta, nu, skew of the trace:  ", *(f"{m:.6g}" for m in moments))
    print("theta, nu, skew of the bundle: ", *(f"{m:.6g}" for m in slot_moments(fitted)))


def one_row_a_line(document: dict[str, object]) -> str:
    """JSON with a line for each key and each cell, so that a change shows in a diff."""
    head = json.dumps({k: v for k, v in document.items() if k != "cells"}, indent=1)
    rows = ",\n  ".join(json.dumps(cell, separators=(",", ":")) for cell in document["cells"])
    return f'{head[:-2]},\n "cells": [\n  {rows}\n ]\n}}\n'


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SOURCES:
        sys.exit(f"usage: fit_bundled_workload.py {'|'.join(SOURCES)} TRACE_FILE")
    main(sys.argv[1], Path(sys.argv[2]))
