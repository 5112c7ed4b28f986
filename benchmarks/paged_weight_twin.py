"""Speed of the paged-weight twin: engine steps per second of CPU time, by policy.

    nice python benchmarks/paged_weight_twin.py [--requests N] [--repetitions N] [--out FILE.json]

Qwen3-30B-A3B (12,288 weight blocks) on an H200 with 30 GB, Azure conversation in bursts, at most 64
sequences. Compared in one run, on the same requests: widths that the hull planner moves, the same
with policy and page table asked at every boundary instead of only where their answer can differ,
and one fixed width. The floor is what SimPy needs for as many events that do nothing.
Goal: 100,000 steps of a moving run in less than 60 s.

Measured values: benchmarks/results/paged_weight_twin.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import simpy

from models.scenario_file import parse_paged_weight
from models.streams import stream
from models.workload import OpenLoopRequests, resolve_workload
from traces.whole_file import write_whole
from twin.clock import call_at, cyclic_collector_off
from twin.paged_weight_engine import PagedWeightEngine
from twin.paged_weight_log import PagedWeightRun
from twin.paged_weight_model import PagedWeightModel, build_model
from twin.paged_weight_moving import MovingWeights
from twin.paged_weight_weights import FixedWeights

RESULTS = Path(__file__).parent / "results" / "paged_weight_twin.json"
GOAL_STEPS, GOAL_S = 100_000, 60.0
SCENARIO: dict[str, Any] = {
    "workload": {
        "arrivals": {
            "kind": "on_off",
            "on_rate_per_s": 20,
            "off_rate_per_s": 4,
            "mean_on_s": 20,
            "mean_off_s": 40,
        },
    },
    "llm": {"model": "Qwen3-30B-A3B"},
    "hardware": {"device": "H200", "memory_gb": 30},
    "serving": {"max_running": 64},
}


def serve(model: PagedWeightModel, requests: OpenLoopRequests, how: str) -> PagedWeightRun:
    """One run: ``hull``, ``hull, every boundary`` or ``4 bits``."""
    weights = (
        FixedWeights(model, 4, 0)
        if how == "4 bits"
        else MovingWeights(model, "hull", 0, every_boundary="every" in how)
    )
    return PagedWeightEngine(model, weights, requests, policy=how).run()


def empty_events_s(count: int) -> float:
    """CPU seconds of SimPy for as many events that do nothing."""
    env = simpy.Environment()
    left = count

    def again(event: object) -> None:
        nonlocal left
        left -= 1
        if left:
            call_at(env, env.now + 0.01, again)

    begin = time.process_time()
    with cyclic_collector_off():
        call_at(env, 0.0, again)
        env.run()
    return time.process_time() - begin


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    tables = {
        **SCENARIO,
        "workload": {**SCENARIO["workload"], "num_requests": chosen.requests},
    }
    model = build_model(parse_paged_weight(tables))
    workload = resolve_workload(model.scenario.workload, seed=1)
    requests = workload.open_loop_requests(stream(1, "arrivals"))
    serve(
        model,
        requests.__class__(
            arrival_s=requests.arrival_s[:50],
            prompt_tokens=requests.prompt_tokens[:50],
            output_tokens=requests.output_tokens[:50],
        ),
        "hull",
    )  # compiles the planner's loops
    found: dict[str, Any] = {}
    for how in ("hull", "hull, every boundary", "4 bits"):
        seconds, run = [], None
        for _ in range(chosen.repetitions):
            begin = time.process_time()
            run = serve(model, requests, how)
            seconds.append(time.process_time() - begin)
        assert run is not None
        steps = run.totals.steps + run.totals.idle_boundaries
        floor = empty_events_s(steps)
        median = statistics.median(seconds)
        found[how] = {
            "steps": steps,
            "cpu_s": {"median": median, "least": min(seconds), "most": max(seconds)},
            "steps_per_s": steps / median,
            "s_per_100k_steps": GOAL_STEPS * median / steps,
            "floor_s": floor,
            "ratio_to_floor": median / floor,
            "simulated_s": run.end_s,
            "mean_bits": run.totals.bits_s / run.totals.busy_s,
            "decisions": dict(run.decisions),
        }
        row = found[how]
        print(
            f"{how:22} {steps:8,} steps {median:6.1f} s ({min(seconds):.1f}..{max(seconds):.1f}), "
            f"{row['steps_per_s']:8,.0f} steps/s, 100,000 in {row['s_per_100k_steps']:.1f} s, "
            f"{row['ratio_to_floor']:.0f} times SimPy's own {floor:.2f} s; "
            f"{row['mean_bits']:.2f} bits, {row['decisions']}"
        )
    result = {
        "model": model.shape.name,
        "blocks": model.sizes.num_blocks,
        "machine": f"{platform.processor() or platform.machine()}, CPU time",
        "goal": f"{GOAL_STEPS:,} steps in < {GOAL_S:g} s",
        "goal_met": found["hull"]["s_per_100k_steps"] < GOAL_S,
        "runs": found,
    }
    write_whole(chosen.out, (json.dumps(result, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
