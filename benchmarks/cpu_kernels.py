"""CPU expert kernels against torch float32 and bfloat16, one thread, in one interleaved run.

    python benchmarks/cpu_kernels.py [--rounds 9] [--shapes 1408x2048 ...] [--out FILE.json]

The floor comes first: bytes of planes and table over the read bandwidth of one core. Then, for
every shape and number of tokens, each width from contiguous arrays and from pages of 32 KiB, widths
mixed from block to block, and torch's linear with float32 and bfloat16 weights. Every contender
works through blocks of its own that do not fit the caches together, so weights come from memory;
rounds take turns among the contenders. A time is CPU microseconds per block in one round; printed
are the median and the least of the rounds, recorded also the quartiles. Ratios compare rounds of
the same number and are the median of these. Last, a whole layer with a router that visits every
expert equally, at single widths and mixed, and the errors of every path.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_kernel_blocks import block_bytes, paged_copies, random_block

from kernels.cpu import ContiguousExperts, PagedExperts, backend, block_matmul, moe_layer
from kernels.reference import block_matmul as reference_matmul

RESULTS = Path(__file__).parent / "results" / "cpu_kernels.json"
BITS = range(2, 9)
MIXED = (2, 4, 8, 3, 6)
TOKENS = (1, 2, 4, 8, 16)
SHAPES = ("1408x2048", "2816x2048", "2048x1408")
DENSE_BLOCKS, SLOW_PATH_BLOCKS, TORCH_BLOCKS = 48, 8, 24
LAYER_EXPERTS, LAYER_TOP, LAYER_HIDDEN, LAYER_INNER = 20, 4, 2048, 1408

Work = Callable[[], Any]


def read_bandwidth() -> float:
    """Bytes/s at which one core reads memory: the largest of 256 MiB of floats, best of five."""
    data = np.ones(64 << 20, np.float32)
    best = min(cpu_seconds(data.max) for _ in range(5))
    return data.nbytes / best


def cpu_seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def over(blocks: Sequence[Any], x: np.ndarray, path: str | None = None) -> tuple[Work, int]:
    out = np.empty((len(x), blocks[0].rows), np.float32)

    def work() -> None:
        for block in blocks:
            block_matmul(x, block, out=out, path=path)

    return work, len(blocks)


def over_torch(weights: Sequence[torch.Tensor], x: np.ndarray) -> tuple[Work, int]:
    inputs = torch.from_numpy(x).to(weights[0].dtype)

    def work() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs, weight)

    return work, len(weights)


def interleaved(contenders: dict[str, tuple[Work, int]], rounds: int) -> dict[str, list[float]]:
    """CPU microseconds per block of every contender in every round, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, (work, blocks) in contenders.items():
            times[name].append(1e6 * cpu_seconds(work) / blocks)
    return {name: values[1:] for name, values in times.items()}


def summary(times: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "median_us": round(middle, 1),
        "least_us": round(min(times), 1),
        "quartiles_us": [round(low, 1), round(high, 1)],
    }


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    return round(statistics.median(s / f for s, f in zip(slow, fast, strict=True)), 3)


