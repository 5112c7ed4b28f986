"""How much each routing policy cuts the barrier, with intervals.

    python benchmarks/routing_barrier.py [--data DIR] [--replications 20] [--out FILE.json]

Workloads: the Azure 2023 conversation and Mooncake conversation traces from DIR (the bundled tables
where DIR has none), and independent lognormal lengths. r = 8 workers, all slots full; every policy
meets the same requests in the same steps. Printed, each with its 99.5 % interval over replications
(about 95 % for a table as a whole):
the barrier wait (slowest minus mean worker, share of the cycle), how much of the excess load of the
fullest worker is gone, and the throughput gained, against random refill.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from models.bundle import Bundle, LatencyCoefficients
from policies.catalog import ROUTING
from traces.length_laws import lognormal
from traces.lengths import LengthPairs
from traces.readers import read_trace
from traces.workloads import bundled_lengths
from twin.bundle import simulate_saturated
from twin.output_statistics import paired_difference, replications
from twin.saturated_run import SaturatedRun

PAPER = LatencyCoefficients(
    alpha_attention=0.00165,
    beta_attention=50,
    alpha_ffn=0.083,
    beta_ffn=100,
    alpha_communication=0.022,
    beta_communication=20,
)
R = 8
BATCHES = (256, 64)
CONFIDENCE = 0.995
RESULTS = Path(__file__).parent / "results" / "routing_barrier.json"


def workloads(data: Path | None) -> dict[str, LengthPairs]:
    files = {
        "azure-2023-conversation": "azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz",
        "mooncake-conversation": "mooncake-conversation/conversation_trace.first-30-min.jsonl.gz",
    }
    found = {}
    for name, file in files.items():
        if data is not None and (data / file).exists():
            found[name] = read_trace(data / file).lengths()
        else:
            found[f"{name} (bundled table)"] = bundled_lengths(name)
    found["lognormal 1000 / 300, sigma 1"] = lognormal(1000, 300, 1.0, 1.0, 0.0)
    return found


def excess_load(run: SaturatedRun) -> float:
    """By how much the fullest worker exceeds the mean, on average over cycles."""
    return float((run.max_load_tokens / run.mean_load_tokens).mean()) - 1.0


def compare(lengths: LengthPairs, batch: int, count: int) -> dict[str, Any]:
    bundle = Bundle(coefficients=PAPER, batch_per_worker=batch)
    runs = {
        routing: [
            simulate_saturated(
                bundle, R, lengths, seed=1, replication=k, num_cycles=8000, routing=routing
            )
            for k in range(count)
        ]
        for routing in ROUTING
    }
    excess = {name: np.array([excess_load(run) for run in some]) for name, some in runs.items()}
    x = {
        name: np.array([run.throughput_per_instance for run in some]) for name, some in runs.items()
    }
    rows = {}
    for name, some in runs.items():
        wait = replications([run.barrier_wait_share for run in some], confidence=CONFIDENCE)
        cut = replications(1.0 - excess[name] / excess["random"], confidence=CONFIDENCE)
        gain = paired_difference(x[name] / x["random"], np.ones(count), confidence=CONFIDENCE)
        rows[name] = {
            "barrier wait": [wait.mean, wait.half_width],
            "excess load cut": [cut.mean, cut.half_width],
            "throughput gain": [gain.mean, gain.half_width],
            "verdict": {"a": "gain", "b": "loss"}.get(gain.verdict, gain.verdict),
        }
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--data", type=Path)
    options.add_argument("--replications", type=int, default=20)
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    report: dict[str, Any] = {}
    for name, lengths in workloads(given.data).items():
        for batch in BATCHES:
            rows = compare(lengths, batch, given.replications)
            report[f"{name}, B = {batch}"] = rows
            print(f"{name}, r = {R}, B = {batch}")
            print(f"  {'':<18}{'barrier wait':>18}{'excess load cut':>20}{'throughput':>20}")
            for routing, row in rows.items():
                numbers = [
                    f"{100 * mean:.2f} +- {100 * half:.2f} %"
                    for mean, half in (
                        row["barrier wait"],
                        row["excess load cut"],
                        row["throughput gain"],
                    )
                ]
                text = f"{numbers[0]:>18}{numbers[1]:>20}{numbers[2]:>20}"
                print(f"  {routing:<18}{text}  {row['verdict']}")
    given.out.parent.mkdir(exist_ok=True)
    partial = given.out.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(given.out)


if __name__ == "__main__":
    main()
