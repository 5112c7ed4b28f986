"""Theory against the simulated twin for r = 1..32: worst error, standard error, regret.

    python benchmarks/theory_against_twin.py [--data DIR] [--out FILE.json] [--jobs N]

Workloads: the Azure 2023 conversation and Mooncake conversation traces (read from DIR, left out
with a message where absent) and four laws: geometric, two-point, fixed in random phases, Pareto.
Each is run under both semantics; the prediction is the exact level of that semantics. Replications
start from the stationary law. There are as many as the spread of the exact law asks for (a stopping
rule on the observed spread alone would stop heavy tails early, biased), and more until the observed
standard error of X is at most 0.4 %; 0.5 % is the bar.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from models.attention_ffn import exact_law, predict, slot_moments
from models.barrier import law_cycle_s, law_cycle_sd_s
from models.bundle import Bundle, LatencyCoefficients
from traces.length_laws import fixed, geometric, pareto
from traces.lengths import LengthPairs
from traces.readers import read_trace
from twin.bundle import simulate_saturated
from twin.output_statistics import ratio_replications

RATIOS = tuple(range(1, 33))
TARGET = 0.004
MOST_REPLICATIONS = 16_384
PAPER = LatencyCoefficients(
    alpha_attention=0.00165,
    beta_attention=50,
    alpha_ffn=0.083,
    beta_ffn=100,
    alpha_communication=0.022,
    beta_communication=20,
)


def workloads(data: Path) -> dict[str, tuple[LengthPairs, Bundle]]:
    """Name -> length law and barrier bundle, in the paper's unit of time."""
    found: dict[str, tuple[LengthPairs, Bundle]] = {}
    for name, file in (
        ("Azure 2023 conversation", "azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz"),
        (
            "Mooncake conversation",
            "mooncake-conversation/conversation_trace.first-30-min.jsonl.gz",
        ),
    ):
        path = data / file
        if not path.exists():
            print(f"left out: {name} ({path} is absent)")
            continue
        lengths = read_trace(path).lengths()
        for batch in (256, 64):
            found[f"{name}, B = {batch}"] = (
                lengths,
                Bundle(coefficients=PAPER, batch_per_worker=batch),
            )

    def hardware(*values: float) -> LatencyCoefficients:
        names = ("alpha_attention", "beta_attention", "alpha_ffn", "beta_ffn")
        given = dict(zip(names, values[:4], strict=True))
        return LatencyCoefficients(
            **given, alpha_communication=values[4], beta_communication=values[5]
        )

    found["geometric 100/500, B = 256"] = (
        geometric(100, 500),
        Bundle(coefficients=PAPER, batch_per_worker=256),
    )
    found["two-point 100 / 4000, B = 64"] = (
        LengthPairs.from_pairs([200, 200], [100, 4000], [0.9, 0.1]),
        Bundle(coefficients=hardware(0.00165, 50, 0.166, 100, 0, 20), batch_per_worker=64),
    )
    found["fixed 100/500, random phases, B = 64"] = (
        fixed(100, 500),
        Bundle(coefficients=hardware(0.01, 20, 0.5, 60, 0, 20), batch_per_worker=64),
    )
    found["Pareto 2.5, B = 64"] = (
        pareto(200, 300, 2.5, 200_000),
        Bundle(coefficients=hardware(0.00165, 50, 0.083, 50, 0, 10), batch_per_worker=64),
    )
    return found


def simulated_x(job: tuple[LengthPairs, Bundle, int, int, int]) -> tuple[float, float, int]:
    """Mean X, its standard error and the number of replications at one ratio."""
    lengths, bundle, r, cycles, wanted = job
    tokens: list[float] = []
    seconds: list[float] = []
    while True:
        for replication in range(len(tokens), wanted):
            run = simulate_saturated(
                bundle, r, lengths, seed=7, replication=replication, num_cycles=cycles
            )
            tokens.append(float(run.live_slots.sum()))
            seconds.append(bundle.price(r) * float(run.cycle_s.sum()))
        found = ratio_replications(tokens, seconds)
        if found.standard_error <= TARGET * found.mean or wanted >= MOST_REPLICATIONS:
            return found.mean, found.standard_error, wanted
        wanted *= 2


def compare(
    name: str, lengths: LengthPairs, bundle: Bundle, pool: ProcessPoolExecutor
) -> dict[str, object]:
    """All ratios of one workload under one semantics."""
    predicted = predict(lengths, bundle, RATIOS, level="exact").throughput_per_instance
    outputs = lengths.output_tokens.astype(float)
    lifetime = float(lengths.weight @ outputs**2 / (lengths.weight @ outputs))
    cycles = bundle.microbatches * int(np.clip(lifetime, 200, 20_000))
    law = exact_law(lengths, bundle.batch_per_worker)
    mean_s = law_cycle_s(bundle, law, RATIOS)
    needed = [
        max(8, math.ceil((law_cycle_sd_s(bundle, law, r) / (TARGET * mean)) ** 2))
        for r, mean in zip(RATIOS, mean_s, strict=True)
    ]
    jobs = [(lengths, bundle, r, cycles, n) for r, n in zip(RATIOS, needed, strict=True)]
    results = list(pool.map(simulated_x, jobs))
    x = np.asarray([mean for mean, _, _ in results])
    error = np.asarray([se for _, se, _ in results]) / x
    difference = predicted / x - 1.0
    best = int(np.argmax(predicted))
    row = {
        "workload": name,
        "semantics": bundle.semantics,
        "theta_tokens": slot_moments(lengths).theta_tokens,
        "worst_difference": float(np.abs(difference).max()),
        "worst_at_r": RATIOS[int(np.argmax(np.abs(difference)))],
        "worst_standard_error": float(error.max()),
        "recommended_r": RATIOS[best],
        "simulated_best_r": RATIOS[int(np.argmax(x))],
        "regret": float(1.0 - x[best] / x.max()),
        "most_replications": max(n for _, _, n in results),
        "cycles": cycles,
        "difference_by_r": [float(d) for d in difference],
        "standard_error_by_r": [float(e) for e in error],
    }
    print(
        f"{name:38s} {bundle.semantics:9s} worst {100 * row['worst_difference']:.2f} % at r = "
        f"{row['worst_at_r']}, se <= {100 * row['worst_standard_error']:.2f} %, r = "
        f"{row['recommended_r']} (twin {row['simulated_best_r']}), regret "
        f"{100 * row['regret']:.2f} %",
        flush=True,
    )
    return row


def main() -> None:
    """Run all workloads and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("SERVING_TWIN_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/theory.json"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("forkserver")) as pool:
        for name, (lengths, bundle) in workloads(arguments.data).items():
            rows.append(compare(name, lengths, bundle, pool))
            pingpong = replace(bundle, semantics="pingpong", microbatches=2)
            rows.append(compare(name, lengths, pingpong, pool))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
