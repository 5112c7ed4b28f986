"""Tokens per second while widths move, against fixed widths of the same bytes.

    python benchmarks/moving_throughput.py [--repeats 5] [--batches 1,4,16] [--groups 4]

A mixture-of-experts model with random weights (6 layers of 16 experts, 113 M expert weights, more
than the caches hold) is quantized once into a cache folder and served by the engine on the CPU, one
kernel thread. Long sequences alternate with short ones, so the KV cache breathes:

* planned: the precision policy shrinks, restores and exchanges at step boundaries, a thread copies
  planes into the arena, every copy is verified;
* fixed: the same engine and requests, widths of the same time-averaged bytes that never move, no
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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers

from policies.orders import BitWidths, PrecisionOrders
from policies.precision_tables import BlockTables
from runtime.engine.build import build_engine
from runtime.engine.core import EngineCore
from runtime.engine.frames import NewSequence, Sampling
from runtime.engine.settings import EngineSettings, PrefixSettings
from runtime.engine.weight_pages import checkpoint_tables
from runtime.model.kv_layout import KvLayout
from runtime.model.spec_config import read_model_spec
from runtime.page_movement import PageMover
from runtime.quantize import quantize_checkpoint
from runtime.quantized_checkpoint import QuantizedCheckpoint

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


@dataclass(frozen=True)
class Case:
    """Requests of one batch size on one checkpoint."""

    folder: Path
    batch: int
    groups: int

    def kv_pages(self) -> int:
        """Pages of the keys and values of all sequences at their longest."""
        layout = KvLayout(read_model_spec(self.folder).kv_layers, torch.float32, PAGE_BYTES)
        blocks = -(-(PROMPT_TOKENS + NEW_TOKENS) // layout.block_tokens)
        return self.batch * blocks * layout.block_pages

    def settings(self, arena_pages: int, **chosen: Any) -> EngineSettings:
        return EngineSettings(
            model=str(self.folder),
            dtype="float32",
            memory_bytes=arena_pages * PAGE_BYTES,
            page_bytes=PAGE_BYTES,
            max_running=self.batch,
            prefill_tokens=256,
            prefix=PrefixSettings(place="none"),
            decision_log_calls=0,
            **chosen,
        )

    def planned(self, arena_pages: int) -> Measured:
        """Under the precision policy."""
        share = self.kv_pages() / arena_pages  # of the cache at its peak
        settings = self.settings(
            arena_pages,
            hot_bits=3,
            precision_settings={
                "low_share": 0.1 * share,
                "target_share": 0.2 * share,
                "high_share": 0.4 * share,
                "calm_steps": 8,
                "plan_interval_s": 0.2,
                "link_bytes_per_s": 4e9,
                "link_share": 0.25,
            },
        )
        return self.measured(EngineCore(build_engine(settings)))

    def fixed(self, arena_pages: int, bits: np.ndarray) -> Measured:
        """At widths that never move."""
        core = EngineCore(build_engine(self.settings(arena_pages, precision=int(bits.max()))))
        mover = core.parts.mover
        assert mover is not None
        narrower = np.flatnonzero(bits < bits.max())
        nothing = np.zeros(0, np.int64)
        drops = BitWidths(narrower, bits[narrower])
        mover.plan(PrecisionOrders(1, drops, BitWidths(nothing, nothing)), step=0)
        while not mover.at_rest:
            core.idle()
        assert mover.tables.bits.tolist() == bits.tolist()
        return self.measured(core)

    def measured(self, core: EngineCore) -> Measured:
        """All requests served; the engine is closed."""
        parts = core.parts
        mover: PageMover | None = parts.mover
        assert mover is not None
        rng = np.random.default_rng(self.batch)
        steps = 0
        weight_bytes = 0.0
        lowest, highest = 9.0, 0.0
        begin, engine_begin = time.perf_counter(), time.thread_time()
        for group in range(self.groups):
            new_tokens = NEW_TOKENS if group % 2 == 0 else NEW_TOKENS // 4
            prompt_tokens = PROMPT_TOKENS * new_tokens // NEW_TOKENS
            for number in range(self.batch if group % 2 == 0 else 4 * self.batch):
                prompt = rng.integers(3, parts.info.vocabulary, size=prompt_tokens)
                core.add(
                    NewSequence(
                        sequence_id=f"{group}-{number}",
                        prompt=tuple(prompt.tolist()),
                        sampling=Sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
                    )
                )
            while core.has_work:
                core.step()
                steps += 1
                weight_bytes += parts.arena.ledger.held_pages("weights") * PAGE_BYTES
                mean = float(mover.tables.bits.mean())
                lowest, highest = min(lowest, mean), max(highest, mean)
        seconds, engine_s = time.perf_counter() - begin, time.thread_time() - engine_begin
        stats = core.stats()
        parts.close()
        if stats.failed_steps_total or stats.refused_total:
            raise SystemExit(f"not all requests were served: {stats}")
        return Measured(
            stats.generated_tokens_total / seconds,
            stats.generated_tokens_total / engine_s,
            weight_bytes / steps,
            stats.moved_bytes_total,
            stats.planner_moves_total,
            (lowest, highest),
        )


def fixed_widths(tables: BlockTables, weight_bytes: float) -> np.ndarray:
    """q bits for the last blocks and q + 1 for the first, together about ``weight_bytes``."""
    held = tables.bytes_
    widths = np.asarray(tables.bits)
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
    parser.add_argument("--groups", type=int, help="of requests; by default as the batch needs")
    parser.add_argument(
        "--model", type=Path, help="a quantized checkpoint, instead of the one made"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    folder = arguments.model or quantized_folder()
    tables = checkpoint_tables(QuantizedCheckpoint.open(folder), PAGE_BYTES)
    totals = tables.bytes_.sum(axis=0)
    by_width = dict(zip(tables.bits, (totals // PAGE_BYTES).tolist(), strict=True))
    results = []
    for batch in (int(b) for b in arguments.batches.split(",")):
        # at the peak of the cache the weights must fall from 5 bits to about 3.5
        case = Case(folder, batch, arguments.groups or max(4, 16 // batch))
        kv = case.kv_pages()
        room = (by_width[3] + by_width[4]) // 2
        arena = int((room + kv) / 0.95)
        probe = case.planned(arena)
        bits = fixed_widths(tables, probe.mean_weight_bytes)
        roomy = by_width[5] + 2 * kv
        pairs: dict[str, list[float]] = {"planned": [], "fixed": [], "again": []}
        engine: dict[str, list[float]] = {"planned": [], "fixed": [], "again": []}
        planned = probe
        for turn in range(arguments.repeats):
            names = list(pairs)
            for name in names[turn % 3 :] + names[: turn % 3]:
                if name == "planned":
                    found = planned = case.planned(arena)
                else:
                    found = case.fixed(roomy, bits)
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
    arguments.out.write_text(
        json.dumps(
            {"machine": platform.processor() or platform.machine(), "rows": results}, indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
