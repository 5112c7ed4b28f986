"""Tokens per CPU second of several engines on one checkpoint, in one run, engine by engine in turn.

    python benchmarks/serving_throughput.py \\
      --worker "transformers fp32" "python benchmarks/serving_transformers.py CKPT" \\
      --server "vllm fp32" m http://127.0.0.1:8801 "vllm serve CKPT --port 8801 ..." \\
      --server "llama.cpp q8_0" m http://127.0.0.1:8804 \\
          "LLAMA/bin/python benchmarks/serving_llama_cpp.py m.gguf --port 8804" \\
      --server "runtime fp32" MODEL http://127.0.0.1:8805 "runtime serve CKPT --port 8805"

Every engine is started once and stays; every round asks each of them, in an order that rotates, for
1 and 8 concurrent answers of 64 tokens to new prompts of 128, greedy and without end tokens, and
apart from that for one token only, which gives prefill. CPU seconds are those of the engine's
whole process tree, so that other load on the machine counts little; wall figures are what was seen.
Decode is what the answers took beyond prefill. Written after every round:
``results/serving_throughput.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from serving_engines import Engine, Measured, ServerEngine, WorkerEngine

RESULTS = Path(__file__).parent / "results"
PREFILL_REQUESTS = 8
"""At least so many prompts make one figure of prefill: CPU seconds come in hundredths."""


def prompts(seed: tuple[int, ...], count: int, tokens: int) -> list[list[int]]:
    """New for every seed, so that no cache of prefixes helps."""
    drawn = np.random.default_rng(seed).integers(3, 255, (count, tokens))
    return [[int(token) for token in row] for row in drawn]


def measure(engine: Engine, round_number: int, concurrent: int, a: argparse.Namespace) -> dict:
    batches = max(1, PREFILL_REQUESTS // concurrent)
    first = [
        engine.run(prompts((round_number, concurrent, 1, batch), concurrent, a.prompt), 1)
        for batch in range(batches)
    ]
    whole = engine.run(prompts((round_number, concurrent, 2), concurrent, a.prompt), a.new)
    row: dict[str, Any] = {}
    for unit in ("cpu_s", "wall_s"):
        prefill_s = sum(getattr(one, unit) for one in first) / batches
        whole_s = getattr(whole, unit)
        row[f"prefill_tokens_per_{unit}"] = concurrent * a.prompt / prefill_s
        row[f"decode_tokens_per_{unit}"] = concurrent * (a.new - 1) / (whole_s - prefill_s)
        row[f"output_tokens_per_{unit}"] = concurrent * a.new / whole_s
    row["cpu_share"] = whole.cpu_s / whole.wall_s
    row["first_token_s"] = _median_first(whole)
    row["load"] = os.getloadavg()[0]
    return row


def _median_first(measured: Measured) -> float | None:
    return statistics.median(measured.first_token_s) if measured.first_token_s else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, least and greatest of every figure."""
    found: dict[str, Any] = {"rounds": len(rows)}
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        if values:
            found[name] = {
                "median": statistics.median(values), "min": min(values), "max": max(values)
            }  # fmt: skip
    return found


def table(results: dict[str, dict[str, Any]]) -> Iterable[str]:
    heads = (f"{kind} tokens/cpu s" for kind in ("output", "decode", "prefill"))
    yield f"{'engine':28} {'conc':>4} " + " ".join(f"{head:>22}" for head in heads)
    for engine, by_concurrency in results.items():
        for concurrent, found in by_concurrency.items():
            cells = []
            for kind in ("output", "decode", "prefill"):
                v = found[f"{kind}_tokens_per_cpu_s"]
                cells.append(f"{v['median']:.1f} ({v['min']:.1f}-{v['max']:.1f})")
            yield f"{engine:28} {concurrent:>4} " + " ".join(f"{cell:>22}" for cell in cells)


def engines(a: argparse.Namespace, logs: Path) -> list[Engine]:
    found: list[Engine] = [WorkerEngine(name, cmd, a.threads, logs) for name, cmd in a.worker]
    found += [
        ServerEngine(name, model, url, cmd, a.threads, logs) for name, model, url, cmd in a.server
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", nargs=4, action="append", default=[],
                        metavar=("NAME", "MODEL", "URL", "COMMAND"))  # fmt: skip
    parser.add_argument("--worker", nargs=2, action="append", default=[],
                        metavar=("NAME", "COMMAND"))  # fmt: skip
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128, help="tokens in")
    parser.add_argument("--new", type=int, default=64, help="tokens out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu", type=int, help="run every engine on this core alone")
    parser.add_argument("--logs", type=Path, help="folder for what the engines say")
    parser.add_argument("--out", type=Path, default=RESULTS / "serving_throughput.json")
    a = parser.parse_args()
    logs = a.logs or Path(tempfile.mkdtemp(prefix="serving-throughput-"))
    logs.mkdir(parents=True, exist_ok=True)
    if a.cpu is not None:
        os.sched_setaffinity(0, {a.cpu})  # engines inherit it; this process only waits
    rows: dict[str, dict[int, list[dict[str, Any]]]] = {}
    started: list[Engine] = []
    try:
        for engine in engines(a, logs):
            print(f"starting {engine.name} (log in {logs})", flush=True)
            started.append(engine)
            engine.start()
            for concurrent in a.concurrent:  # first calls compile and allocate
                engine.run(prompts((0, concurrent), concurrent, a.prompt), 8)
        for number in range(1, a.rounds + 1):
            turn = number % len(started)
            for engine in started[turn:] + started[:turn]:
                for concurrent in a.concurrent:
                    row = measure(engine, number, concurrent, a)
                    rows.setdefault(engine.name, {}).setdefault(concurrent, []).append(row)
            in_order = {e.name: rows[e.name] for e in started}
            results = {
                name: {str(k): summary(v) for k, v in found.items()}
                for name, found in in_order.items()
            }
            content = {
                "what": "tokens per second of CPU and of wall time",
                "machine": {
                    "processor": _processor(), "cores": os.cpu_count(),
                    "python": platform.python_version(),
                },
                "prompt_tokens": a.prompt,
                "new_tokens": a.new,
                "threads": a.threads,
                "pinned_to_one_core": a.cpu is not None,
                "results": results,
                "rows": {n: {str(k): v for k, v in f.items()} for n, f in in_order.items()},
            }  # fmt: skip
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text(json.dumps(content, indent=1))
            print(f"round {number}", *table(results), sep="\n", flush=True)
    finally:
        for engine in started:
            engine.stop()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


if __name__ == "__main__":
    main()
