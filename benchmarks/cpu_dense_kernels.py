"""Dense CPU kernels against torch float32, and a decode step's experts against memory bandwidth.

    python benchmarks/cpu_dense_kernels.py [--rounds 9] [--out FILE.json]

One thread, CPU time. Every contender of a line works through matrices of its own that together are
larger than the second-level cache (for up to 16 tokens: `COLD_BYTES`, so that weights come from
memory or a shared last-level cache), and rounds take turns among the contenders. Recorded are the
median and the quartiles of the rounds, and the median of the ratios of rounds of the same number.
The floor is the bytes of the weights over the read bandwidth of one core, measured between the
rounds by the largest of 256 MiB of floats. Layers: 8 tokens, 4 of 16 experts each, drawn at
random, hidden 512, inner 704: torch float32 in a loop over experts, plain float32 and bfloat16
experts, and bit planes of 4 and 8 bits.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_kernel_blocks import random_block

from kernels.cpu import (
    ContiguousExperts,
    PackedLinear,
    PlainExperts,
    backend,
    linear,
    moe_layer,
    plain_moe_layer,
)

RESULTS = Path(__file__).parent / "results" / "cpu_dense_kernels.json"
SHAPES = ((512, 1408), (512, 1536), (704, 512), (512, 8192), (2048, 2816))  # inputs, outputs
TOKENS = (1, 8, 128, 512)
COLD_BYTES, WARM_BYTES, MOST_COPIES = 64 << 20, 12 << 20, 64
EXPERTS, TOP, HIDDEN, INNER, LAYER_TOKENS, LAYERS = 16, 4, 512, 704, 8, 3

Work = Callable[[], Any]


def cpu_seconds(work: Work) -> float:
    """Seconds of this thread that one call takes."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def rounds_of(contenders: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contender in every round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, work in contenders.items():
            spent = cpu_seconds(work)
            if i:
                seconds[name].append(spent)
    return seconds


def summary(seconds: list[float], per: float) -> dict[str, float]:
    """Median and quartiles in microseconds."""
    low, middle, high = (1e6 * s / per for s in statistics.quantiles(seconds, n=4))
    return {"median_us": round(middle, 1), "low_us": round(low, 1), "high_us": round(high, 1)}


def median_ratio(above: list[float], below: list[float]) -> float:
    """Median of the ratios of rounds of the same number."""
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)


def bfloat16(weight: torch.Tensor) -> np.ndarray:
    """The rounded weights as uint16."""
    return weight.to(torch.bfloat16).view(torch.uint16).numpy()


def bandwidth_work() -> tuple[int, Work]:
    """Bytes read, and the work that reads them."""
    data = np.ones(64 << 20, np.float32)
    return data.nbytes, data.max


