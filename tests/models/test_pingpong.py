"""Ping-pong periods against the max-plus recursion, enumeration and sampling."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.barrier import law_cycle_s as barrier_cycle_s
from models.bundle import Bundle, LatencyCoefficients
from models.mean_field import mean_field_cycle_s
from models.order_statistics import WorkerLoadLaw, cdf_of
from models.pingpong import fixed_period, law_cycle_s
from models.streams import stream
from models.worker_load import exact_law
from traces import length_laws


def simulated_period(
    attention_s: NDArray[np.float64], ffn_s: float, one_way_s: float, link_s: float
) -> float:
    """Seconds per microbatch of the event recursion, once it repeats itself.

    A worker takes its microbatches in turn and each as soon as the FFN's answer is back; the link
    passes one microbatch at a time towards the FFN.
    """
    num_workers, m = attention_s.shape
    worker_free = np.zeros(num_workers)
    link_free = ffn_free = 0.0
    back = [0.0] * m
    history = []
    for _ in range(2400):
        for u in range(m):
            worker_free = np.maximum(worker_free, back[u]) + attention_s[:, u]
            sent = max(float(worker_free.max()), link_free)
            link_free = sent + link_s
            ffn_free = max(sent + one_way_s, ffn_free) + ffn_s
            back[u] = ffn_free + one_way_s
        history.append(back[-1])
    return (history[-1] - history[-841]) / (840 * m)


def test_fixed_period_equals_the_event_recursion() -> None:
    rng = stream(21, "max-plus")
    for _ in range(36):
        num_workers, m = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        attention = rng.uniform(50, 400, (num_workers, m))
        ffn, one_way = rng.uniform(20, 500), rng.uniform(0, 150)
        link = float(rng.choice([0.0, rng.uniform(0, 500)]))
        expected = simulated_period(attention, ffn, one_way, link)
        assert fixed_period(attention, ffn, one_way, link) == pytest.approx(expected, rel=1e-12)


def test_slowly_changing_loads_keep_the_period_of_each_step() -> None:
    """Loads that forget themselves over 200 steps, 8 layers a step: within 0.2 %, never above."""
    rng = stream(22, "slow loads")
    num_workers, m, ffn, one_way = 8, 2, 166.0, 13.0
    spread = rng.standard_normal((num_workers, m))
    memory = np.exp(-1 / 200)
    worker_free, ffn_free, back, expected = np.zeros(num_workers), 0.0, [0.0] * m, 0.0
    for _ in range(1500):
        attention = 300.0 * (1.0 + 0.06 * spread)
        expected += 8 * m * fixed_period(attention, ffn, one_way)
        for u in [0, 1] * 8:
            worker_free = np.maximum(worker_free, back[u]) + attention[:, u]
            ffn_free = max(float(worker_free.max()) + one_way, ffn_free) + ffn
            back[u] = ffn_free + one_way
        fresh = rng.standard_normal((num_workers, m))
        spread = memory * spread + np.sqrt(1 - memory**2) * fresh
    assert -0.002 < max(back) / expected - 1 < 1e-4


def test_three_microbatches_hide_a_transfer_that_two_cannot() -> None:
    """Hidden iff m >= (A + t_F + 2 c) / max(A, t_F): at balance with A >= 2 c, from m = 3 on."""
    for m, period in ((1, 840.0), (2, 420.0), (3, 300.0), (4, 300.0)):
        assert fixed_period([[300.0] * m], 300.0, 120.0) == pytest.approx(period)


def test_attention_times_must_be_a_table() -> None:
    with pytest.raises(ValueError, match=r"attention_s must be \[r, m\]"):
        fixed_period([300.0, 310.0], 280.0, 12.0)


def bundle(m: int, alpha_ffn: float = 0.3, one_way: float = 0.7, transfer: float = 0.0) -> Bundle:
    return Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=1.0,
            beta_attention=0.4,
            alpha_ffn=alpha_ffn,
            beta_ffn=0.9,
            beta_communication=transfer,
        ),
        batch_per_worker=2,
        semantics="pingpong",
        microbatches=m,
        one_way_s=one_way,
    )


def by_enumeration(model: Bundle, law: WorkerLoadLaw, r: int) -> float:
    """Expected period over every combination of r * m loads."""
    m = model.microbatches
    c = model.coefficients
    ffn = c.ffn_s(2 * r)
    link = c.communication_s(r, 2)
    total = 0.0
    for outcome in itertools.product(range(len(law.cdf)), repeat=r * m):
        loads = law.grid_tokens[list(outcome)].reshape(r, m)
        attention = c.alpha_attention * loads + c.beta_attention
        period = fixed_period(attention, ffn, model.one_way_time_s(r), link)
        total += period * float(np.prod(law.pmf[list(outcome)]))
    return total


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([(1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1)]),
    st.floats(0.0, 5.0),
    st.floats(0.0, 8.0),
    st.floats(0.0, 12.0),
    st.floats(0.0, 6.0),
)
@settings(max_examples=60, deadline=None)
def test_expected_period_equals_that_of_all_loads(
    weights: list[int],
    shape: tuple[int, int],
    start: float,
    alpha_ffn: float,
    one_way: float,
    transfer: float,
) -> None:
    m, r = shape
    law = WorkerLoadLaw(start_tokens=start, step_tokens=1.7, cdf=cdf_of(np.array(weights, float)))
    model = bundle(m, alpha_ffn, one_way, transfer)
    assert law_cycle_s(model, law, [r])[0] == pytest.approx(by_enumeration(model, law, r), rel=1e-9)


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_expected_period_equals_sampled_loads(m: int) -> None:
    """40,000 draws of 6 workers from a skewed exact law; within four standard errors."""
    law = exact_law(length_laws.geometric(30, 80), 12)
    model = Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=0.01,
            beta_attention=2.0,
            alpha_ffn=0.14,
            beta_ffn=4.0,
            alpha_communication=0.05,
            beta_communication=1.0,
        ),
        batch_per_worker=12,
        semantics="pingpong",
        microbatches=m,
    )
    c = model.coefficients
    rng = stream(3, "loads", m)
    index = np.searchsorted(law.cdf, rng.random((40_000, 6, m)))
    attention = 0.01 * law.grid_tokens[index] + 2.0
    ffn, link = c.ffn_s(72), c.communication_s(6, 12)
    period = np.maximum(attention.mean(axis=2).max(axis=1), max(ffn, link))
    period = np.maximum(period, (attention.max(axis=(1, 2)) + ffn + link) / m)
    expected = law_cycle_s(model, law, [6])[0]
    assert abs(period.mean() - expected) < 4 * period.std() / 200
    assert period.std() / 200 < 2e-3 * expected


def test_lattices_of_the_product_are_fine_enough() -> None:
    """Against lattices four times finer: two in flight 2e-5, three 2e-4, at a worker skew of 3."""
    law = exact_law(length_laws.pareto(20, 30, 2.5, 20_000), 64)
    model = Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=0.0165,
            beta_attention=50.0,
            alpha_ffn=0.083,
            beta_ffn=50.0,
            beta_communication=10.0,
        ),
        batch_per_worker=64,
        semantics="pingpong",
        microbatches=2,
    )
    ratios = np.array([2.0, 8.0, 32.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.pingpong.TWO_MICROBATCH_POINTS", 1 << 16)
        fine = law_cycle_s(model, law, ratios)
        three = dataclasses.replace(model, microbatches=3)
        patch.setattr("models.pingpong.SUM_POINTS", 8192)
        fine_three = law_cycle_s(three, law, ratios)
    assert law_cycle_s(model, law, ratios) == pytest.approx(fine, rel=2e-5)
    assert law_cycle_s(three, law, ratios) == pytest.approx(fine_three, rel=2e-4)


@pytest.mark.parametrize("m", [2, 3])
def test_turns_never_take_longer_than_the_barrier_when_transfers_are_free(m: int) -> None:
    """Without transfers (A + t_F) / m and the mean over microbatches stay below max(A, t_F)."""
    law = exact_law(length_laws.geometric(5, 9), 2)
    turns = bundle(m, 0.3, 0.0)
    waiting = dataclasses.replace(turns, semantics="barrier", microbatches=1)
    ratios = np.arange(1, 60)
    assert np.all(
        law_cycle_s(turns, law, ratios) <= barrier_cycle_s(waiting, law, ratios) * (1 + 1e-9)
    )


@pytest.mark.parametrize("m", [1, 2, 4])
def test_expected_period_grows_with_r_and_is_never_below_mean_loads(m: int) -> None:
    law = exact_law(length_laws.geometric(5, 9), 2)
    model = bundle(m)
    ratios = np.arange(1, 80)
    cycle = law_cycle_s(model, law, ratios)
    assert np.all(np.diff(cycle) >= -1e-12 * cycle[1:])
    mean = mean_field_cycle_s(model, law.mean_tokens / 2, ratios)
    assert np.all(cycle >= mean * (1 - 1e-9))


@pytest.mark.parametrize("m", [1, 2, 3])
def test_constant_loads_need_no_expectation(m: int) -> None:
    law = exact_law(length_laws.fixed(8, 1), 2)
    model = bundle(m)
    expected = [
        fixed_period([[16.4] * m] * r, model.coefficients.ffn_s(2 * r), 0.7) for r in (1, 30)
    ]
    assert law_cycle_s(model, law, [1, 30]) == pytest.approx(expected, rel=1e-12)
