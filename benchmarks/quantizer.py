"""Nested k-means of weight rows beside the peer's: error at every width, weights per second.

    pip install --no-deps flash1dkmeans
    nice python benchmarks/quantizer.py [--out FILE.json]

The peer is the clustering of Any-Precision LLM: its package flash1dkmeans, a k-means++ and Lloyd
seed of at most 50 iterations, then two-cluster splits by bisection, called from a compiled loop
over rows as its own code does. Both sort with numpy and run on one thread; times are CPU time of
the process, sorting and tables included. The floor is one pass over the row and its codes at the
copy bandwidth measured here.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from models.streams import stream
from runtime.nested_kmeans import quantize_rows
from traces.whole_file import write_whole

try:
    from flash1dkmeans import numba_kmeans_1d_k_cluster, numba_kmeans_1d_two_cluster
except ImportError as missing:
    raise SystemExit("needs the peer: pip install --no-deps flash1dkmeans") from missing

RESULTS = Path(__file__).parent / "results" / "quantizer.json"
ROWS_OF_COLUMNS = {704: 512, 2048: 256, 14336: 32}
SEED_BITS, PARENT_BITS = 3, 8
REPETITIONS = 9
PEER_ITERATIONS = 50


@njit(nogil=True)
def peer_rows(weights, sensitivity, order, codes, tables):
    """Seed and splits of the peer on sorted rows; ``tables`` holds widths 3..8 side by side."""
    rows, columns = weights.shape
    for row in range(rows):
        values = np.empty(columns)
        mass = np.empty(columns)
        for k in range(columns):
            values[k] = weights[row, order[row, k]]
            mass[k] = sensitivity[row, order[row, k]]
        mass_sum = np.cumsum(mass)
        value_sum = np.cumsum(mass * values)
        square_sum = np.cumsum(mass * values * values)
        centroids, borders = numba_kmeans_1d_k_cluster(
            values, 1 << SEED_BITS, PEER_ITERATIONS, mass_sum, value_sum, square_sum,
            0, columns, row,
        )  # fmt: skip
        place = 0
        for bits in range(SEED_BITS, PARENT_BITS + 1):
            cells = 1 << bits
            for cell in range(cells):
                tables[row, place + cell] = centroids[cell]
            place += cells
            if bits == PARENT_BITS:
                break
            finer = np.empty(2 * cells)
            cuts = np.empty(2 * cells + 1, borders.dtype)
            for cell in range(cells):
                a, b = borders[cell], borders[cell + 1]
                cuts[2 * cell] = a
                if b > a:
                    pair, inner = numba_kmeans_1d_two_cluster(values, mass_sum, value_sum, a, b)
                    finer[2 * cell], finer[2 * cell + 1] = pair[0], pair[1]
                    cuts[2 * cell + 1] = inner[1]
                else:
                    finer[2 * cell] = finer[2 * cell + 1] = centroids[cell]
                    cuts[2 * cell + 1] = b
            cuts[2 * cells] = columns
            centroids, borders = finer, cuts
        for cell in range(1 << PARENT_BITS):
            for k in range(borders[cell], borders[cell + 1]):
                codes[row, order[row, k]] = cell


def run_peer(weights: np.ndarray, sensitivity: np.ndarray) -> tuple[np.ndarray, dict[int, Any]]:
    order = np.argsort(weights, axis=1)
    codes = np.empty(weights.shape, np.uint8)
    width = (2 << PARENT_BITS) - (1 << SEED_BITS)
    tables = np.empty((len(weights), width))
    peer_rows(weights, sensitivity, order, codes, tables)
    first = 1 << SEED_BITS
    cut = {
        q: tables[:, (1 << q) - first : (2 << q) - first] for q in range(SEED_BITS, PARENT_BITS + 1)
    }
    return codes, cut


def run_ours(weights: np.ndarray, sensitivity: np.ndarray) -> tuple[np.ndarray, dict[int, Any]]:
    rows = quantize_rows(weights, sensitivity, seed_bits=SEED_BITS, parent_bits=PARENT_BITS)
    return rows.codes, rows.tables


def relative_errors(
    weights: np.ndarray, sensitivity: np.ndarray, codes: np.ndarray, tables: dict[int, Any]
) -> dict[int, np.ndarray]:
    """By width, [N] sum s (w - w')^2 / sum s w^2."""
    exact = weights.astype(np.float64)
    norm = (sensitivity * exact**2).sum(axis=1)
    return {
        q: (sensitivity * (exact - np.take_along_axis(t, (codes >> (8 - q)).astype(int), 1)) ** 2)
        .sum(axis=1) / norm
        for q, t in tables.items()
    }  # fmt: skip


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as checkpoints store weights."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draws = stream(0, "quantizer rows")
    found = {}
    for columns, rows in ROWS_OF_COLUMNS.items():
        shape = (rows, columns)
        gaussian = (0.02 * draws.standard_normal(shape)).astype(np.float32)
        heavy = (0.02 * draws.standard_t(4, shape)).astype(np.float32)
        ones, spread = np.ones(shape), np.exp(draws.standard_normal(shape))
        found[f"Gaussian float32, {columns}"] = (gaussian, ones)
        found[f"Gaussian bfloat16, {columns}"] = (bfloat16(gaussian), ones)
        found[f"Gaussian bfloat16 weighted, {columns}"] = (bfloat16(gaussian), spread)
        found[f"t4 bfloat16 weighted, {columns}"] = (bfloat16(heavy), spread)
    return found


def cpu_seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def measure(weights: np.ndarray, sensitivity: np.ndarray) -> dict[str, Any]:
    copies = [cpu_seconds(lambda: weights.copy()) for _ in range(20)]
    floor = 5 / 8 * min(copies)  # a copy moves 8 bytes per weight; rows in and codes out are 5
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(REPETITIONS):  # in turn, so that a busy neighbour disturbs both
        times["ours"].append(cpu_seconds(lambda: run_ours(weights, sensitivity)))
        times["peer"].append(cpu_seconds(lambda: run_peer(weights, sensitivity)))
    ours = relative_errors(weights, sensitivity, *run_ours(weights, sensitivity))
    peer = relative_errors(weights, sensitivity, *run_peer(weights, sensitivity))
    speed = {
        name: summary([weights.size / seconds / 1e6 for seconds in values])
        for name, values in times.items()
    }
    return {
        "M weights per CPU second": speed,
        "times the floor": statistics.median(times["ours"]) / floor,
        "relative error": {
            q: {
                "ours": float(errors.mean()),
                **(
                    {
                        "peer": float(peer[q].mean()),
                        "peer / ours": float(peer[q].mean() / errors.mean()),
                        "worst row, peer / ours": float((peer[q] / errors).max()),
                    }
                    if q in peer
                    else {}
                ),
            }
            for q, errors in ours.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    tiny = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, -1)
    run_ours(tiny, np.ones((1, 64)))  # compiles
    run_peer(tiny, np.ones((1, 64)))
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, one thread",
        "rows": {},
    }
    for name, (weights, sensitivity) in cases().items():
        found = measure(weights, sensitivity)
        results["rows"][name] = found
        speed = found["M weights per CPU second"]
        ratios = [found["relative error"][q].get("peer / ours", 0.0) for q in range(3, 9)]
        print(
            f"{name:36} ours {speed['ours']['median']:6.2f} ({speed['ours']['least']:.2f}.."
            f"{speed['ours']['most']:.2f}) M/s, peer {speed['peer']['median']:6.2f}"
            f" ({speed['peer']['least']:.2f}..{speed['peer']['most']:.2f}) M/s;"
            f" floor x{found['times the floor']:.0f}; peer's error / ours at 3..8 bits:"
            f" {' '.join(f'{ratio:.3f}' for ratio in ratios)}"
        )
    write_whole(arguments.out, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