def bench_linear(columns: int, rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One shape at one number of tokens: torch, packed, packed bfloat16, not packed."""
    wanted = (COLD_BYTES if tokens <= 16 else WARM_BYTES) // (4 * columns * rows)
    copies = max(2, min(MOST_COPIES, wanted))
    weights = [torch.randn(rows, columns) for _ in range(copies)]
    packed = [PackedLinear.pack(w.numpy()) for w in weights]
    halves = [PackedLinear.pack(bfloat16(w)) for w in weights]
    arrays = [w.numpy() for w in weights]
    x = torch.randn(tokens, columns)
    inputs, out = x.numpy(), np.empty((tokens, rows), np.float32)

    def ours(matrices: list[Any]) -> Work:
        return lambda: [linear(inputs, m, out=out) for m in matrices]

    seconds = rounds_of(
        {
            "torch_float32": lambda: [torch.nn.functional.linear(x, w) for w in weights],
            "packed_float32": ours(packed),
            "packed_bfloat16": ours(halves),
            "rows_float32": ours(arrays),
        },
        rounds,
    )
    peer = seconds["torch_float32"]
    return {
        "columns": columns,
        "rows": rows,
        "tokens": tokens,
        "copies": copies,
        "seconds_per_call": {name: summary(s, copies) for name, s in seconds.items()},
        "speed_over_torch_float32": {
            name: median_ratio(peer, s) for name, s in seconds.items() if s is not peer
        },
        "bfloat16_over_float32": median_ratio(
            seconds["packed_float32"], seconds["packed_bfloat16"]
        ),
    }


def torch_layer(x: torch.Tensor, index: Any, weight: Any, gate_up: Any, down: Any) -> torch.Tensor:
    """The layer as a loop over experts."""
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        at, position = torch.nonzero(index == expert, as_tuple=True)
        if len(at):
            gate, up = torch.nn.functional.linear(x[at], gate_up[expert]).chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
            result = torch.nn.functional.linear(hidden, down[expert])
            out.index_add_(0, at, result * weight[at, position, None])
    return out


def bench_layers(rounds: int) -> dict[str, Any]:
    """Decode of 8 tokens: time of every kind of experts over the floor of its bytes."""
    rng = np.random.default_rng(0)
    x = torch.randn(LAYER_TOKENS, HIDDEN)
    chosen = np.array([rng.permutation(EXPERTS)[:TOP] for _ in range(LAYER_TOKENS)], np.int32)
    share = rng.random((LAYER_TOKENS, TOP)).astype(np.float32)
    index, weight = torch.from_numpy(chosen).long(), torch.from_numpy(share)
    visited = len(np.unique(chosen))
    gate_up = [torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 23 for _ in range(LAYERS)]
    down = [torch.randn(EXPERTS, HIDDEN, INNER) / 27 for _ in range(LAYERS)]
    pairs = list(zip(gate_up, down, strict=True))
    full = [PlainExperts.pack(a.numpy(), b.numpy()) for a, b in pairs]
    half = [PlainExperts.pack(bfloat16(a), bfloat16(b)) for a, b in pairs]
    planes = {
        bits: [
            ContiguousExperts(
                [
                    random_block(rng, *((HIDDEN, INNER) if m else (2 * INNER, HIDDEN)), bits)
                    for _ in range(EXPERTS)
                    for m in range(2)
                ]
            )
            for _ in range(LAYERS)
        ]
        for bits in (4, 8)
    }
    inputs, out = x.numpy(), np.empty((LAYER_TOKENS, HIDDEN), np.float32)

    def ours(call: Any, layers: list[Any]) -> Work:
        return lambda: [call(inputs, chosen, share, e, "silu", out=out) for e in layers]

    read_bytes, read = bandwidth_work()
    seconds = rounds_of(
        {
            "read": read,
            "torch_float32": lambda: [torch_layer(x, index, weight, a, b) for a, b in pairs],
            "plain_float32": ours(plain_moe_layer, full),
            "plain_bfloat16": ours(plain_moe_layer, half),
            "planes_4": ours(moe_layer, planes[4]),
            "planes_8": ours(moe_layer, planes[8]),
        },
        rounds,
    )
    weights = visited * 3 * HIDDEN * INNER
    tables = visited * (2 * INNER + HIDDEN)
    bytes_read = {
        "torch_float32": 4 * weights,
        "plain_float32": 4 * weights,
        "plain_bfloat16": 2 * weights,
        "planes_4": weights // 2 + tables * 32,
        "planes_8": weights + tables * 512,
    }
    bandwidth = read_bytes / statistics.median(seconds["read"])
    return {
        "read_gigabytes_per_s": round(bandwidth / 1e9, 2),
        "experts_visited": visited,
        "layers": {
            name: {
                "bytes": count,
                "floor_us": round(1e6 * count / bandwidth, 1),
                "seconds": summary(seconds[name], LAYERS),
                "over_floor": round(
                    statistics.median(seconds[name]) / LAYERS / (count / bandwidth), 3
                ),
                "speed_over_torch_float32": median_ratio(seconds["torch_float32"], seconds[name]),
            }
            for name, count in bytes_read.items()
        },
    }


def main() -> None:
    """Run, print a line per measurement, and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "path": backend().name,
        "torch": torch.__version__,
        "rounds": options.rounds,
        "layer": bench_layers(options.rounds),
        "linear": [],
    }
    print(json.dumps(record["layer"], indent=1))
    for columns, rows in SHAPES:
        for tokens in TOKENS:
            line = bench_linear(columns, rows, tokens, options.rounds)
            record["linear"].append(line)
            speeds = line["speed_over_torch_float32"]
            print(f"{columns} -> {rows}, {tokens} tokens: {speeds}", flush=True)
    text = json.dumps(record, indent=1) + "\n"
    partial = options.out.with_suffix(".part")
    partial.write_text(text)
    partial.replace(options.out)


if __name__ == "__main__":
    main()
