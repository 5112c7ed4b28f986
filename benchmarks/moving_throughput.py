"""Tokens per second while widths move, against fixed widths of the same bytes.

    python benchmarks/moving_throughput.py [--repeats 5] [--batches 1,4,16]

A mixture-of-experts model with random weights (6 layers of 16 experts, 113 M expert weights, more
than the caches hold) is quantized once into a cache folder and decoded on the CPU, one kernel
thread. Long sequences alternate with short ones, so the KV cache breathes:

* planned: the precision policy shrinks, restores and exchanges at step boundaries, a thread copies
  planes into the arena, every copy is verified;
* fixed: the same loop and requests, widths of the same time-averaged bytes that never move, no
  policy: q bits for some blocks and q + 1 for the rest;
* fixed again: how far two equal runs lie apart on this machine.

The three alternate within one run, in turning order; the figure is the median over the rounds, by
the wall clock and by the CPU time of the engine's thread, which other load disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers

from policies.precision import PrecisionPolicy
from policies.precision_state import PrecisionSettings
from runtime.decode_loop import DecodeLoop
from runtime.loaded_model import LoadedModel, load_quantized
from runtime.paged_experts import PagedExpertLayers
from runtime.precision_control import PrecisionControl
from runtime.quantize import quantize_checkpoint

PAGE_BYTES = 32 * 1024
PROMPT_TOKENS, NEW_TOKENS = 48, 96
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "serving-twin"
RESULTS = Path(__file__).parent / "results" / "moving_throughput.json"


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    tokens_per_engine_cpu_s: float
    mean_weight_bytes: float
    moved_bytes: int
    decisions: dict[str, int]
    widths: tuple[float, float]


def quantized_folder() -> Path:
    """The model, made once."""
    folder = CACHE / "moving-throughput-6x16x768x512"
    if not (folder / "quantized" / "pagedweight.json").exists():
        torch.manual_seed(0)
        config = transformers.Qwen2MoeConfig(
            vocab_size=2048,
            hidden_size=768,
            num_hidden_layers=6,
            num_attention_heads=12,
            num_key_value_heads=4,
            num_experts=16,
            num_experts_per_tok=2,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
            max_position_embeddings=4096,
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / "source")
        quantize_checkpoint(
            folder / "source", folder / "quantized", existing="resume", threads=os.cpu_count() or 1
        )
    return folder / "quantized"


def pages_of_run(loaded: LoadedModel, batch: int) -> int:
    tokens = PROMPT_TOKENS + NEW_TOKENS
    per_layer = -(-tokens // loaded.cache.tokens_per_page)
    return batch * per_layer * loaded.config.layers


def run(
    batch: int, groups: int, arena_pages: int, bits: np.ndarray | int, policy: bool
) -> Measured:
    loaded = load_quantized(
        quantized_folder(), arena_pages=arena_pages, bits=bits, page_bytes=PAGE_BYTES
    )
    control = None
    if policy:
        share = pages_of_run(loaded, batch) / arena_pages  # of the cache at its peak
        settings = PrecisionSettings(
            low_share=0.1 * share,
            target_share=0.2 * share,
            high_share=0.4 * share,
            calm_steps=8,
            plan_interval_s=0.2,
            link_bytes_per_s=4e9,
            link_share=0.25,
        )
        control = PrecisionControl(
            PrecisionPolicy(
                loaded.tables, arena_pages=arena_pages, page_bytes=PAGE_BYTES, settings=settings
            ),
            loaded.mover,
            loaded.arena,
            layers=loaded.config.layers,
            experts=loaded.config.experts,
            calibrated_mass=(np.full((6, 16), 1 / 16), np.full((6, 16), 1 / 32)),
            hot_bits=3,
        )
    experts = PagedExpertLayers(
        loaded.config,
        loaded.arena,
        loaded.mover.tables,
        observe=control.observe if control else None,
    )
    start = time.perf_counter()
    loop = DecodeLoop(
        loaded.decoder,
        loaded.cache,
        experts,
        clock=lambda: time.perf_counter() - start,
        control=control,
        mover=loaded.mover,
        max_running=batch,
    )
    rng = np.random.default_rng(batch)
    tokens = steps = 0
    weight_bytes = 0.0
    lowest, highest = 9.0, 0.0
    begin, engine_begin = time.perf_counter(), time.thread_time()
    for group in range(groups):
        for _ in range(batch if group % 2 == 0 else 4 * batch):
            new_tokens = NEW_TOKENS if group % 2 == 0 else NEW_TOKENS // 4
            loop.add(
                rng.integers(3, 2048, size=PROMPT_TOKENS * new_tokens // NEW_TOKENS), new_tokens
            )
        while loop.running or loop.waiting:
            report = loop.step()
            tokens += report.generated_tokens
            steps += 1
            weight_bytes += loaded.arena.ledger.held_pages("weights") * PAGE_BYTES
            mean = float(loaded.mover.tables.bits.mean())
            lowest, highest = min(lowest, mean), max(highest, mean)
    seconds, engine_s = time.perf_counter() - begin, time.thread_time() - engine_begin
    report = loaded.mover.report()
    loaded.close()
    return Measured(
        tokens / seconds,
        tokens / engine_s,
        weight_bytes / steps,
        report.moved_bytes,
        dict(control.decisions) if control else {},
        (lowest, highest),
    )


def fixed_widths(loaded: LoadedModel, weight_bytes: float) -> np.ndarray:
    """q bits for the last blocks and q + 1 for the first, together about ``weight_bytes``."""
    held = loaded.tables.bytes_
    widths = np.asarray(loaded.tables.bits)
    totals = held.sum(axis=0)
    level = int(np.searchsorted(totals, weight_bytes, side="right")) - 1
    if not 0 <= level < len(widths) - 1:
        raise SystemExit(f"no width holds {weight_bytes:,.0f} bytes")
    order = np.random.default_rng(0).permutation(len(held))
    extra = np.cumsum((held[:, level + 1] - held[:, level])[order])
    raised = order[: int(np.searchsorted(extra, weight_bytes - totals[level], side="right"))]
    bits = np.full(len(held), widths[level])
    bits[raised] = widths[level + 1]
    return bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", default="1,4,16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_quantized(quantized_folder(), arena_pages=20_000, bits=2, page_bytes=PAGE_BYTES)
    totals = loaded.tables.bytes_.sum(axis=0)
    by_width = dict(zip(loaded.tables.bits, (totals // PAGE_BYTES).tolist(), strict=True))
    results = []
    for batch in (int(b) for b in arguments.batches.split(",")):
        # at the peak of the cache the weights must fall from 5 bits to about 3.5
        kv = pages_of_run(loaded, batch)
        groups = max(4, 16 // batch)
        room = (by_width[3] + by_width[4]) // 2
        arena = int((room + kv) / 0.95)
        first = np.full(loaded.mover.tables.num_blocks, 4)
        probe = run(batch, groups, arena, first, True)
        bits = fixed_widths(loaded, probe.mean_weight_bytes)
        roomy = by_width[5] + 2 * kv
        pairs: dict[str, list[float]] = {"planned": [], "fixed": [], "again": []}
        engine: dict[str, list[float]] = {"planned": [], "fixed": [], "again": []}
        planned = probe
        for turn in range(arguments.repeats):
            names = list(pairs)
            for name in names[turn % 3 :] + names[: turn % 3]:
                if name == "planned":
                    found = planned = run(batch, groups, arena, first, True)
                else:
                    found = run(batch, groups, roomy, bits, False)
                pairs[name].append(found.tokens_per_s)
                engine[name].append(found.tokens_per_engine_cpu_s)
        losses = [1 - p / f for p, f in zip(pairs["planned"], pairs["fixed"], strict=True)]
        noise = [1 - p / f for p, f in zip(pairs["again"], pairs["fixed"], strict=True)]
        by_engine = [1 - p / f for p, f in zip(engine["planned"], engine["fixed"], strict=True)]
        row = {
            "batch": batch,
            "loss_percent_of_engine_cpu_time": 100 * statistics.median(by_engine),
            "loss_percent_of_engine_cpu_time_range": [100 * min(by_engine), 100 * max(by_engine)],
            "planned_tokens_per_s": statistics.median(pairs["planned"]),
            "fixed_tokens_per_s": statistics.median(pairs["fixed"]),
            "loss_percent": 100 * statistics.median(losses),
            "loss_percent_range": [100 * min(losses), 100 * max(losses)],
            "fixed_against_itself_percent": 100 * statistics.median(noise),
            "fixed_against_itself_range": [100 * min(noise), 100 * max(noise)],
            "mean_weight_mib": probe.mean_weight_bytes / 2**20,
            "widths_mean_bits": probe.widths,
            "moved_mib": planned.moved_bytes / 2**20,
            "decisions": planned.decisions,
        }
        results.append(row)
        print(
            f"batch {batch:2}: planned {row['planned_tokens_per_s']:8.1f} tokens/s, fixed "
            f"{row['fixed_tokens_per_s']:8.1f}, loss {row['loss_percent']:+.1f} % "
            f"({min(losses):+.1%}..{max(losses):+.1%}), the fixed run against itself "
            f"{row['fixed_against_itself_percent']:+.1f} % ({min(noise):+.1%}..{max(noise):+.1%}); "
            f"of the engine's CPU time {row['loss_percent_of_engine_cpu_time']:+.1f} % "
            f"({min(by_engine):+.1%}..{max(by_engine):+.1%}); "
            f"mean bits {probe.widths[0]:.2f}..{probe.widths[1]:.2f}, "
            f"moved {row['moved_mib']:,.0f} MiB, {planned.decisions}"
        )
    loaded.close()
    RESULTS.write_text(
        json.dumps(
            {"machine": platform.processor() or platform.machine(), "rows": results}, indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
