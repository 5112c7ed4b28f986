"""Estimators from a watched system: how far censoring biases them, and how well it is undone."""

import numpy as np
import pytest
from numpy.typing import NDArray

from models.live_slots import censored_load, census_load
from models.slot_load import slot_moments
from models.streams import stream
from traces import length_laws
from traces.lengths import LengthPairs

Watched = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def watch(lengths: LengthPairs, num_slots: int, num_steps: int, name: str) -> Watched:
    """A settled system, watched for a while: P and D of completed, P and age of running requests.

    Only requests that began under watch count; how long the others ran before is unknown.
    """
    rng = stream(17, name)
    mean = float(lengths.weight @ lengths.output_tokens)
    depth = int(3 * num_steps / mean) + 60
    prompt, output = lengths.sample(rng, num_slots * depth)
    _, first_output, first_age = lengths.sample_in_service(rng, num_slots)
    by_slot = output.reshape(num_slots, depth)
    end = by_slot.cumsum(axis=1) + (first_output - first_age)[:, None]
    begin = (end - by_slot).ravel()
    done = (end <= num_steps).ravel()
    running = (begin < num_steps) & (end > num_steps).ravel()
    return prompt[done], output[done], prompt[running], num_steps - 1 - begin[running]


@pytest.mark.parametrize(
    ("lifetimes", "slots", "completed_bias", "corrected_bias"),
    [(5, 6000, -0.24, -0.025), (20, 2000, -0.04, 0.003), (100, 500, -0.005, 0.004)],
)
def test_survival_estimate_removes_the_bias_of_completed_geometric_requests(
    lifetimes: int, slots: int, completed_bias: float, corrected_bias: float
) -> None:
    lengths = length_laws.geometric(100, 500)
    theta = slot_moments(lengths).theta_tokens
    seen = watch(lengths, slots, lifetimes * 500, f"geometric {lifetimes}")
    completed = slot_moments(LengthPairs.from_requests(*seen[:2])).theta_tokens / theta - 1
    estimate = censored_load(*seen)
    assert completed == pytest.approx(completed_bias, abs=0.015)
    assert estimate.theta_tokens / theta - 1 == pytest.approx(corrected_bias, abs=0.025)
    assert estimate.theta_se is not None
    assert 0.0 < estimate.theta_se / theta < 0.02


@pytest.mark.parametrize("lifetimes", [5, 20, 100])
def test_survival_estimate_at_least_halves_the_bias_of_heavy_correlated_lengths(
    lifetimes: int,
) -> None:
    """Completed only: -61 / -34 / -8 % in a comparable law; corrected: -30 / -8 / -0.2 %."""
    lengths = length_laws.lognormal(500, 400, 1.2, 1.2, 0.67, max_output_tokens=100_000)
    theta = slot_moments(lengths).theta_tokens
    mean = float(lengths.weight @ lengths.output_tokens)
    seen = watch(lengths, 1500, round(lifetimes * mean), f"correlated {lifetimes}")
    completed = slot_moments(LengthPairs.from_requests(*seen[:2])).theta_tokens / theta - 1
    corrected = censored_load(*seen).theta_tokens / theta - 1
    assert completed < -0.04
    assert abs(corrected) < 0.6 * abs(completed)


def test_survival_estimate_without_running_requests_is_the_plain_one() -> None:
    rng = stream(1, "all done")
    prompt, output = rng.integers(0, 50, 400), rng.integers(1, 90, 400)
    plain = slot_moments(LengthPairs.from_requests(prompt, output))
    estimate = censored_load(prompt, output, [], [])
    assert estimate.theta_tokens == pytest.approx(plain.theta_tokens, rel=1e-12)
    assert estimate.nu2 == pytest.approx(plain.nu2, rel=1e-9)
    assert estimate.theta_se == pytest.approx(plain.theta_se, rel=0.5)
    assert estimate.share_beyond == pytest.approx(0.0, abs=1e-12)


def test_survival_curve_of_a_small_example_by_hand() -> None:
    """D = 1, 3 done, one running at age 1 (D > 1): S = 1, 2/3, 2/3, then 0 after age 2.

    Of three requests one ends after age 0. Between ages 1 and 2 nothing ends among the one still
    watched; it ends after age 2. P = 0 for all, so theta = (0 + 1 * 2/3 + 2 * 2/3) / (7/3).
    """
    estimate = censored_load([0, 0], [1, 3], [0], [1])
    assert estimate.theta_tokens == pytest.approx(2 / (7 / 3))
    assert estimate.nu2 == pytest.approx((10 / 3) / (7 / 3) - (6 / 7) ** 2)
    assert estimate.theta_se is None


def test_a_running_request_longer_than_all_completed_ones_is_said_out_loud() -> None:
    estimate = censored_load([5, 5], [2, 4], [5, 5], [9, 1])
    assert estimate.share_beyond > 0.0
    assert "lower bound" in estimate.warnings[0]
    assert "10 tokens observed" in estimate.warnings[0]


def test_census_of_stationary_slots_is_unbiased_with_an_honest_error() -> None:
    lengths = length_laws.geometric(100, 500)
    moments = slot_moments(lengths)
    rng = stream(4, "census")
    estimates = []
    for _ in range(400):
        prompt, _, age = lengths.sample_in_service(rng, 250)
        estimates.append(census_load(prompt, age))
    thetas = np.array([estimate.theta_tokens for estimate in estimates])
    errors = np.array([estimate.theta_se for estimate in estimates], dtype=float)
    standard = moments.nu_tokens / 250**0.5
    assert errors.mean() == pytest.approx(standard, rel=0.05)
    assert abs(thetas.mean() - moments.theta_tokens) < 4 * standard / 20
    covered = np.mean(np.abs(thetas - moments.theta_tokens) < 1.96 * errors)
    assert 0.91 < covered < 0.98
    assert np.mean([e.nu2 for e in estimates]) == pytest.approx(moments.nu2, rel=0.05)


def test_census_of_one_slot_has_no_error() -> None:
    estimate = census_load([7], [3])
    assert (estimate.theta_tokens, estimate.theta_se) == (10.0, None)


def test_unusable_observations_are_errors() -> None:
    with pytest.raises(ValueError, match="no live slots"):
        census_load([], [])
    with pytest.raises(ValueError, match="age_tokens must be finite and >= 0"):
        census_load([1], [-1])
    with pytest.raises(ValueError, match="no completed request"):
        censored_load([], [], [1], [1])
    with pytest.raises(ValueError, match="completed_output_tokens must be >= 1, found 0"):
        censored_load([1], [0], [], [])
    with pytest.raises(ValueError, match="differ in length"):
        censored_load([1, 2], [1], [], [])
