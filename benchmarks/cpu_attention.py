"""Attention over pages against torch's over contiguous and over gathered keys, one thread.

    python benchmarks/cpu_attention.py [--rounds 15] [--out FILE.json]

Decode: 8 sequences of 512 tokens, a new token each. Prompt: one sequence of 512 tokens at once.
8 heads over 4 heads of keys and values, 64 numbers each. Contenders: the compiled kernel, torch
over pages (runtime/model/attention_torch.py gathers them), torch's scaled_dot_product_attention
over keys and values that lie in one contiguous float32 array, which no paged cache has. Every round
works through several layers that do not fit the second-level cache together; rounds take turns
among the contenders. A time is CPU microseconds per layer, writing the new tokens included; the
ratio is that of rounds of the same number. Floors: bytes of keys and values over the read bandwidth
of a core, and multiply-adds over its measured peak.
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
from torch.nn.functional import scaled_dot_product_attention

from kernels.cpu import backend
from runtime.model.attention_cpu import CpuAttention
from runtime.model.attention_torch import TorchAttention
from runtime.model.kv_cache import KvCache
from runtime.model.kv_layout import KvLayout, LayerKv, default_page_bytes
from runtime.model.step import StepBatch
from runtime.page_arena import PageArena

RESULTS = Path(__file__).parent / "results" / "cpu_attention.json"
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 4, 64, 12
TOKENS, SEQUENCES = 512, 8
SCALE = HEAD_DIM**-0.5

Work = Callable[[int], Any]  # of a layer


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def read_bandwidth() -> float:
    """Bytes/s at which one core reads memory: the largest of 256 MiB of floats, best of five."""
    data = np.ones(64 << 20, np.float32)
    return data.nbytes / min(cpu_seconds(data.max) for _ in range(5))


def peak_products() -> float:
    """Multiply-adds/s of one core: torch's product of matrices of 1,024, best of nine."""
    a = torch.rand(1024, 1024)
    return 1024**3 / min(cpu_seconds(lambda: a @ a) for _ in range(9))


def filled_cache(dtype: torch.dtype) -> tuple[KvCache, StepBatch, StepBatch]:
    """Sequences 0 to 7 of 511 tokens and an empty sequence 8; steps of decoding and of a prompt."""
    layers = [LayerKv(kv_heads=KV_HEADS, head_dim=HEAD_DIM)] * LAYERS
    layout = KvLayout(layers, dtype, default_page_bytes(layers, dtype))
    pages = (SEQUENCES + 1) * (TOKENS // layout.block_tokens) * layout.block_pages
    cache = KvCache(PageArena(pages, page_bytes=layout.page_bytes), layout)
    for sequence in range(SEQUENCES + 1):
        cache.add(sequence)
    for _ in range(TOKENS // layout.block_tokens):  # pages of sequences take turns
        for sequence in range(SEQUENCES + 1):
            assert cache.grow(sequence, layout.block_tokens)
            cache.advance(sequence, layout.block_tokens)
    filler = TorchAttention(cache)
    for sequence in range(SEQUENCES + 1):
        cache.set_tokens(sequence, 0)
        filler.begin(step([sequence], TOKENS, 0))
        for layer in range(LAYERS):
            queries, keys, values = new_tokens(TOKENS, layer)
            filler(layer, queries, keys, values, scale=SCALE)
        cache.set_tokens(sequence, TOKENS - 1 if sequence < SEQUENCES else 0)
    return cache, step(range(SEQUENCES), 1, TOKENS - 1), step([SEQUENCES], TOKENS, 0)


def step(sequences, count: int, start: int) -> StepBatch:
    n = len(sequences)
    first = np.arange(n + 1) * count
    return StepBatch(
        tuple(sequences), np.zeros(n * count, np.int64), first, np.full(n, start), first[1:] - 1
    )


def new_tokens(count: int, seed: int) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(count, heads, HEAD_DIM, generator=numbers) for heads in shapes]


def contiguous(count: int, sequences: int) -> Work:
    """torch over [layers, sequences, heads, tokens, head_dim] arrays; nothing is written."""
    stored = torch.randn(LAYERS, 2, sequences, KV_HEADS, TOKENS, HEAD_DIM)
    queries = torch.randn(LAYERS, sequences, HEADS, count, HEAD_DIM)
    return lambda layer: scaled_dot_product_attention(
        queries[layer], *stored[layer], is_causal=count > 1, scale=SCALE, enable_gqa=True
    )


def over_pages(attention: Any, batch: StepBatch) -> Work:
    inputs = [new_tokens(len(batch.tokens), layer) for layer in range(LAYERS)]

    def work(layer: int) -> Any:
        if layer == 0:
            attention.begin(batch)
        return attention(layer, *inputs[layer], scale=SCALE)

    return work


def measure(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """CPU microseconds per layer of every round and contender."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            seconds = cpu_seconds(lambda work=work: [work(layer) for layer in range(LAYERS)])
            if number:
                found[name].append(seconds / LAYERS * 1e6)
    return found


def summary(times: dict[str, list[float]], floor_us: float) -> dict[str, Any]:
    ours = times["kernel"]
    rows = {}
    for name, of in times.items():
        low, middle, high = statistics.quantiles(of, n=4)
        ratios = [a / b for a, b in zip(of, ours, strict=True)]
        rows[name] = {
            "median_us": middle,
            "quartiles_us": [low, high],
            "least_us": min(of),
            "times_of_kernel": statistics.median(ratios),
        }
    return {"floor_us": floor_us, "contenders": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bandwidth, peak = read_bandwidth(), peak_products()
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "paths": str(backend()),
        "read_bytes_per_s": bandwidth,
        "multiply_adds_per_s": peak,
        "cases": {},
    }
    products = {
        "decode": 2 * SEQUENCES * HEADS * HEAD_DIM * TOKENS,
        "prompt": HEADS * HEAD_DIM * TOKENS * (TOKENS + 1),
    }
    for dtype in (torch.float32, torch.bfloat16):
        cache, decode, prompt = filled_cache(dtype)
        for case, batch in (("decode", decode), ("prompt", prompt)):
            sequences = len(batch.sequences)
            works = {
                "kernel": over_pages(CpuAttention(cache), batch),
                "torch over pages": over_pages(TorchAttention(cache), batch),
                "torch over contiguous": contiguous(len(batch.tokens) // sequences, sequences),
            }
            num_bytes = sequences * TOKENS * cache.layout.kv(0).token_bytes(dtype)
            floor = max(num_bytes / bandwidth, products[case] / peak) * 1e6
            rows = summary(measure(works, options.rounds), floor)
            result["cases"][f"{case}, {str(dtype).removeprefix('torch.')}"] = rows
            print(f"{case} {dtype}: floor {floor:.0f} us per layer")
            for name, row in rows["contenders"].items():
                print(
                    f"  {name:24} {row['median_us']:8.0f} us  least {row['least_us']:8.0f}"
                    f"  {row['times_of_kernel']:5.2f} x kernel"
                )
    partial = options.out.with_suffix(".json.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(options.out)


if __name__ == "__main__":
    main()
