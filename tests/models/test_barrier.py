"""The barrier against enumeration of all loads, Monte Carlo, and its own limits."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.barrier import (
    gaussian_cycle_s,
    gaussian_expected_maximum,
    law_cycle_s,
    law_cycle_sd_s,
    plug_in_cycle_s,
)
from models.bundle import Bundle, LatencyCoefficients
from models.mean_field import mean_field_cycle_s
from models.order_statistics import WorkerLoadLaw, cdf_of
from models.slot_load import slot_moments
from models.worker_load import exact_law, gaussian_law
from traces import length_laws
from traces.lengths import LengthPairs


def bundle(alpha_ffn: float = 0.5, beta_communication: float = 0.0, alpha: float = 1.0) -> Bundle:
    return Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=alpha,
            beta_attention=1.0,
            alpha_ffn=alpha_ffn,
            beta_ffn=0.5,
            beta_communication=beta_communication,
        ),
        batch_per_worker=2,
    )


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 4),
    st.floats(0.0, 4.0),
    st.floats(0.0, 9.0),
)
@settings(max_examples=80, deadline=None)
def test_expected_cycle_equals_that_of_all_loads(
    weights: list[int], r: int, alpha_ffn: float, transfer: float
) -> None:
    law = WorkerLoadLaw(start_tokens=0.0, step_tokens=1.5, cdf=cdf_of(np.array(weights, float)))
    model = bundle(alpha_ffn, transfer)
    expected = square = 0.0
    for outcome in itertools.product(range(len(weights)), repeat=r):
        slowest = max(law.grid_tokens[i] for i in outcome) + 1.0
        cycle = max(slowest, transfer, alpha_ffn * 2 * r + 0.5)
        chance = np.prod([law.pmf[i] for i in outcome])
        expected += cycle * chance
        square += cycle * cycle * chance
    assert law_cycle_s(model, law, [r])[0] == pytest.approx(expected, rel=1e-12)
    variance = square - expected * expected
    assert law_cycle_sd_s(model, law, r) ** 2 == pytest.approx(variance, abs=1e-12 * square)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(1, 30),
    st.floats(0.001, 3.0),
)
@settings(max_examples=60, deadline=None)
def test_exact_cycle_grows_with_r_and_is_never_below_mean_loads(
    rows: list[tuple[int, int]], batch: int, alpha_ffn: float
) -> None:
    prompts, outputs = zip(*rows, strict=True)
    lengths = LengthPairs.from_pairs(prompts, outputs)
    model = Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=0.01, beta_attention=1.0, alpha_ffn=alpha_ffn, beta_ffn=0.5
        ),
        batch_per_worker=batch,
    )
    ratios = np.arange(1, 41)
    cycle = law_cycle_s(model, exact_law(lengths, batch), ratios)
    mean = mean_field_cycle_s(model, slot_moments(lengths).theta_tokens, ratios)
    assert np.all(np.diff(cycle) >= -1e-9 * cycle[1:])
    assert np.all(cycle >= mean * (1 - 1e-9))


@given(st.floats(1e-6, 1e3), st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_times_scale_with_their_unit(unit: float, r: int) -> None:
    law = exact_law(LengthPairs.from_pairs([3, 9], [20, 5]), 2)
    micro = bundle()
    c = micro.coefficients
    scaled = Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=c.alpha_attention * unit,
            beta_attention=c.beta_attention * unit,
            alpha_ffn=c.alpha_ffn * unit,
            beta_ffn=c.beta_ffn * unit,
        ),
        batch_per_worker=2,
    )
    assert law_cycle_s(scaled, law, [r]) == pytest.approx(unit * law_cycle_s(micro, law, [r]))
    for level in (gaussian_cycle_s, plug_in_cycle_s):
        assert level(scaled, 9.0, 5.0, [r]) == pytest.approx(unit * level(micro, 9.0, 5.0, [r]))


def test_gaussian_integral_equals_the_normal_law_on_a_lattice() -> None:
    model = bundle(alpha_ffn=0.4)
    ratios = np.arange(1, 65)
    integral = gaussian_cycle_s(model, 10.0, 4.0, ratios)
    lattice = law_cycle_s(model, gaussian_law(20.0, 4.0 * 2**0.5), ratios)
    assert lattice == pytest.approx(integral, rel=1e-6)


def test_gaussian_integral_equals_sampled_normal_loads() -> None:
    rng = np.random.default_rng(5)
    loads = 20.0 + 4.0 * 2**0.5 * rng.standard_normal((200_000, 8))
    model = bundle(alpha_ffn=1.5)
    cycle = np.maximum(loads.max(axis=1) + 1.0, 1.5 * 16 + 0.5)
    expected = gaussian_cycle_s(model, 10.0, 4.0, [8])[0]
    assert abs(cycle.mean() - expected) < 4 * cycle.std() / 200_000**0.5


def test_plug_in_is_too_small_at_the_crossing_and_right_far_from_it() -> None:
    ratios = np.arange(1, 60)
    model = bundle(alpha_ffn=1.0)
    integral = gaussian_cycle_s(model, 20.0, 6.0, ratios)
    plug_in = plug_in_cycle_s(model, 20.0, 6.0, ratios)
    assert np.all(plug_in <= integral * (1 + 1e-12))
    assert np.max(integral / plug_in - 1) > 0.01
    assert plug_in[-1] == pytest.approx(integral[-1])


def test_many_slots_make_the_gaussian_exact() -> None:
    lengths = length_laws.geometric(20, 30)
    moments = slot_moments(lengths)
    gaps = []
    for batch in (8, 128, 2048):
        law = exact_law(lengths, batch)
        normal = gaussian_expected_maximum(moments.theta_tokens, moments.nu_tokens, batch, 8)
        gaps.append(abs(law.expected_maximum([8])[0] - normal) / law.sd_tokens)
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.015


def test_attention_that_does_not_depend_on_load_has_no_barrier() -> None:
    law = exact_law(length_laws.geometric(20, 30), 2)
    flat = bundle(alpha=0.0)
    assert law_cycle_s(flat, law, [1, 3]) == pytest.approx([1.5, 3.5])
    assert gaussian_cycle_s(flat, 9.0, 3.0, [1, 3]) == pytest.approx([1.5, 3.5])