def measure_shape(shape: str, tokens: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    rows, columns = map(int, shape.split("x"))
    rng = np.random.default_rng(rows + columns)
    dense = max(6, min(DENSE_BLOCKS, (1 << 27) // (rows * columns // 2)))
    blocks = {q: [random_block(rng, rows, columns, q) for _ in range(dense)] for q in BITS}
    mixed = [blocks[MIXED[i % len(MIXED)]][i] for i in range(dense // len(MIXED) * len(MIXED))]
    paged = {q: paged_copies(same, rng) for q, same in blocks.items()}
    paged_mixed = paged_copies(mixed, rng)
    full = [torch.randn(rows, columns) for _ in range(min(dense, TORCH_BLOCKS))]
    half = [w.bfloat16() for w in full]
    results = []
    for count in tokens:
        x = rng.standard_normal((count, columns)).astype(np.float32)
        contenders = {"torch fp32": over_torch(full, x), "torch bf16": over_torch(half, x)}
        for q in BITS:
            contenders[f"q{q}"] = over(blocks[q], x)
            contenders[f"q{q} paged"] = over(paged[q], x)
        contenders |= {"mixed": over(mixed, x), "mixed paged": over(paged_mixed, x)}
        if count == 1:
            for path in backend().available:
                if path in ("avx2", "portable") and path != backend().name:
                    for q in (2, 4, 8):
                        some = blocks[q][:SLOW_PATH_BLOCKS]
                        contenders[f"q{q} {path}"] = over(some, x, path)
        times = interleaved(contenders, rounds)
        uniform = [sum(times[f"q{q}"][r] for q in MIXED) / len(MIXED) for r in range(rounds)]
        for name, values in times.items():
            row: dict[str, Any] = {"shape": shape, "tokens": count, "contender": name}
            row |= summary(values)
            row["over_torch_fp32"] = ratio(times["torch fp32"], values)
            row["over_torch_bf16"] = ratio(times["torch bf16"], values)
            if name.endswith("paged"):
                row["paged_over_contiguous"] = ratio(values, times[name.removesuffix(" paged")])
            if name == "mixed":
                row["mixed_over_uniform"] = ratio(values, uniform)
            results.append(row)
            print_row(row)
    return results


def print_floor(shape: str, bandwidth: float) -> dict[str, float]:
    rows, columns = map(int, shape.split("x"))
    floor = {f"q{q}": 1e6 * block_bytes(rows, columns, q) / bandwidth for q in BITS}
    floor |= {
        f"torch {n}": 1e6 * rows * columns * b / bandwidth for n, b in (("fp32", 4), ("bf16", 2))
    }
    print(f"floor {shape} us: " + ", ".join(f"{n} {t:.0f}" for n, t in floor.items()))
    return {name: round(value, 1) for name, value in floor.items()}


def print_row(row: dict[str, Any]) -> None:
    extra = {k: v for k, v in row.items() if k.endswith(("contiguous", "uniform"))}
    print(
        f"{row['shape']:>10} T={row['tokens']:<3} {row['contender']:<14} "
        f"median {row['median_us']:>8.1f} us  least {row['least_us']:>8.1f}  "
        f"x{row['over_torch_fp32']:.2f} fp32  x{row['over_torch_bf16']:.2f} bf16  "
        + " ".join(f"{k} {v}" for k, v in extra.items()),
        flush=True,
    )


def our_layer(layer: Any, x: Any, weight: Any, index: Any) -> None:
    moe_layer(x, index, weight, layer, "silu")


def over_routes(call: Callable[[Any], None], routes: Sequence[Any]) -> tuple[Work, int]:
    def work() -> None:
        for index in routes:
            call(index)

    return work, len(routes)


def torch_layer(experts: Any, x: torch.Tensor, weight: torch.Tensor, index: Any) -> None:
    out = torch.zeros(x.shape)
    for expert in np.unique(index):
        token, slot = map(torch.from_numpy, np.nonzero(index == expert))
        both = torch.nn.functional.linear(x[token], experts[expert][0])
        gate, up = both.chunk(2, dim=1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, experts[expert][1])
        out.index_add_(0, token, weight[token, slot, None] * y.float())


def measure_layer(rounds: int) -> list[dict[str, Any]]:
    """A layer of 20 experts of Qwen1.5-MoE's shape; successive calls visit all of them equally."""
    rng = np.random.default_rng(7)
    shapes = ((2 * LAYER_INNER, LAYER_HIDDEN), (LAYER_HIDDEN, LAYER_INNER))
    widths = {f"q{q}": [(q, q)] * LAYER_EXPERTS for q in sorted(MIXED)}
    n = len(MIXED)
    widths["mixed"] = [(MIXED[e % n], MIXED[(e + 2) % n]) for e in range(LAYER_EXPERTS)]
    layers: dict[str, Any] = {
        name: ContiguousExperts([random_block(rng, *shapes[m], w[m]) for w in of for m in (0, 1)])
        for name, of in widths.items()
    }
    pages = paged_copies(layers["mixed"].blocks, rng)[0].weights
    layers["mixed paged"] = PagedExperts(pages, 0, LAYER_EXPERTS, LAYER_HIDDEN, LAYER_INNER)
    full = [tuple(torch.randn(*s) for s in shapes) for _ in range(LAYER_EXPERTS)]
    half = [tuple(w.bfloat16() for w in pair) for pair in full]
    results = []
    for tokens in (1, 4, 16):
        x = rng.standard_normal((tokens, LAYER_HIDDEN)).astype(np.float32)
        weight = np.full((tokens, LAYER_TOP), 0.25, np.float32)
        calls = [
            (np.arange(tokens * LAYER_TOP) + c * tokens * LAYER_TOP) % LAYER_EXPERTS
            for c in range(LAYER_EXPERTS // LAYER_TOP)
        ]
        routes = [c.reshape(tokens, LAYER_TOP).astype(np.int32) for c in calls]
        contenders = {
            name: over_routes(partial(our_layer, layer, x, weight), routes)
            for name, layer in layers.items()
        }
        inputs, gates = torch.from_numpy(x), torch.from_numpy(weight)
        for name, experts in (("fp32", full), ("bf16", half)):
            call = partial(torch_layer, experts, inputs.to(experts[0][0].dtype), gates)
            contenders[f"torch {name}"] = over_routes(call, routes)
        times = interleaved(contenders, rounds)
        uniform = [sum(times[f"q{q}"][r] for q in MIXED) / n for r in range(rounds)]
        for name, values in times.items():
            row: dict[str, Any] = {"shape": "layer", "tokens": tokens, "contender": name}
            row |= summary(values)
            row["over_torch_fp32"] = ratio(times["torch fp32"], values)
            row["over_torch_bf16"] = ratio(times["torch bf16"], values)
            if name == "mixed":
                row["mixed_over_uniform"] = ratio(values, uniform)
            if name == "mixed paged":
                row["paged_over_contiguous"] = ratio(values, times["mixed"])
            results.append(row)
            print_row(row)
    return results


def measure_errors() -> dict[str, float]:
    """Largest error of a block over the largest output, for every path and width 2 to 8."""
    rng = np.random.default_rng(3)
    worst = dict.fromkeys(backend().available, 0.0)
    for bits in BITS:
        block = random_block(rng, 256, 2048, bits)
        x = rng.standard_normal((3, 2048)).astype(np.float32)
        expected = reference_matmul(x, block.planes, block.table, bits, 2048)
        for path in worst:
            error = np.max(np.abs(block_matmul(x, block, path=path) - expected))
            worst[path] = max(worst[path], float(error / np.max(np.abs(expected))))
    return worst


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bandwidth = read_bandwidth()
    print(f"{processor()}; {backend()}; reads {bandwidth / 1e9:.1f} GB/s; load {os.getloadavg()}")
    floors = {shape: print_floor(shape, bandwidth) for shape in options.shapes}
    load_before = os.getloadavg()[0]
    with torch.inference_mode():
        rows = [r for s in options.shapes for r in measure_shape(s, options.tokens, options.rounds)]
        rows += measure_layer(options.rounds)
    for row in rows:
        floor = floors.get(row["shape"], {}).get(row["contender"].removesuffix(" paged"))
        if floor:
            row["over_floor"] = round(row["least_us"] / floor, 2)
    result = {
        "processor": processor(),
        "backend": str(backend()),
        "torch": torch.__version__,
        "load_average": [load_before, os.getloadavg()[0]],
        "read_bytes_per_s": round(bandwidth),
        "floor_us": floors,
        "relative_error": measure_errors(),
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("relative errors", result["relative_error"], "load", result["load_average"])


if __name__ == "__main__":
    main()
