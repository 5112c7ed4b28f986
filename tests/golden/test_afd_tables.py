"""Tables of the A/F theory: the paper's settings, and each level's error against the exact law.

Values to the printed digits. Throughput in 1e-3 tokens per time unit per instance.
"""

import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models.attention_ffn import (
    exact_law,
    geometric_horizon_load,
    horizon_load,
    optimum,
    predict,
    predict_all,
    regret,
    required_requests,
    settling_steps,
    slot_moments,
)
from models.barrier import plug_in_cycle_s
from models.bundle import Bundle, LatencyCoefficients
from models.mean_field import throughput
from traces import length_laws
from traces.lengths import LengthPairs

DataFile = Callable[[str], Path]

PAPER = LatencyCoefficients(
    alpha_attention=0.00165,
    beta_attention=50,
    alpha_ffn=0.083,
    beta_ffn=100,
    alpha_communication=0.022,
    beta_communication=20,
)

# r: mean field, Gaussian, exact barrier, ping-pong m = 2, idle A, idle F
BASE_CASE = """
1  422.4 422.4 422.4 422.3 0.000 0.600
2  563.2 549.7 549.7 553.6 0.024 0.541
3  633.6 611.1 611.0 617.6 0.036 0.479
4  675.9 646.9 646.6 655.1 0.043 0.416
5  704.0 670.1 669.7 679.4 0.049 0.353
6  724.1 686.3 685.7 696.6 0.053 0.289
7  739.2 698.1 697.4 709.1 0.057 0.226
8  751.0 707.2 706.3 718.4 0.059 0.162
9  760.4 714.2 713.3 714.1 0.062 0.098
10 744.8 719.4 718.4 698.3 0.065 0.035
11 703.2 702.2 701.8 681.7 0.094 0.002
12 665.7 665.7 665.7 663.0 0.146 0.000
13 631.8 631.8 631.8 631.8 0.195 0.000
14 601.1 601.1 601.1 601.1 0.238 0.000
15 573.2 573.2 573.2 573.2 0.276 0.000
16 547.6 547.6 547.6 547.6 0.311 0.000
20 464.4 464.4 464.4 464.4 0.423 0.000
24 402.9 402.9 402.9 402.9 0.503 0.000
28 355.7 355.7 355.7 355.7 0.564 0.000
32 318.3 318.3 318.3 318.3 0.611 0.000
"""


def paper_bundle(batch: int, microbatches: int = 1) -> Bundle:
    return Bundle(
        coefficients=PAPER,
        batch_per_worker=batch,
        semantics="barrier" if microbatches == 1 else "pingpong",
        microbatches=microbatches,
        num_layers=61,
    )


def azure_conversation(data_file: DataFile) -> LengthPairs:
    path = data_file("azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return LengthPairs.from_requests(
        [int(row["ContextTokens"]) for row in rows], [int(row["GeneratedTokens"]) for row in rows]
    )


def test_base_case_of_the_paper_in_full() -> None:
    """MC-sampled ping-pong values were printed with an error of up to 0.3."""
    rows = np.array([[float(x) for x in line.split()] for line in BASE_CASE.strip().splitlines()])
    at = rows[:, 0].astype(int) - 1
    lengths = length_laws.geometric(100, 500)
    levels = predict_all(lengths, paper_bundle(256), range(1, 33))
    pingpong = predict(lengths, paper_bundle(256, 2), range(1, 33), level="exact")
    for column, level in ((1, "mean_field"), (2, "gaussian"), (3, "exact")):
        x = 1e3 * levels[level].throughput_per_instance[at]
        assert x == pytest.approx(rows[:, column], abs=0.0501), level
    assert 1e3 * pingpong.throughput_per_instance[at] == pytest.approx(rows[:, 4], abs=0.3)
    assert levels["exact"].attention_idle[at] == pytest.approx(rows[:, 5], abs=5.01e-4)
    assert levels["exact"].ffn_idle[at] == pytest.approx(rows[:, 6], abs=5.01e-4)
    assert pingpong.cycle_s[9] == pytest.approx(333.3, abs=0.1)


def test_time_per_token_of_the_base_case() -> None:
    """38.6 ms at r = 8, m = 2, 61 layers; m = 3: 57 ms for 3 % more throughput."""
    lengths = length_laws.geometric(100, 500)
    two = predict(lengths, paper_bundle(256, 2), range(1, 33), level="exact")
    three = predict(lengths, paper_bundle(256, 3), range(1, 33), level="exact")
    assert two.tpot_s[7] / 1e3 == pytest.approx(38.6, abs=0.1)
    assert three.tpot_s[7] / 1e3 == pytest.approx(57.0, abs=0.6)
    best = three.throughput_per_instance.max() / two.throughput_per_instance.max()
    assert best == pytest.approx(1.03, abs=0.005)


