"""What token-balanced refill of free slots does to the barrier, on traffic as observed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models.bundle import Bundle, LatencyCoefficients
from traces.length_laws import fixed, geometric, lognormal
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
WORKLOADS: dict[str, Callable[[], LengthPairs]] = {
    "azure": lambda: bundled_lengths("azure-2023-conversation"),
    "mooncake": lambda: bundled_lengths("mooncake-conversation"),
    "lognormal": lambda: lognormal(1000, 300, 1.0, 1.0, 0.0),
}


def runs(
    lengths: LengthPairs, routing: str, count: int = 6, batch: int = 256
) -> list[SaturatedRun]:
    bundle = Bundle(coefficients=PAPER, batch_per_worker=batch)
    return [
        simulate_saturated(
            bundle, 8, lengths, seed=5, replication=k, num_cycles=3000, routing=routing
        )
        for k in range(count)
    ]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_longest_prompt_to_the_lightest_worker_removes_most_of_the_barrier(name: str) -> None:
    random, balanced = (runs(WORKLOADS[name](), r) for r in ("random", "least_token_load"))
    wait = [np.array([run.barrier_wait_share for run in some]) for some in (random, balanced)]
    assert paired_difference(*wait).verdict == "a"
    assert replications(1 - wait[1] / wait[0]).low > 0.7
    throughput = [[run.throughput_per_instance for run in some] for some in (balanced, random)]
    assert paired_difference(*throughput).verdict == "a"


@pytest.mark.parametrize("routing", ["round_robin", "least_token_load", "power_of_two"])
def test_with_equal_prompts_there_is_nothing_to_choose(routing: str) -> None:
    lengths = geometric(prompt_tokens=100, mean_output_tokens=50)
    chosen, random = (runs(lengths, name, 10) for name in (routing, "random"))
    wait = [[run.barrier_wait_share for run in some] for some in (chosen, random)]
    difference = paired_difference(*wait)
    assert abs(difference.mean) < 4 * difference.standard_error
    assert difference.standard_error < 0.05 * np.mean(wait[1])


def test_the_mean_load_in_slots_is_the_one_the_lengths_predict(
    data_file: Callable[[str], Path],
) -> None:
    trace = read_trace(data_file("azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz"))
    lengths = trace.lengths()
    p, d = lengths.prompt_tokens.astype(float), lengths.output_tokens.astype(float)
    theta = float((d * p + d * (d - 1) / 2).sum() / d.sum())
    for routing in ("random", "least_token_load"):
        slots = [run.mean_load_tokens.mean() / 256 for run in runs(lengths, routing, 10)]
        estimate = replications(slots)
        assert estimate.standard_error < 0.004 * theta
        assert abs(estimate.mean - theta) < 4 * estimate.standard_error


def test_every_prompt_of_one_length_and_output_of_one_token_leaves_no_barrier() -> None:
    for run in runs(fixed(700, 1), "random", 1, batch=16):
        assert run.barrier_wait_share == 0.0
