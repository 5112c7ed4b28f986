"""How fast bundles are simulated, per CPU second on one core.

    python benchmarks/bundle_speed.py [--trace FILE] [--repeat 5] [--out FILE.json]

One run measures, beside each other:

- saturated, r = 8, B = 256, geometric outputs of mean 211, four engines' worth: an event-per-token
  SimPy model (``token_events.py``), the SimPy engine and the compiled loops. Requests per second
  count completed requests. All must give the same cycle times.
- cost against the number of steps.
- 32 ratios times 10 replications on a trace (default: the bundled Azure workload).
- 1,000,000 requests with arrivals at 90 % of capacity, in a process of its own, with its memory.

Printed: median, smallest and largest of the repetitions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from token_events import TokenEventBundle

from models.bundle import Bundle, LatencyCoefficients
from models.streams import stream
from traces.length_laws import geometric
from traces.lengths import LengthPairs
from traces.readers import read_trace
from traces.workloads import bundled_lengths
from twin.bundle import simulate_saturated
from twin.open_loop import simulate_open_loop
from twin.output_statistics import replications
from twin.saturated_case import SaturatedCase
from twin.stages import StageTimes

RESULTS = Path(__file__).parent / "results" / "bundle_speed.json"
# Seconds per layer; the values the paper fitted to DeepSeek-V3 on Ascend 910C, taken as us.
PAPER = LatencyCoefficients(
    alpha_attention=0.00165e-6,
    beta_attention=50e-6,
    alpha_ffn=0.083e-6,
    beta_ffn=100e-6,
    alpha_communication=0.022e-6,
    beta_communication=20e-6,
)
R, B = 8, 256
REQUESTS = 1_000_000


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    answer = work()
    return time.process_time() - start, answer


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "smallest": min(values),
        "largest": max(values),
        "repetitions": len(values),
    }


def saturated(engine: str, num_cycles: int, bundle: Bundle, lengths: LengthPairs) -> Any:
    return simulate_saturated(bundle, R, lengths, seed=1, num_cycles=num_cycles, engine=engine)


def token_events(num_cycles: int, bundle: Bundle, lengths: LengthPairs) -> TokenEventBundle:
    model = TokenEventBundle(
        SaturatedCase(
            times=StageTimes(bundle=bundle, attention_per_ffn=R, simulated_layers=1),
            lengths=lengths,
            num_cycles=num_cycles,
            seed=1,
            replication=0,
            start="stationary",
            routing="random",
            faults=(),
        )
    )
    model.run()
    return model


def compare_engines(repeat: int) -> dict[str, Any]:
    lengths = geometric(prompt_tokens=100, mean_output_tokens=211)
    bundle = Bundle(coefficients=PAPER, batch_per_worker=B)
    first_call_s, _ = cpu_seconds(lambda: saturated("compiled", 10, bundle, lengths))
    found: dict[str, Any] = {"first call of the compiled loops, s": first_call_s}
    cycles = {"event per token": 400, "simpy": 20_000, "compiled": 400_000}
    head: dict[str, list[float]] = {}
    for name, n in cycles.items():
        rates = []
        for _ in range(repeat):
            if name == "event per token":
                seconds, model = cpu_seconds(lambda n=n: token_events(n, bundle, lengths))
                completed, series = model.completed, model.cycle_s
            else:
                seconds, run = cpu_seconds(lambda e=name, n=n: saturated(e, n, bundle, lengths))
                completed, series = run.completed_requests, run.cycle_s.tolist()
            rates.append(completed / seconds)
        head[name] = series
        found[f"{name}, requests/s"] = spread(rates)
    shortest = cycles["event per token"]
    equal = [series[:shortest] == head["simpy"][:shortest] for series in head.values()]
    equal.append(head["simpy"] == head["compiled"][: cycles["simpy"]])
    if not all(equal):
        raise SystemExit("the engines disagree")
    found["identical cycle times"] = True
    return found


def pingpong_engines(repeat: int) -> dict[str, Any]:
    lengths = geometric(prompt_tokens=100, mean_output_tokens=211)
    bundle = Bundle(
        coefficients=PAPER, batch_per_worker=B, semantics="pingpong", microbatches=2, num_layers=61
    )
    saturated("compiled", 10, bundle, lengths)
    found = {}
    for engine, n in (("simpy", 10_000), ("compiled", 400_000)):
        rates = []
        for _ in range(repeat):
            seconds, run = cpu_seconds(lambda e=engine, n=n: saturated(e, n, bundle, lengths))
            rates.append(run.completed_requests / seconds)
        found[f"{engine}, m = 2, requests/s"] = spread(rates)
    return found


def cost_of_steps(repeat: int) -> dict[str, Any]:
    lengths = geometric(prompt_tokens=100, mean_output_tokens=211)
    bundle = Bundle(coefficients=PAPER, batch_per_worker=B)
    found = {}
    for engine, base in (("simpy", 10_000), ("compiled", 200_000)):
        for times in (1, 2, 4, 8):
            n = base * times
            seconds = [
                cpu_seconds(lambda e=engine, n=n: saturated(e, n, bundle, lengths))[0]
                for _ in range(repeat)
            ]
            found[f"{engine}, us per step at {n} steps"] = spread([s / n * 1e6 for s in seconds])
    return found


def sweep(lengths: LengthPairs, repeat: int) -> dict[str, Any]:
    bundle = Bundle(coefficients=PAPER, batch_per_worker=B)
    ratios, count, num_cycles = range(1, 33), 10, 3000

    def all_runs() -> list[list[float]]:
        return [
            [
                simulate_saturated(
                    bundle, r, lengths, seed=1, replication=k, num_cycles=num_cycles
                ).throughput_per_instance
                for k in range(count)
            ]
            for r in ratios
        ]

    seconds, worst = [], 0.0
    for _ in range(repeat):
        used, table = cpu_seconds(all_runs)
        seconds.append(used)
        worst = max(replications(row).relative_standard_error for row in table)
    return {
        "workload": lengths.name or f"{lengths.num_requests} requests",
        "cycles per run": num_cycles,
        "CPU s": spread(seconds),
        "worst relative standard error": worst,
    }


def open_loop(lengths: LengthPairs, semantics: str, microbatches: int, answers: Any) -> None:
    bundle = Bundle(
        coefficients=PAPER,
        batch_per_worker=B,
        semantics=semantics,
        microbatches=microbatches,
        num_layers=61,
    )
    full = simulate_saturated(bundle, R, lengths, seed=1, num_cycles=4000)
    tokens_per_s = full.tokens_per_s_per_instance * bundle.price(R)
    rng = stream(1, "requests of the benchmark")
    prompts, outputs = lengths.sample(rng, REQUESTS)
    mean_output = float(np.dot(lengths.weight, lengths.output_tokens))
    arrivals = np.cumsum(rng.exponential(mean_output / (0.9 * tokens_per_s), REQUESTS))
    seconds, run = cpu_seconds(
        lambda: simulate_open_loop(bundle, R, arrivals, prompts, outputs, seed=1)
    )
    status = Path("/proc/self/status").read_text()
    peak_mib = int(status.split("VmHWM:")[1].split()[0]) / 1024
    answers.put((seconds, peak_mib, run.totals.steps, run.completed, float(run.ttft_s.mean())))


def open_loop_runs(lengths: LengthPairs, repeat: int) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    found = {}
    for semantics, m in (("barrier", 1), ("pingpong", 2)):
        rows = []
        for _ in range(repeat):
            answers = spawn.Queue()
            child = spawn.Process(target=open_loop, args=(lengths, semantics, m, answers))
            child.start()
            rows.append(answers.get())
            child.join()
        found[f"{semantics}, m = {m}"] = {
            "CPU s": spread([row[0] for row in rows]),
            "peak MiB": max(row[1] for row in rows),
            "steps": rows[0][2],
            "completed": rows[0][3],
            "mean TTFT s": rows[0][4],
        }
    return found


def show(table: dict[str, Any], indent: str = "  ") -> None:
    for name, value in table.items():
        if isinstance(value, dict) and "median" in value:
            numbers = [value[key] for key in ("median", "smallest", "largest")]
            text = " ".join(f"{x:>13,.2f}" for x in numbers)
            print(f"{indent}{name:<44}{text}")
        elif isinstance(value, dict):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        else:
            print(f"{indent}{name:<44}{value}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trace", type=Path, help="request trace of the sweep and the arrivals")
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    lengths = (
        read_trace(given.trace).lengths()
        if given.trace
        else bundled_lengths("azure-2023-conversation")
    )
    packages = ("numpy", "numba", "simpy")
    report: dict[str, Any] = {
        "machine": {
            "processor": next(
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        }
    }
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "saturated, r = 8, B = 256, barrier": lambda: compare_engines(given.repeat),
        "saturated, r = 8, B = 256, pingpong, 61 layers": lambda: pingpong_engines(given.repeat),
        "cost of steps": lambda: cost_of_steps(given.repeat),
        "32 ratios x 10 replications": lambda: sweep(lengths, given.repeat),
        "1,000,000 requests at 90 % of capacity": lambda: open_loop_runs(lengths, given.repeat),
    }
    print(f"{'':<46}{'median':>13} {'smallest':>13} {'largest':>13}")
    for name, work in parts.items():
        report[name] = work()
        print(name)
        show(report[name])
    given.out.parent.mkdir(exist_ok=True)
    partial = given.out.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(given.out)


if __name__ == "__main__":
    main()
