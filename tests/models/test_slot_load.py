"""Slot moments against exact fractions, and what a sample can and cannot support."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.slot_load import (
    HeavyTailError,
    required_requests,
    required_steps,
    slot_moments,
)
from models.streams import stream
from models.tail_index import tail_index
from traces import length_laws
from traces.lengths import LengthPairs

LENGTHS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 400), st.integers(1, 9)), min_size=1, max_size=6
)


def exact_moments(rows: list[tuple[int, int, int]]) -> tuple[Fraction, Fraction, Fraction]:
    """Mean, variance and third central moment by listing every load of every request."""
    loads: dict[int, int] = {}
    for prompt, output, weight in rows:
        for age in range(output):
            loads[prompt + age] = loads.get(prompt + age, 0) + weight
    total = sum(loads.values())
    mean = Fraction(sum(load * w for load, w in loads.items()), total)
    second = sum(w * (load - mean) ** 2 for load, w in loads.items()) / total
    third = sum(w * (load - mean) ** 3 for load, w in loads.items()) / total
    return mean, second, third


def law(rows: list[tuple[int, int, int]]) -> LengthPairs:
    prompts, outputs, weights = zip(*rows, strict=True)
    return LengthPairs.from_pairs(prompts, outputs, weights)


@given(LENGTHS)
@settings(max_examples=80, deadline=None)
def test_moments_equal_those_of_every_load_listed(rows: list[tuple[int, int, int]]) -> None:
    moments = slot_moments(law(rows))
    mean, second, third = exact_moments(rows)
    assert moments.theta_tokens == pytest.approx(float(mean), rel=1e-12)
    assert moments.nu2 == pytest.approx(float(second), rel=1e-11, abs=1e-9)
    if second > 0:
        assert moments.skew == pytest.approx(float(third) / float(second) ** 1.5, abs=1e-9)


def test_large_prompts_do_not_cancel_the_moments() -> None:
    """A million-token prompt shifts the mean and nothing else."""
    near = slot_moments(LengthPairs.from_pairs([0, 3], [5, 2]))
    far = slot_moments(LengthPairs.from_pairs([10**6, 10**6 + 3], [5, 2]))
    assert far.theta_tokens - near.theta_tokens == pytest.approx(1e6, rel=1e-12)
    assert far.nu2 == pytest.approx(near.nu2, rel=1e-9)
    assert far.skew == pytest.approx(near.skew, rel=1e-6)


def test_a_load_that_never_varies_has_no_spread() -> None:
    moments = slot_moments(LengthPairs.from_pairs([70, 70], [1, 1]))
    assert (moments.theta_tokens, moments.nu_tokens, moments.skew) == (70.0, 0.0, 0.0)
    assert moments.max_load_tokens == 70


def test_dependence_moves_theta_by_the_covariance_over_the_mean_output() -> None:
    lengths = LengthPairs.from_pairs([10, 500, 40], [30, 3, 90], [2, 1, 5])
    moments = slot_moments(lengths)
    mean_p = lengths.weight @ lengths.prompt_tokens
    mean_d = lengths.weight @ lengths.output_tokens
    covariance = lengths.weight @ (lengths.prompt_tokens * lengths.output_tokens) - mean_p * mean_d
    shift = moments.theta_tokens - moments.theta_if_independent
    assert shift == pytest.approx(covariance / mean_d, rel=1e-12)


def test_standard_errors_equal_the_spread_over_many_samples() -> None:
    """600 samples of 400 requests: the spread of theta and nu against the formula's average."""
    rng = stream(7, "standard errors")
    thetas, nus, theta_ses, nu_ses = [], [], [], []
    for _ in range(600):
        prompt = rng.integers(50, 400, 400)
        output = rng.geometric(1 / 60, 400) + prompt // 20
        moments = slot_moments(LengthPairs.from_requests(prompt, output))
        thetas.append(moments.theta_tokens)
        nus.append(moments.nu_tokens)
        theta_ses.append(moments.theta_se)
        nu_ses.append(moments.nu_se)
    assert np.mean(theta_ses) == pytest.approx(np.std(thetas), rel=0.12)
    assert np.mean(nu_ses) == pytest.approx(np.std(nus), rel=0.15)


def test_standard_error_is_the_ratio_estimators() -> None:
    prompt, output = np.array([10, 30, 80, 20]), np.array([4, 9, 2, 30])
    moments = slot_moments(LengthPairs.from_requests(prompt, output))
    reward = output * prompt + output * (output - 1) / 2
    residual = reward - moments.theta_tokens * output
    assert moments.theta_se == pytest.approx(np.sqrt((residual**2).sum()) / output.sum())