# B, P, mean D; r* stationary and for 10^4 requests; best r and X of five methods; X of m = 2 at the
# mean-field and at the Gaussian r
FIRST_VERSION_GRID = """
128 100 500  7.20  7.07   7  8  8  6  8   634.5  596.5  578.7  611.4   574.2  566.6
256 100 500  9.55  9.30   9 10 10  8 10   760.4  718.4  718.1  737.3   714.2  698.2
512 100 500 10.73 10.22  10 11 11 10 11   837.1  800.6  805.2  818.0   805.2  788.0
256 100 100  2.17  2.17   2  2  2  3  2  1197.7 1197.7 1170.9 1197.7  1119.4 1119.4
256 500 500 17.51 17.25  17 18 18 16 18   512.3  488.3  492.8  498.5   489.4  480.6
"""


@pytest.mark.parametrize("line", FIRST_VERSION_GRID.strip().splitlines())
def test_grid_of_the_papers_first_version(line: str) -> None:
    """Best r at mean field, Gaussian, exact barrier, and with m = 2 and 3 in flight."""
    values = [float(x) for x in line.split()]
    batch, prompt, output = (int(x) for x in values[:3])
    r_infinite, r_horizon = values[3:5]
    best_r, best_x, x_two = values[5:10], values[10:14], values[14:]
    lengths = length_laws.geometric(prompt, output)
    barrier = predict_all(lengths, paper_bundle(batch), range(1, 33))
    two = predict(lengths, paper_bundle(batch, 2), range(1, 33), level="exact")
    three = predict(lengths, paper_bundle(batch, 3), range(1, 33), level="exact")
    assert barrier["mean_field"].r_real == pytest.approx(r_infinite, abs=0.0051)
    _, theta = geometric_horizon_load(prompt, 1.0 / output, 10_000, batch)
    assert optimum(paper_bundle(batch), theta).r_real == pytest.approx(r_horizon, abs=0.0051)
    steps = round(10_000 / batch * output)
    short = predict(lengths, paper_bundle(batch), [1], level="mean_field", horizon_steps=steps)
    assert short.r_real == pytest.approx(r_horizon, abs=0.0051)
    found = (barrier["mean_field"], barrier["gaussian"], barrier["exact"], two, three)
    assert [level.r for level in found] == best_r
    x = [1e3 * float(found[i].throughput_per_instance.max()) for i in (0, 2, 3, 4)]
    assert x == pytest.approx(best_x, abs=0.35)
    at = [barrier["mean_field"].r - 1, barrier["gaussian"].r - 1]
    assert 1e3 * two.throughput_per_instance[at] == pytest.approx(x_two, abs=0.35)


def balanced(batch: int, theta: float) -> Bundle:
    """t_A = 1 with 15 % fixed part, FFN fixed part 0.3, attention and FFN equal at r = 10."""
    return Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=0.85 / (batch * theta),
            beta_attention=0.15,
            alpha_ffn=0.07 / batch,
            beta_ffn=0.3,
        ),
        batch_per_worker=batch,
    )


def errors_and_regrets(lengths: LengthPairs, batch: int) -> tuple[list[float], list[float]]:
    """Worst throughput error and regret, in percent: mean field, plug-in, Gaussian, Pearson III."""
    moments = slot_moments(lengths)
    bundle = balanced(batch, moments.theta_tokens)
    ratios = np.arange(1, 33)
    levels = predict_all(lengths, bundle, ratios)
    exact = levels["exact"]
    plug_in = plug_in_cycle_s(bundle, moments.theta_tokens, moments.nu_tokens, ratios)
    cycles = [levels["mean_field"].cycle_s, plug_in]
    cycles += [levels["gaussian"].cycle_s, levels["pearson3"].cycle_s]
    errors = [100 * float(np.abs(exact.cycle_s / cycle - 1.0).max()) for cycle in cycles]
    best = [int(ratios[np.argmax(throughput(bundle, ratios, cycle))]) for cycle in cycles]
    return errors, [100 * regret(exact, r) for r in best]


