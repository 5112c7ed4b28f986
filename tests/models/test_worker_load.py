"""Laws of the worker load against convolution, enumeration, scipy and simulation."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from models.slot_load import slot_moments
from models.streams import stream
from models.worker_load import exact_law, gaussian_law, pearson3_law, slot_load_pmf
from traces import length_laws
from traces.lengths import LengthPairs

ROWS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4
)


def slot_fractions(rows: list[tuple[int, int, int]]) -> dict[int, Fraction]:
    mass: dict[int, int] = {}
    for prompt, output, weight in rows:
        for age in range(output):
            mass[prompt + age] = mass.get(prompt + age, 0) + weight
    total = sum(mass.values())
    return {load: Fraction(w, total) for load, w in mass.items()}


def law_of(rows: list[tuple[int, int, int]]) -> LengthPairs:
    prompts, outputs, weights = zip(*rows, strict=True)
    return LengthPairs.from_pairs(prompts, outputs, weights)


@given(ROWS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_exact_law_equals_repeated_convolution_in_fractions(
    rows: list[tuple[int, int, int]], batch: int
) -> None:
    slot = slot_fractions(rows)
    worker = {0: Fraction(1)}
    for _ in range(batch):
        summed: dict[int, Fraction] = {}
        for load, p in worker.items():
            for more, q in slot.items():
                summed[load + more] = summed.get(load + more, Fraction(0)) + p * q
        worker = summed
    found = exact_law(law_of(rows), batch)
    assert found.is_exact
    expected = [float(worker.get(int(load), 0)) for load in found.grid_tokens]
    assert found.pmf == pytest.approx(expected, abs=1e-13)
    assert sum(expected) == pytest.approx(1.0, abs=1e-14)


@given(ROWS)
@settings(max_examples=40, deadline=None)
def test_slot_law_puts_equal_mass_on_every_age(rows: list[tuple[int, int, int]]) -> None:
    first, pmf = slot_load_pmf(law_of(rows))
    slot = slot_fractions(rows)
    expected = [float(slot.get(first + i, 0)) for i in range(len(pmf))]
    assert pmf == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("batch", [3, 64, 1000])
@pytest.mark.parametrize(
    "lengths",
    [
        length_laws.geometric(100, 50),
        length_laws.pareto(20, 30, 2.5, 20_000),
        length_laws.lognormal(300, 80, 1.0, 1.0, 0.5, max_output_tokens=20_000),
        LengthPairs.from_pairs([5000, 10], [3, 400]),
    ],
    ids=["geometric", "pareto", "lognormal", "two kinds"],
)
def test_exact_law_has_the_moments_of_its_slots(lengths: LengthPairs, batch: int) -> None:
    moments = slot_moments(lengths)
    law = exact_law(lengths, batch)
    assert law.mean_tokens == pytest.approx(batch * moments.theta_tokens, rel=1e-10)
    assert law.sd_tokens == pytest.approx(moments.nu_tokens * math.sqrt(batch), rel=1e-5)
    off = (law.grid_tokens - law.mean_tokens) / law.sd_tokens
    assert float(law.pmf @ off**3) == pytest.approx(moments.skew / math.sqrt(batch), rel=2e-3)


def test_window_does_not_change_the_law() -> None:
    """A light-tailed worker fills a small part of its range; outside there is nothing to see."""
    lengths = length_laws.fixed(100, 500)
    law = exact_law(lengths, 200)
    assert len(law.cdf) < 0.5 * 200 * 499
    slot = np.full(500, 1 / 500)
    full = np.fft.irfft(np.fft.rfft(slot, 1 << 17) ** 200, 1 << 17)
    begin = int(law.start_tokens) - 200 * 100
    expected = full[begin : begin + len(law.cdf)]
    assert law.pmf == pytest.approx(expected, abs=1e-13)
    assert full[:begin].sum() + full[begin + len(law.cdf) :].sum() < 1e-12


def test_a_coarser_lattice_hardly_moves_the_barrier() -> None:
    lengths = length_laws.pareto(20, 30, 2.5, 20_000)
    fine, coarse = exact_law(lengths, 64), exact_law(lengths, 64, max_points=4000)
    assert fine.is_exact
    assert not coarse.is_exact
    assert len(coarse.cdf) <= 4001
    ratios = [1, 2, 8, 32]
    assert coarse.expected_maximum(ratios) == pytest.approx(fine.expected_maximum(ratios), rel=3e-4)


def test_exact_maximum_equals_that_of_sampled_stationary_slots() -> None:
    """24,000 barriers of 8 workers; within four standard errors."""
    lengths = length_laws.lognormal(200, 100, 0.8, 1.1, 0.4, max_output_tokens=5_000)
    rng = stream(9, "stationary slots")
    largest = np.empty(24_000)
    for i in range(0, 24_000, 4000):
        prompt, _, age = lengths.sample_in_service(rng, 4000 * 8 * 16)
        largest[i : i + 4000] = (prompt + age).reshape(4000, 8, 16).sum(axis=2).max(axis=1)
    expected = exact_law(lengths, 16).expected_maximum([8])[0]
    assert abs(largest.mean() - expected) < 4 * largest.std() / math.sqrt(len(largest))


def test_one_possible_load_is_a_point() -> None:
    law = exact_law(LengthPairs.from_pairs([40], [1]), 12)
    assert law.cdf.tolist() == [1.0]
    assert law.grid_tokens.tolist() == [480.0]
    for point in (gaussian_law(480.0, 0.0), pearson3_law(480.0, 0.0, 1.0)):
        assert point.expected_maximum([1, 9]).tolist() == [480.0, 480.0]


@pytest.mark.parametrize("skew", [-2.0, -0.4, 1e-7, 1e-3, 0.12, 0.9, 2.0, 3.5, 8.4, 20.0])
def test_pearson3_has_the_asked_moments_and_scipys_distribution(skew: float) -> None:
    law = pearson3_law(1000.0, 50.0, skew)
    off = (law.grid_tokens - 1000.0) / 50.0
    assert law.mean_tokens == pytest.approx(1000.0, rel=1e-9)
    assert law.sd_tokens == pytest.approx(50.0, rel=2e-6)
    assert float(law.pmf @ off**3) == pytest.approx(skew, rel=1e-5, abs=1e-5)
    for z in (-1.0, 0.0, 1.5, 4.0):
        assert law.expected_excess([1000.0 + 50.0 * z], [1.0])[0] / 50.0 == pytest.approx(
            pearson3_excess(z, skew), abs=3e-5
        )


def pearson3_excess(z: float, skew: float) -> float:
    """E[(W - z)+] of a standardised Pearson III by scipy's incomplete gamma functions."""
    if abs(skew) < 1e-5:
        return float(stats.norm.pdf(z) - z * stats.norm.sf(z))
    if skew < 0.0:
        return pearson3_excess(-z, -skew) - z
    shape = 4.0 / skew**2
    y = shape + math.sqrt(shape) * z
    if y <= 0.0:
        return -z
    above = shape * special.gammaincc(shape + 1, y) - y * special.gammaincc(shape, y)
    return float(above) / math.sqrt(shape)