def test_an_exact_law_has_no_standard_error_and_no_warning() -> None:
    moments = slot_moments(length_laws.pareto(200, 300, 2.2, 200_000), max_relative_error=1e-6)
    assert moments.theta_se is None
    assert moments.nu_se is None
    assert moments.tail is None
    assert moments.warnings == ()


def test_required_requests_reach_the_precision_they_promise() -> None:
    lengths = length_laws.geometric(100, 500)
    needed = required_requests(lengths, 0.02)
    rng = stream(3, "required requests")
    theta = slot_moments(lengths).theta_tokens
    found = [
        slot_moments(LengthPairs.from_requests(*lengths.sample(rng, needed))).theta_tokens
        for _ in range(300)
    ]
    assert np.std(found) / theta == pytest.approx(0.02, rel=0.12)


def test_required_steps_are_requests_spread_over_slots() -> None:
    """S slots complete S K / E[D] requests in K steps."""
    lengths = length_laws.geometric(100, 500)
    mean = float(lengths.weight @ lengths.output_tokens)
    steps = required_steps(lengths, 256, 0.01)
    assert steps * 256 / mean == pytest.approx(required_requests(lengths, 0.01), rel=1e-3)


def test_a_heavy_tail_is_warned_about_and_refused_only_on_request() -> None:
    rng = stream(11, "heavy")
    output = np.floor(300 * (1 - rng.random(20_000)) ** (-1 / 2.2)).astype(np.int64)
    lengths = LengthPairs.from_requests(np.full(20_000, 100), output)
    warnings = slot_moments(lengths).warnings
    assert warnings[0].startswith("heavy tail: 2 % not attainable with 20000 request(s)")
    assert any("falls off like a power of" in text for text in warnings)
    with pytest.raises(HeavyTailError, match="heavy tail: 5 % not attainable with 20000"):
        slot_moments(lengths, max_relative_error=0.05)


def test_a_light_tail_is_accepted_at_the_precision_it_supports() -> None:
    rng = stream(11, "light")
    lengths = LengthPairs.from_requests(np.full(4000, 100), rng.geometric(1 / 500, 4000))
    moments = slot_moments(lengths, max_relative_error=0.03)
    assert moments.warnings == ()
    too_few = r"too few requests: 0\.5 % not attainable with 4000 .* at least"
    with pytest.raises(HeavyTailError, match=too_few):
        slot_moments(lengths, max_relative_error=0.005)


def test_a_single_request_supports_nothing() -> None:
    lengths = LengthPairs.from_requests([100], [50])
    moments = slot_moments(lengths)
    assert moments.theta_se is None
    assert moments.warnings == ("theta comes from a single request: its error is unknown",)
    with pytest.raises(HeavyTailError, match="spread is unknown"):
        slot_moments(lengths, max_relative_error=0.5)


@pytest.mark.parametrize("value", [0.0, -0.1, float("nan")])
def test_a_precision_that_is_not_positive_is_an_error(value: float) -> None:
    lengths = LengthPairs.from_requests([1, 2], [3, 4])
    with pytest.raises(ValueError, match="max_relative_error must be finite and > 0"):
        slot_moments(lengths, max_relative_error=value)
    with pytest.raises(ValueError, match="relative_error must be finite and > 0"):
        required_requests(lengths, value)


def test_tail_index_finds_the_exponent_of_a_power_law() -> None:
    """Outputs with index 5 give contributions, quadratic in them, an index of 2.5."""
    rng = stream(5, "tail")
    output = np.floor(1000 * (1 - rng.random(400_000)) ** (-1 / 5)).astype(np.int64)
    tail = tail_index(LengthPairs.from_requests(np.zeros(400_000, dtype=np.int64), output))
    assert tail is not None
    assert abs(tail.index - 2.5) < 3 * tail.standard_error
    assert not tail.is_surely_below(1.5)


def test_tail_index_of_weighted_rows_is_that_of_the_rows_repeated() -> None:
    rng = stream(5, "rows")
    output = rng.geometric(1 / 40, 5000)
    prompt = np.full(5000, 9)
    values, counts = np.unique(output, return_counts=True)
    rows = LengthPairs.from_pairs(np.full(len(values), 9), values, counts, num_requests=5000)
    one = tail_index(LengthPairs.from_requests(prompt, output))
    other = tail_index(rows)
    assert one is not None
    assert other is not None
    assert one.num_requests == other.num_requests
    assert one.index == pytest.approx(other.index, rel=1e-9)


def test_tail_index_of_equal_requests_is_unknown() -> None:
    assert tail_index(LengthPairs.from_requests(np.full(999, 5), np.full(999, 7))) is None
    with pytest.raises(ValueError, match="needs a sample"):
        tail_index(length_laws.fixed(5, 7))