# law, B; cv and skew of the worker load; error and regret of each method, percent
ERROR_TABLE = """
fixed      256  0.026 0     3.4 0   0    0     0   0   0   0
geometric  256  0.052 0.12  7.0 1.1 0.15 0     0   0.3 0   0
geometric   32  0.147 0.35  20  3.3 1.2  0     0.2 1.8 0   0
geometric    8  0.295 0.71  43  7.1 4.3  0     0.5 0.5 0.5 0
pareto2.5   64  0.240 2.95  39  14  11   1.1   2.2 5.6 3.0 0.04
pareto2.5    8  0.679 8.4   95  39  33   6.8   17  0   0   0
pareto2.2   64  0.430 3.0   72  25  21   1.6   9.9 3.5 3.5 0
"""
LAWS = {
    "fixed": length_laws.fixed(100, 500),
    "geometric": length_laws.geometric(100, 500),
    "pareto2.5": length_laws.pareto(200, 300, 2.5, 200_000),
    "pareto2.2": length_laws.pareto(200, 300, 2.2, 200_000),
}


@pytest.mark.parametrize("line", ERROR_TABLE.strip().splitlines())
def test_error_of_each_level_against_the_exact_law(line: str) -> None:
    name, *numbers = line.split()
    lengths = LAWS[name]
    batch, cv, skew = int(numbers[0]), float(numbers[1]), float(numbers[2])
    errors, regrets = [float(x) for x in numbers[3:7]], [float(x) for x in numbers[7:]]
    moments = slot_moments(lengths)
    root = batch**0.5
    assert moments.nu_tokens / moments.theta_tokens / root == pytest.approx(cv, abs=6e-4)
    assert moments.skew / root == pytest.approx(skew, rel=0.015, abs=0.0051)
    found_errors, found_regrets = errors_and_regrets(lengths, batch)
    assert found_errors == pytest.approx(errors, rel=0.03, abs=0.06)
    assert found_regrets == pytest.approx(regrets, rel=0.03, abs=0.06)


def test_error_of_each_level_on_the_azure_conversation_trace(data_file: DataFile) -> None:
    lengths = azure_conversation(data_file)
    for batch, errors, regrets in (
        (64, (10, 0.9, 0.5, 0.01), (0.2, 0, 0, 0)),
        (8, (31, 6.0, 3.8, 0.2), (0, 2.4, 0.15, 0.02)),
    ):
        found_errors, found_regrets = errors_and_regrets(lengths, batch)
        assert found_errors == pytest.approx(errors, rel=0.03, abs=0.06)
        assert found_regrets == pytest.approx(regrets, rel=0.03, abs=0.06)


def test_moments_and_precision_of_the_azure_conversation_trace(data_file: DataFile) -> None:
    lengths = azure_conversation(data_file)
    moments = slot_moments(lengths)
    assert moments.theta_tokens == pytest.approx(1226.5, abs=0.05)
    assert moments.nu_tokens == pytest.approx(712.9, abs=0.05)
    assert moments.theta_if_independent / moments.theta_tokens - 1 == pytest.approx(0.078, abs=5e-4)
    assert required_requests(lengths, 0.01) == pytest.approx(2_000, rel=0.05)
    assert moments.warnings == ()
    eight, thirty_two = exact_law(lengths, 64).expected_maximum([8, 32])
    assert (eight, thirty_two) == pytest.approx((86_987, 91_295), rel=1e-4)


def test_requests_needed_for_one_percent() -> None:
    assert required_requests(length_laws.geometric(100, 500), 0.01) == pytest.approx(14e3, rel=0.02)
    heavy = required_requests(length_laws.pareto(200, 300, 2.5, 200_000), 0.01)
    assert 1e6 < heavy < 3e6


def test_cold_start_bias_of_39_lifetimes(data_file: DataFile) -> None:
    for lengths, bias in (
        (length_laws.geometric(100, 500), -0.021),
        (length_laws.pareto(200, 300, 2.5, 200_000), -0.086),
        (azure_conversation(data_file), -0.002),
    ):
        steps = round(10_000 / 256 * float(lengths.weight @ lengths.output_tokens))
        found = horizon_load(lengths, steps) / slot_moments(lengths).theta_tokens - 1.0
        assert found == pytest.approx(bias, abs=6e-4)


def test_lifetimes_until_the_mean_load_is_within_one_percent(data_file: DataFile) -> None:
    for lengths, lifetimes in (
        (length_laws.geometric(100, 500), 4.4),
        (length_laws.pareto(200, 300, 2.5, 200_000), 94),
        (azure_conversation(data_file), 3.3),
    ):
        mean = float(lengths.weight @ lengths.output_tokens)
        settled = settling_steps(lengths, 0.01, round(150 * mean))
        assert settled is not None
        assert settled / mean == pytest.approx(lifetimes, rel=0.015)
    assert settling_steps(length_laws.fixed(100, 500), 0.01, 50_000) is None
