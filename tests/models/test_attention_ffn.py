"""The predictor as a whole: four levels, optimum, regret, trust."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import barrier, pingpong
from models.attention_ffn import (
    LEVELS,
    exact_law,
    gaussian_trust,
    horizon_load,
    optimum,
    predict,
    predict_all,
    recommended_level,
    regret,
    regrets,
    slot_moments,
)
from models.bundle import Bundle, LatencyCoefficients
from models.mean_field import throughput
from traces import length_laws
from traces.lengths import LengthPairs

LENGTHS = length_laws.geometric(100, 50)


def bundle(**changes: object) -> Bundle:
    plain = Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=0.02,
            beta_attention=10.0,
            alpha_ffn=0.3,
            beta_ffn=12.0,
            alpha_communication=0.05,
            beta_communication=3.0,
        ),
        batch_per_worker=16,
        num_layers=7,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("semantics", ["barrier", "pingpong"])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_levels_come_closer_to_the_exact_law_the_more_they_know(semantics: str, m: int) -> None:
    found = predict_all(LENGTHS, bundle(semantics=semantics, microbatches=m), range(1, 41))
    exact = found["exact"].cycle_s
    errors = [float(np.abs(found[level].cycle_s / exact - 1).max()) for level in LEVELS]
    assert errors[0] > errors[1] > errors[2] > errors[3] == 0.0
    assert errors[2] < 2e-3


@pytest.mark.parametrize("semantics", ["barrier", "pingpong"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_curve_follows_from_the_cycle_time(semantics: str, level: str) -> None:
    model = bundle(semantics=semantics, microbatches=2, attention_price=2.0, ffn_price=5.0)
    ratios = np.array([1, 3, 9, 200])
    found = predict(LENGTHS, model, ratios, level=level)
    moments = slot_moments(LENGTHS)
    c = model.coefficients
    cycle = found.cycle_s
    x = 16 * ratios / ((2.0 * ratios + 5.0) * cycle)
    assert found.throughput_per_instance == pytest.approx(x)
    attention = c.attention_s(16 * moments.theta_tokens)
    assert found.attention_idle == pytest.approx(1 - attention / cycle, abs=1e-12)
    ffn = 0.3 * 16 * ratios + 12
    assert found.ffn_idle == pytest.approx(1 - ffn / cycle, abs=1e-12)
    assert found.tpot_s == pytest.approx(7 * 2 * cycle)
    mean = predict(LENGTHS, model, ratios, level="mean_field").cycle_s
    assert found.barrier_overhead == pytest.approx(cycle / mean - 1, abs=1e-12)
    assert found.r == ratios[np.argmax(x)]


def test_idle_shares_are_shares() -> None:
    for found in predict_all(LENGTHS, bundle(), range(1, 257)).values():
        for idle in (found.attention_idle, found.ffn_idle):
            assert np.all((idle >= 0.0) & (idle < 1.0))


@pytest.mark.parametrize("semantics", ["barrier", "pingpong"])
def test_real_optimum_is_the_top_of_a_fine_grid_of_real_ratios(semantics: str) -> None:
    model = bundle(semantics=semantics, microbatches=2)
    law = exact_law(LENGTHS, 16)
    found = predict(LENGTHS, model, range(1, 65), level="exact", load=law)
    grid = np.linspace(max(1.0, found.r - 1), found.r + 1, 2001)
    law_cycle_s = (barrier if semantics == "barrier" else pingpong).law_cycle_s
    cycle = law_cycle_s(model, law, grid)
    x = throughput(model, grid, cycle)
    assert abs(found.r_real - grid[np.argmax(x)]) < 0.02
    assert abs(found.r - found.r_real) < 1.0


def test_mean_field_agrees_with_the_closed_form() -> None:
    found = predict(LENGTHS, bundle(), range(1, 65), level="mean_field")
    best = optimum(bundle(), slot_moments(LENGTHS).theta_tokens)
    assert found.r == best.r
    assert found.r_real == best.r_real
    assert found.regime == best.regime == "attention"
    assert found.throughput_per_instance.max() == pytest.approx(best.throughput_per_instance)


def test_ratios_may_come_in_any_order_and_with_gaps() -> None:
    given_order = predict(LENGTHS, bundle(), [8, 1, 32, 5], level="exact")
    rising = predict(LENGTHS, bundle(), range(1, 33), level="exact")
    assert given_order.ratios.tolist() == [8, 1, 32, 5]
    assert given_order.cycle_s == pytest.approx(rising.cycle_s[[7, 0, 31, 4]])
    assert given_order.r in (5, 8)
    lonely = predict(LENGTHS, bundle(), [6], level="exact")
    assert (lonely.r, lonely.r_real) == (6, 6.0)


def test_a_shared_worker_law_changes_nothing() -> None:
    law = exact_law(LENGTHS, 16)
    one = predict(LENGTHS, bundle(), range(1, 9), level="exact", load=law)
    other = predict(LENGTHS, bundle(), range(1, 9), level="exact")
    assert np.array_equal(one.cycle_s, other.cycle_s)


def test_regret_is_measured_with_the_exact_level() -> None:
    found = predict_all(LENGTHS, bundle(), range(1, 33))
    x = found["exact"].throughput_per_instance
    lost = regrets(found)
    assert lost["exact"] == 0.0
    for level in LEVELS:
        assert lost[level] == pytest.approx(1 - x[found[level].r - 1] / x.max())
    assert regret(found["exact"], 1) > 0.2
    with pytest.raises(ValueError, match="r = 99 is not among"):
        regret(found["exact"], 99)


def test_regime_names_the_slowest_stage_at_the_optimum() -> None:
    free = LatencyCoefficients(
        alpha_attention=0.02, beta_attention=1, alpha_ffn=0.05, beta_ffn=500, beta_communication=1
    )
    slow_link = dataclasses.replace(free, beta_ffn=1.0, beta_communication=900.0)
    narrow = bundle(semantics="pingpong", microbatches=1)
    for model, regime in (
        (bundle(coefficients=free), "ffn"),
        (bundle(coefficients=slow_link), "communication"),
        (bundle(), "attention"),
        (narrow, "round_trip"),
    ):
        for level in LEVELS:
            if level == "mean_field" or regime != "attention":
                assert predict(LENGTHS, model, range(1, 65), level=level).regime == regime


def test_level_to_trust_follows_skew_and_spread() -> None:
    """Geometric 100/500: slot cv 0.83 and skew 2, so q = 1.67 / B and worker skew 2 / sqrt B."""
    moments = slot_moments(length_laws.geometric(100, 500))
    assert gaussian_trust(moments, 32) == pytest.approx(0.052, abs=5e-4)
    assert recommended_level(moments, 256) == "gaussian"
    assert recommended_level(moments, 32) == "pearson3"
    heavy = slot_moments(length_laws.pareto(200, 300, 2.5, 200_000))
    assert recommended_level(heavy, 8) == "exact"
    assert recommended_level(slot_moments(length_laws.fixed(9, 1)), 4) == "mean_field"


def test_levels_that_should_not_be_trusted_say_so() -> None:
    heavy = length_laws.pareto(200, 300, 2.5, 200_000)
    found = predict_all(heavy, bundle(batch_per_worker=8), range(1, 5))
    assert "gaussian: the worker load is skewed" in found["gaussian"].warnings[0]
    assert "pearson3: the worker load is very skewed (8.3)" in found["pearson3"].warnings[0]
    assert found["exact"].warnings == found["mean_field"].warnings == ()


@pytest.mark.parametrize("semantics", ["barrier", "pingpong"])
def test_loads_that_never_vary_make_all_levels_equal(semantics: str) -> None:
    model = bundle(semantics=semantics, microbatches=2)
    found = predict_all(length_laws.fixed(90, 1), model, range(1, 20))
    for level in LEVELS:
        assert found[level].cycle_s == pytest.approx(found["mean_field"].cycle_s, rel=1e-12)
        assert found[level].r == found["mean_field"].r


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), min_size=1, max_size=4),
    st.integers(1, 64),
    st.sampled_from([("barrier", 1), ("pingpong", 1), ("pingpong", 2), ("pingpong", 3)]),
)
@settings(max_examples=25, deadline=None)
def test_no_level_is_below_mean_loads_and_every_best_ratio_is_best(
    rows: list[tuple[int, int]], batch: int, kind: tuple[str, int]
) -> None:
    prompts, outputs = zip(*rows, strict=True)
    model = bundle(batch_per_worker=batch, semantics=kind[0], microbatches=kind[1])
    found = predict_all(LengthPairs.from_pairs(prompts, outputs), model, range(1, 25))
    for prediction in found.values():
        assert np.all(prediction.barrier_overhead >= 0.0)
        ratio = prediction.cycle_s / found["mean_field"].cycle_s
        assert np.all(ratio > 1.0 - 1e-6)
        best = prediction.throughput_per_instance[prediction.r - 1]
        assert best == prediction.throughput_per_instance.max()


def test_a_short_cold_run_has_lighter_loads_at_every_level() -> None:
    """Ten lifetimes from fresh slots: the cycle of a law shifted to that run's mean load."""
    steps = 500
    short = predict_all(LENGTHS, bundle(), range(1, 30), horizon_steps=steps)
    settled = predict_all(LENGTHS, bundle(), range(1, 30))
    endless = predict_all(LENGTHS, bundle(), range(1, 30), horizon_steps=200_000)
    saved = 0.02 * 16 * (slot_moments(LENGTHS).theta_tokens - horizon_load(LENGTHS, steps))
    assert saved > 0.0
    for level in LEVELS:
        assert short[level].cycle_s[0] == pytest.approx(settled[level].cycle_s[0] - saved)
        assert endless[level].cycle_s == pytest.approx(settled[level].cycle_s, rel=1e-3)


@pytest.mark.parametrize("bad", [[], [0, 1], [1.5], [[1, 2]]])
def test_impossible_ratios_are_errors(bad: list[object]) -> None:
    with pytest.raises(ValueError, match="ratios must be"):
        predict(LENGTHS, bundle(), bad, level="exact")  # type: ignore[arg-type]


def test_an_unknown_level_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"level must be one of mean_field, .* found 'gauss'"):
        predict(LENGTHS, bundle(), [1], level="gauss")
