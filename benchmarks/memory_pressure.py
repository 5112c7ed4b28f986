"""A load that exhausts the memory for keys and values, on a quantized checkpoint.

    python benchmarks/small_moe_training.py
    runtime quantize ~/.cache/serving-twin/small-moe SMALL-MOE-Q
    python benchmarks/memory_pressure.py SMALL-MOE-Q

The same requests in the same memory under the planner and under fixed widths: how many sequences
run at once, what is preempted, whether anything fails. Under the planner also the widths over time,
whether they shrank before anybody was preempted and whether they came back, and perplexity at the
widths of the start, at the narrowest ones that the run reached, and at the fixed ones. The text is
held out from the small model's own domains, or a file (``--text``), for checkpoints that have
learned something else. Written: ``results/memory_pressure.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
from small_moe_text import read_domains

import runtime.engine.build as build_module
from models.workload import resolve_workload
from models.workload_settings import FixedLengths, PoissonArrivals, Workload
from runtime.engine.build import build_engine
from runtime.engine.core import EngineCore
from runtime.engine.frames import NewSequence, Sampling
from runtime.engine.settings import EngineSettings, EngineSettingsError, PrefixSettings
from runtime.replay_arrivals import ReplayArrivals
from runtime.replay_engine import EngineReplay
from runtime.replay_prompts import ReplayPrompts
from runtime.replay_requests import ReplayRequests, replay_requests
from runtime.store.sizes import size_bytes
from runtime.text.tokenizer import TextTokenizer
from traces.environment import commit, versions

RESULTS = Path(__file__).parent / "results"
CHUNK_TOKENS = 256


def settings_of(
    a: argparse.Namespace, precision: str | int, *, memories: int = 1
) -> EngineSettings:
    return EngineSettings(
        model=str(a.checkpoint),
        threads=a.threads,
        memory_bytes=memories * size_bytes(a.memory, "--memory"),
        page_bytes=a.page_bytes,
        max_running=a.requests,
        precision=precision,
        prefix=PrefixSettings(place="none"),
        decision_log_calls=0,
    )


def requests_of(a: argparse.Namespace) -> ReplayRequests:
    lengths = FixedLengths(prompt_tokens=a.prompt, output_tokens=a.output)
    workload = Workload(
        lengths=lengths, arrivals=PoissonArrivals(rate_per_s=1.0), num_requests=a.requests
    )
    return replay_requests(resolve_workload(workload, seed=a.seed), seed=a.seed)


def under_load(
    a: argparse.Namespace, precision: str | int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the load did, and the widths of all blocks at the start and at the narrowest."""
    parts = build_engine(settings_of(a, precision))
    try:
        requests = requests_of(a)
        prompts = ReplayPrompts(requests, seed=a.seed, vocabulary=parts.info.vocabulary)
        arrivals = ReplayArrivals(requests, concurrency=a.requests)
        driver = EngineReplay(parts, requests, prompts, arrivals, settle_s=a.settle)
        start = np.array([]) if parts.mover is None else parts.mover.tables.bits.copy()
        began_cpu_s = time.process_time()
        run = driver.run()
        totals = run.totals
        ttft_s = run.fates.first_token_s - run.arrival_s
        row = {
            "precision": precision,
            "fits": True,
            "failed": run.fates.num_failed,
            "answers_whole": bool(
                np.array_equal(run.fates.generated_tokens, requests.output_tokens)
            ),
            "running_peak": totals.running_peak,
            "running_mean": totals.running_s / totals.busy_s,
            "kv_pages_peak": totals.kv_pages_peak,
            "arena_pages": parts.info.arena_pages,
            "preemptions": run.counters["preemptions_total"],
            "steps": totals.steps,
            "wall_s": run.end_s,
            "cpu_s": time.process_time() - began_cpu_s,
            "ttft_p50_s": float(np.nanmedian(ttft_s)),
            "bits_mean": totals.bits_s / totals.busy_s,
            "bits_start": totals.first_bits,
            "bits_least": totals.least_bits,
            "bits_end": totals.last_bits,
            "bits_at_first_preemption": (
                None
                if math.isnan(totals.bits_at_first_preemption)
                else totals.bits_at_first_preemption
            ),
            "planner_moves": run.counters["planner_moves"],
        }
        columns = run.series.columns()
        kept = np.unique(np.linspace(0, len(columns["time_s"]) - 1, 100).astype(int))
        names = ("time_s", "mean_bits", "kv_pages", "running", "waiting", "preemptions")
        row["series"] = {name: np.round(columns[name][kept], 4).tolist() for name in names}
        least = driver.narrowest_bits if len(driver.narrowest_bits) else start
        return row, {"start": start, "least": least}
    finally:
        parts.close()


