"""Order statistics against enumeration, scipy's distributions and quadrature."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from models.order_statistics import (
    WorkerLoadLaw,
    cdf_of,
    kappa,
    normal_cdf,
    normal_excess,
    split_onto_lattice,
)

PMF = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda w: w[-1] > 0 and w[0] > 0)


def law(weights: list[int], start: float = 3.0, step: float = 2.0) -> WorkerLoadLaw:
    return WorkerLoadLaw(start_tokens=start, step_tokens=step, cdf=cdf_of(np.array(weights, float)))


def maxima(found: WorkerLoadLaw, r: int) -> tuple[np.ndarray, np.ndarray]:
    """Every outcome of r workers: largest load and probability."""
    grid, pmf = found.grid_tokens, found.pmf
    outcomes = list(itertools.product(range(len(grid)), repeat=r))
    largest = np.array([max(grid[i] for i in outcome) for outcome in outcomes])
    return largest, np.array([math.prod(pmf[i] for i in outcome) for outcome in outcomes])


@given(PMF, st.integers(1, 4), st.floats(-5.0, 20.0))
@settings(max_examples=80, deadline=None)
def test_maximum_equals_that_of_all_outcomes(weights: list[int], r: int, threshold: float) -> None:
    found = law(weights)
    largest, probability = maxima(found, r)
    mean = float(largest @ probability)
    assert found.expected_maximum([r])[0] == pytest.approx(mean, rel=1e-12)
    spread = float((largest - mean) ** 2 @ probability)
    assert found.maximum_variance(r) == pytest.approx(spread, rel=1e-9, abs=1e-9)
    excess = float(np.maximum(0.0, largest - threshold) @ probability)
    assert found.expected_excess([threshold], [r])[0] == pytest.approx(excess, abs=1e-12)


def test_kappa_equals_the_known_constants_for_small_r() -> None:
    """kappa_2 = 1 / sqrt(pi), kappa_3 = 3 / (2 sqrt(pi)); kappa_5 from its closed form."""
    assert kappa(1) == pytest.approx(0.0, abs=1e-12)
    assert kappa(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-12)
    assert kappa(3) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-12)
    five = 5 / (4 * math.sqrt(math.pi)) * (1 + 6 / math.pi * math.asin(1 / 3))
    assert kappa(5) == pytest.approx(five, rel=1e-12)


@pytest.mark.parametrize("r", [1.0, 2.5, 17.0, 256.0])
@pytest.mark.parametrize("z", [-30.0, -9.99, -1.3, 0.0, 2.2, 9.0])
def test_normal_excess_equals_adaptive_quadrature(z: float, r: float) -> None:
    found = normal_excess([z], [r])[0]
    above = lambda x: -math.expm1(r * float(special.log_ndtr(x)))  # noqa: E731
    expected, _ = integrate.quad(above, z, 12.0, points=[0.0, 3.0], limit=400, epsabs=1e-13)
    assert found == pytest.approx(expected, abs=2e-11)


def test_normal_cdf_keeps_the_lower_tail() -> None:
    z = np.array([[-37.0, -8.0], [0.0, 5.0]])
    assert normal_cdf(z) == pytest.approx(special.ndtr(z), rel=1e-12)


def test_kappa_below_one_worker_is_an_error() -> None:
    with pytest.raises(ValueError, match="r must be >= 1"):
        kappa(0.5)


@given(PMF, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_splitting_onto_a_coarser_lattice_keeps_mass_and_mean(
    weights: list[int], factor: int
) -> None:
    pmf = np.array(weights, float) / sum(weights)
    coarse = split_onto_lattice(pmf, factor)
    assert coarse.sum() == pytest.approx(1.0)
    mean = float(np.arange(len(pmf)) @ pmf)
    assert factor * float(np.arange(len(coarse)) @ coarse) == pytest.approx(mean, abs=1e-12)


def test_coarsening_keeps_the_mean_and_hardly_moves_the_maximum() -> None:
    x = np.arange(4001)
    fine = WorkerLoadLaw(
        start_tokens=50.0, step_tokens=1.0, cdf=cdf_of(stats.norm.pdf(x, 2000, 250))
    )
    coarse = fine.coarsened(401)
    assert len(coarse.cdf) <= 401
    assert not coarse.is_exact
    assert coarse.mean_tokens == pytest.approx(fine.mean_tokens, rel=1e-12)
    ratios = [1, 4, 32]
    # Splitting adds up to step^2 / 4 = 25 to a variance of 62,500.
    spread = np.abs(coarse.expected_maximum(ratios) - fine.expected_maximum(ratios)) / 250
    assert spread.max() < 1e-3
    assert fine.coarsened(5000) is fine


def test_moments_and_quantiles_of_a_law() -> None:
    found = law([1, 2, 0, 1])
    assert found.grid_tokens.tolist() == [3.0, 5.0, 7.0, 9.0]
    assert found.pmf == pytest.approx([0.25, 0.5, 0.0, 0.25])
    assert found.mean_tokens == pytest.approx(5.5)
    assert found.sd_tokens**2 == pytest.approx(0.25 * 2.5**2 + 0.5 * 0.25 + 0.25 * 3.5**2)
    assert [found.quantile(u) for u in (0.0, 0.25, 0.26, 0.75, 0.76, 1.0)] == [3, 3, 5, 5, 9, 9]


def test_real_ratios_lie_between_whole_ones() -> None:
    found = law([1, 3, 2, 5])
    low, between, high = found.expected_maximum([2, 2.5, 3])
    assert low < between < high