@pytest.mark.parametrize("skew", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("r", [2, 8, 32])
def test_pearson3_maximum_equals_the_integral_over_quantiles(skew: float, r: int) -> None:
    """E[max] = int_0^1 Q(u^(1/r)) du, here by the midpoint rule on a stretched u."""
    s = (np.arange(100_000) + 0.5) / 100_000
    above = -np.expm1(np.log1p(-((1.0 - s) ** 3)) / r)  # 1 - u^(1/r), u = 1 - (1 - s)^3
    shape = 4.0 / skew**2
    quantile = (special.gammainccinv(shape, above) - shape) / math.sqrt(shape)
    expected = float(np.mean(quantile * 3 * (1.0 - s) ** 2))
    law = pearson3_law(0.0, 1.0, skew)
    assert law.expected_maximum([r])[0] == pytest.approx(expected, abs=2e-5)


def test_gaussian_law_is_normal() -> None:
    law = gaussian_law(500.0, 20.0)
    assert law.mean_tokens == pytest.approx(500.0, rel=1e-12)
    assert law.sd_tokens == pytest.approx(20.0, rel=1e-6)
    assert law.cdf[::97] == pytest.approx(
        stats.norm.cdf(law.grid_tokens[::97] + 0.5 * law.step_tokens, 500.0, 20.0), abs=1e-6
    )


def test_impossible_arguments_are_errors() -> None:
    lengths = length_laws.fixed(1, 2)
    with pytest.raises(ValueError, match="batch_per_worker must be >= 1, found 0"):
        exact_law(lengths, 0)
    with pytest.raises(ValueError, match="max_points must be >= 2"):
        exact_law(lengths, 4, max_points=1)
    with pytest.raises(ValueError, match="slot loads span"):
        slot_load_pmf(LengthPairs.from_pairs([0, 0], [1, 1 << 26]))