def chunks_of(a: argparse.Namespace) -> list[tuple[int, ...]]:
    """Token ids of the text in pieces of ``CHUNK_TOKENS``, of all domains alike."""
    tokenizer = TextTokenizer.open(a.checkpoint)
    assert tokenizer is not None, "the checkpoint has no tokenizer"
    if a.text is not None:
        texts = [a.text.read_text(errors="replace")]
    else:
        texts = ["\n".join(domain.held_out) for domain in read_domains()]
    each = a.text_tokens // len(texts)
    chunks = []
    for text in texts:
        tokens = tuple(tokenizer.encode(text[: 16 * each]))[:each]
        chunks += [tokens[at : at + CHUNK_TOKENS] for at in range(0, each, CHUNK_TOKENS)]
    return [chunk for chunk in chunks if len(chunk) > 1]


def perplexity(a: argparse.Namespace, bits: np.ndarray, chunks: list[tuple[int, ...]]) -> float:
    """Of a text, with every block at the width it had."""
    planned = build_module.plan_widths

    def given(*arguments: Any, **keywords: Any) -> Any:
        return dataclasses.replace(planned(*arguments, **keywords), bits=bits.astype(np.int64))

    build_module.plan_widths = given
    try:
        narrowest = int(bits.min())
        parts = build_engine(settings_of(a, narrowest, memories=4))
    finally:
        build_module.plan_widths = planned
    try:
        assert np.array_equal(parts.mover.tables.bits, bits)
        core, total, count = EngineCore(parts), 0.0, 0
        sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        for at, chunk in enumerate(chunks):
            core.add(NewSequence(sequence_id=str(at), prompt=chunk, sampling=sampling))
            while core.has_work:
                for output in core.step():
                    assert not output.error, output.error
                    total -= sum(entry.logprob for entry in output.prompt_logprobs)
                    count += len(output.prompt_logprobs)
        return math.exp(total / count)
    finally:
        parts.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--memory", default="16MiB")
    parser.add_argument("--page-bytes", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=22)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--widths", type=int, nargs="*", default=[3, 4, 5])
    parser.add_argument("--text", type=Path, default=None)
    parser.add_argument("--text-tokens", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--settle", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "memory_pressure.json")
    a = parser.parse_args()
    rows, widths = [], {}
    for precision in ("hull", *a.widths):
        try:
            row, bits = under_load(a, precision)
        except EngineSettingsError as error:
            rows.append({"precision": precision, "fits": False, "reason": str(error)})
            continue
        rows.append(row)
        if precision == "hull":
            widths.update(bits)
        else:
            widths[f"{precision} bits"] = bits["start"]
        shown = {k: v for k, v in row.items() if k not in ("series", "planner_moves")}
        print(json.dumps(shown), flush=True)
    chunks = chunks_of(a)
    found = {name: perplexity(a, bits, chunks) for name, bits in widths.items()}
    print(json.dumps(found), flush=True)
    result = {
        "checkpoint": a.checkpoint.resolve().name,
        "memory": a.memory,
        "requests": a.requests,
        "prompt_tokens": a.prompt,
        "output_tokens": a.output,
        "machine": f"{platform.machine()}, {a.threads} threads, load {os.getloadavg()[0]:.1f}",
        "versions": versions(("serving-twin", "torch", "numpy")),
        "commit": commit(),
        "runs": rows,
        "perplexity": {
            "text": "held-out text of eight domains" if a.text is None else a.text.name,
            "tokens": sum(map(len, chunks)),
            **found,
            "increase": found["least"] / found["start"] - 1.0,
        },
    }
    a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
