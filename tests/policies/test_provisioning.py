"""Provisioning against brute force, and what it says when nothing fits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention_ffn import predict, slot_moments
from models.bundle import Bundle, LatencyCoefficients
from policies.catalog import PROVISIONING
from policies.provisioning import (
    InfeasibleError,
    Provisioning,
    ProvisioningLimits,
    shift_load,
)
from traces.length_laws import geometric
from traces.lengths import LengthPairs

PAPER = LatencyCoefficients(
    alpha_attention=0.00165,
    beta_attention=50,
    alpha_ffn=0.083,
    beta_ffn=100,
    alpha_communication=0.022,
    beta_communication=20,
)
BUNDLE = Bundle(coefficients=PAPER, batch_per_worker=256)
LAW = geometric(100, 500)
NO_LIMITS = ProvisioningLimits(r_max=32)


def test_the_base_case_of_the_paper_is_chosen_by_each_level():
    chosen = {
        name: build().decide(LAW, BUNDLE, NO_LIMITS, now=0.0).attention_per_ffn
        for name, build in PROVISIONING.items()
    }
    assert chosen == {"mean_field": 9, "gaussian": 10, "pearson3": 10, "exact": 10}


def test_a_known_law_has_no_sampling_error_in_its_answer():
    order = Provisioning().decide(LAW, BUNDLE, NO_LIMITS, now=0.0)
    assert (order.r_low, order.r_high) == (10, 10)
    assert order.binding == ()


def test_a_small_sample_widens_the_range_and_prices_it():
    rng = np.random.default_rng(3)
    few = LengthPairs.from_requests(*LAW.sample(rng, 200))
    order = Provisioning().decide(few, BUNDLE, NO_LIMITS, now=0.0)
    assert order.r_low < order.attention_per_ffn < order.r_high
    for name, shift in (("low", -2.0), ("high", 2.0)):
        moved = shift_load(BUNDLE, shift * slot_moments(few).theta_se)
        x = predict(few, moved, range(1, 33), level="exact").throughput_per_instance
        assert 1 + int(np.argmax(x)) == getattr(order, f"r_{name}")
        lost = 1.0 - x[order.attention_per_ffn - 1] / x.max()
        assert getattr(order, f"regret_{name}") == pytest.approx(lost, abs=1e-12)


def test_shifting_the_load_is_shifting_theta():
    moved = predict(LAW, shift_load(BUNDLE, 40.0), [4, 10], level="exact")
    longer = predict(geometric(140, 500), BUNDLE, [4, 10], level="exact")
    assert moved.cycle_s == pytest.approx(longer.cycle_s, rel=1e-9)


def test_regret_of_neighbours_is_measured_on_the_same_curve():
    order = Provisioning().decide(LAW, BUNDLE, NO_LIMITS, now=0.0)
    x = predict(LAW, BUNDLE, [9, 10, 11], level="exact").throughput_per_instance
    assert order.regret_one_less == pytest.approx(1 - x[0] / x[1])
    assert order.regret_one_more == pytest.approx(1 - x[2] / x[1])


def test_the_time_per_token_limit_cuts_the_ratio_and_is_named():
    free = Provisioning().decide(LAW, BUNDLE, NO_LIMITS, now=0.0)
    limit = 0.99 * free.tpot_s
    order = Provisioning().decide(LAW, BUNDLE, replace(NO_LIMITS, max_tpot_s=limit), now=0.0)
    everything = predict(LAW, BUNDLE, range(1, 33), level="exact")
    allowed = everything.ratios[everything.tpot_s <= limit]
    best = max(allowed, key=lambda r: everything.throughput_per_instance[r - 1])
    assert order.attention_per_ffn == best
    assert order.tpot_s <= limit
    assert order.binding == ("max_tpot_s",)


def test_the_edge_of_the_range_is_named():
    order = Provisioning().decide(LAW, BUNDLE, ProvisioningLimits(r_max=5), now=0.0)
    assert order.attention_per_ffn == 5
    assert order.binding == ("r_max",)
    assert math.isnan(order.regret_one_more)


@pytest.mark.parametrize("semantics", ["barrier", "pingpong"])
def test_the_batch_size_is_as_good_as_brute_force_over_all_of_them(semantics):
    bundle = replace(BUNDLE, semantics=semantics, microbatches=2 if semantics == "pingpong" else 1)
    limits = ProvisioningLimits(r_max=24, max_tpot_s=450.0, kv_capacity_tokens=150_000)
    order = Provisioning("pearson3").decide(LAW, bundle, limits, choose_batch=True, now=0.0)
    best = -math.inf
    moments = slot_moments(LAW)
    for batch in range(1, 257):
        slots = batch * bundle.microbatches
        needed = slots * moments.theta_tokens + 3.0 * moments.nu_tokens * math.sqrt(slots)
        if needed > limits.kv_capacity_tokens:
            break
        found = predict(
            LAW, replace(bundle, batch_per_worker=batch), range(1, 25), level="pearson3"
        )
        allowed = found.throughput_per_instance[found.tpot_s <= limits.max_tpot_s]
        best = max(best, float(allowed.max(initial=-math.inf)))
    assert order.throughput_per_instance == pytest.approx(best, rel=2e-3)
    assert order.tpot_s <= limits.max_tpot_s


def test_unequal_prices_move_the_ratio():
    cheap_attention = replace(BUNDLE, ffn_price=8.0)
    order = Provisioning().decide(LAW, cheap_attention, NO_LIMITS, now=0.0)
    plain = Provisioning().decide(LAW, BUNDLE, NO_LIMITS, now=0.0)
    assert order.attention_per_ffn > plain.attention_per_ffn


def test_what_does_not_fit_says_what_would():
    with pytest.raises(InfeasibleError, match="largest B that fits is 9"):
        Provisioning().decide(
            LAW, BUNDLE, ProvisioningLimits(r_max=8, kv_capacity_tokens=10_000), now=0.0
        )
    with pytest.raises(InfeasibleError, match="even one attention worker needs"):
        Provisioning().decide(LAW, BUNDLE, ProvisioningLimits(r_max=8, max_tpot_s=1.0), now=0.0)
    with pytest.raises(InfeasibleError, match="cannot hold one slot"):
        Provisioning().decide(
            LAW,
            BUNDLE,
            ProvisioningLimits(r_max=8, kv_capacity_tokens=10),
            choose_batch=True,
            now=0.0,
        )


def test_the_automatic_range_holds_the_optimum_even_where_the_mean_field_has_none():
    free_ffn = replace(BUNDLE, coefficients=replace(PAPER, alpha_ffn=0.0))
    order = Provisioning().decide(LAW, free_ffn, ProvisioningLimits(), now=0.0)
    x = predict(LAW, free_ffn, range(1, 513), level="exact").throughput_per_instance
    assert order.attention_per_ffn == 1 + int(np.argmax(x))
    assert order.binding == ()


@settings(max_examples=25, deadline=None)
@given(
    beta_attention=st.floats(1, 200),
    beta_ffn=st.floats(1, 300),
    alpha_ffn=st.floats(0.01, 1.0),
    batch=st.integers(1, 400),
    prompt=st.integers(0, 2000),
    output=st.integers(1, 800),
)
def test_no_other_ratio_in_range_is_better(
    beta_attention, beta_ffn, alpha_ffn, batch, prompt, output
):
    coefficients = replace(
        PAPER, beta_attention=beta_attention, beta_ffn=beta_ffn, alpha_ffn=alpha_ffn
    )
    bundle = Bundle(coefficients=coefficients, batch_per_worker=batch)
    law = geometric(prompt, output)
    order = Provisioning("gaussian").decide(law, bundle, NO_LIMITS, now=0.0)
    x = predict(law, bundle, range(1, 33), level="gaussian").throughput_per_instance
    assert x[order.attention_per_ffn - 1] == x.max()
    assert order.throughput_per_instance == x.max()


SECONDS = LatencyCoefficients(
    alpha_attention=1.65e-9,
    beta_attention=50e-6,
    alpha_ffn=83e-9,
    beta_ffn=100e-6,
    alpha_communication=22e-9,
    beta_communication=20e-6,
)
DEEP = replace(BUNDLE, coefficients=SECONDS, num_layers=61)


def test_a_time_per_token_limit_that_keeps_the_batch_small_is_named():
    policy = Provisioning("gaussian")
    limits = ProvisioningLimits(r_max=16, max_tpot_s=0.02)
    tight = policy.decide(LAW, DEEP, limits, choose_batch=True, now=0.0)
    assert "max_tpot_s" in tight.binding
    more = replace(DEEP, batch_per_worker=round(1.2 * tight.batch_per_worker))
    better = predict(LAW, more, range(1, 17), level="gaussian").throughput_per_instance.max()
    assert better > tight.throughput_per_instance
    full = replace(limits, max_tpot_s=10.0, kv_capacity_tokens=150_000)
    order = policy.decide(LAW, DEEP, full, choose_batch=True, now=0.0)
    assert order.binding == ("kv_capacity_tokens",)


@pytest.mark.parametrize("r", [2, 40])
def test_the_batch_size_is_the_best_one_for_a_given_ratio_within_the_limit(r):
    limits = ProvisioningLimits(r_max=64, max_tpot_s=0.02)
    order = Provisioning("gaussian").decide(
        LAW, DEEP, limits, choose_batch=True, given_r=r, now=0.0
    )
    value = {}
    for batch in {
        *range(1, 600, 9),
        *range(order.batch_per_worker - 3, order.batch_per_worker + 4),
    }:
        found = predict(LAW, replace(DEEP, batch_per_worker=batch), [r], level="gaussian")
        if found.tpot_s[0] <= limits.max_tpot_s:
            value[batch] = found.throughput_per_instance[0]
    assert value[order.batch_per_worker] >= (1 - 2e-3) * max(value.values())


def test_a_given_ratio_that_no_batch_size_makes_fast_enough_is_infeasible():
    limits = ProvisioningLimits(r_max=16, max_tpot_s=0.0065)
    Provisioning("gaussian").decide(LAW, DEEP, limits, choose_batch=True, now=0.0)
    with pytest.raises(InfeasibleError, match=r"by any batch_per_worker: .* r = 512 needs"):
        Provisioning("gaussian").decide(LAW, DEEP, limits, choose_batch=True, given_r=512, now=0.0)


def test_an_answer_that_a_higher_load_would_push_over_the_limit_says_so():
    few = LengthPairs.from_requests(*LAW.sample(np.random.default_rng(3), 200))
    free = Provisioning().decide(few, DEEP, NO_LIMITS, now=0.0)
    assert not free.misses_limit_high
    at_the_edge = replace(NO_LIMITS, max_tpot_s=1.0001 * free.tpot_s)
    order = Provisioning().decide(few, DEEP, at_the_edge, now=0.0)
    assert order.attention_per_ffn == free.attention_per_ffn
    assert order.misses_limit_high
    assert order.r_high <= order.attention_per_ffn or order.regret_high == 0.0
