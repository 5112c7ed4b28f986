"""Bundles with arrivals: small runs by hand, queueing theory, and an account of every request."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.bundle import Bundle, LatencyCoefficients
from models.streams import stream
from policies.routing import RoundRobin
from traces.lengths import LengthPairs
from twin.bundle import simulate_saturated
from twin.faults import JitteryWorker, LostWorker, PauseWorker, SlowWorker
from twin.open_log import MAX_SERIES_POINTS
from twin.open_loop import OpenLoopRun, simulate_open_loop
from twin.output_statistics import batch_means, replications

# One token of load is one second; FFN and link are short.
BY_HAND = LatencyCoefficients(
    alpha_attention=1.0, beta_attention=10.0, alpha_ffn=0.0, beta_ffn=1.0, beta_communication=2.0
)
# Every step takes 1 second, whatever the load.
CLOCKWORK = LatencyCoefficients(
    alpha_attention=0.0, beta_attention=1.0, alpha_ffn=0.0, beta_ffn=0.5
)


def run(
    arrival_s: Any, prompts: Any, outputs: Any, *, r: int = 1, b: int = 2, **kwargs: Any
) -> OpenLoopRun:
    names = ("coefficients", "semantics", "microbatches", "num_layers", "one_way_s")
    bundle = {name: kwargs.pop(name) for name in names if name in kwargs}
    return simulate_open_loop(
        Bundle(**{"coefficients": BY_HAND, "batch_per_worker": b, **bundle}),
        r,
        arrival_s,
        prompts,
        outputs,
        **{"seed": 1, **kwargs},
    )


class TestByHand:
    def test_one_request_on_an_idle_bundle(self) -> None:
        # Steps of 10 + 5, 10 + 6, 10 + 7 from its arrival on.
        one = run([3.0], [5], [3])
        assert one.admitted_s.tolist() == [3.0]
        assert one.first_token_s.tolist() == [18.0]
        assert one.last_token_s.tolist() == [51.0]
        assert one.ttft_s.tolist() == [15.0]
        assert one.tpot_s.tolist() == [16.5]
        assert one.e2e_s.tolist() == [48.0]
        assert one.queue_s.tolist() == [0.0]
        assert one.totals.tokens == 3
        assert one.end_s == 51.0

    def test_requests_join_at_the_next_step_boundary_and_wait_for_a_slot_first_come(self) -> None:
        # Two slots. 0: 0..21 (11, 10 + 1 + ..), see below; the third waits for a slot.
        three = run([0.0, 1.0, 2.0], [0, 0, 0], [2, 2, 1])
        # [0, 10): request 0 alone, load 0. [10, 21): 0 has age 1, 1 joins: load 1.
        # 0 leaves at 21, 2 joins: [21, 32): loads 1 + 0. Both end at 32.
        assert three.admitted_s.tolist() == [0.0, 10.0, 21.0]
        assert three.first_token_s.tolist() == [10.0, 21.0, 32.0]
        assert three.last_token_s.tolist() == [21.0, 32.0, 32.0]
        assert math.isnan(three.tpot_s[2])

    def test_prefill_delays_the_request_for_a_slot_and_a_short_prompt_may_overtake(self) -> None:
        delayed = run([0.0, 0.0], [4, 1], [1, 1], b=1, prefill_base_s=2.0, prefill_s_per_token=3.0)
        assert delayed.ready_s.tolist() == [14.0, 5.0]
        assert delayed.admitted_s.tolist() == [16.0, 5.0]
        assert delayed.queue_s.tolist() == [2.0, 0.0]
        assert delayed.ttft_s.tolist() == [30.0, 16.0]
        assert any("delay by prompt length" in note for note in delayed.notes)

    def test_all_layers_pass_between_two_tokens(self) -> None:
        deep = run([0.0], [5], [2], num_layers=7)
        assert deep.last_token_s.tolist() == [7 * 15.0 + 7 * 16.0]

    def test_microbatches_of_a_barrier_bundle_alternate(self) -> None:
        # One slot each. Microbatch 0: [0, 10), 1: [10, 20) with the request of instant 1.
        # Tokens of microbatch 0 are there at its next turn, at 20.
        two = run([0.0, 1.0], [0, 0], [2, 1], b=1, microbatches=2)
        assert two.admitted_s.tolist() == [0.0, 10.0]
        assert two.first_token_s.tolist() == [20.0, 31.0]
        assert two.last_token_s.tolist() == [31.0, 31.0]

    def test_pingpong_adds_the_way_to_the_ffn_and_back(self) -> None:
        # attention 15, there 3, FFN 1, back 3; second step 16 + 7.
        one = run([3.0], [5], [2], semantics="pingpong", one_way_s=3.0)
        assert one.first_token_s.tolist() == [25.0]
        assert one.last_token_s.tolist() == [48.0]

    def test_an_empty_microbatch_in_flight_takes_a_request_at_once(self) -> None:
        two = run([0.0, 4.0], [5, 0], [1, 1], semantics="pingpong", microbatches=2, one_way_s=3.0)
        # Request 1 finds worker 0 busy until 15, works until 25, and is back at 32.
        assert two.admitted_s.tolist() == [0.0, 4.0]
        assert two.last_token_s.tolist() == [22.0, 32.0]

    def test_the_ffn_and_the_link_see_only_filled_slots(self) -> None:
        coefficients = LatencyCoefficients(
            alpha_attention=0.0,
            beta_attention=1.0,
            alpha_ffn=10.0,
            beta_ffn=0.0,
            alpha_communication=7.0,
            communication="bundle",
        )
        three = run([0.0] * 3, [0] * 3, [1, 1, 2], r=2, b=8, coefficients=coefficients)
        assert three.last_token_s.tolist() == [30.0, 30.0, 40.0]
        assert three.totals.ffn_s == 40.0
        assert three.totals.link_s == 28.0

    def test_the_horizon_cuts_and_counts_what_is_left(self) -> None:
        cut = run([0.0, 1.0, 2.0, 30.0, 99.0], [0, 0, 0, 90, 0], [9, 1, 1, 1, 1], horizon_s=35.0,
                  prefill_s_per_token=0.1)  # fmt: skip
        # Boundaries at 0, 10, 21, 33; request 2 takes the slot that request 1 leaves at 21.
        assert (cut.injected, cut.completed, cut.running) == (4, 2, 1)
        assert (cut.queued, cut.preparing) == (0, 1)
        assert cut.last_token_s.tolist()[1:3] == [21.0, 33.0]
        assert np.isnan(cut.last_token_s[[0, 3, 4]]).all()
        assert cut.first_token_s[0] == 10.0
        assert cut.end_s == 35.0
        assert any("2 of 4 requests were unfinished" in note for note in cut.notes)

    def test_a_lost_worker_returns_its_requests_with_what_they_have(self) -> None:
        # Worker 1 is lost at 12: the boundary at 20 sees it. Request 1 has one token then, and
        # joins worker 0 with a prompt of 1: from 20 on, loads of worker 0: 1 + 1, 2 + 2, ..
        lost = run([0.0, 0.0], [0, 0], [4, 4], r=2, routing="round_robin",
                   coefficients=LatencyCoefficients(alpha_attention=1.0, beta_attention=20.0,
                                                    alpha_ffn=0.0, beta_ffn=1.0),
                   faults=[LostWorker(worker=1, at_s=12.0)])  # fmt: skip
        assert lost.first_token_s.tolist() == [20.0, 20.0]
        assert lost.last_token_s.tolist() == [20.0 + 22 + 24 + 26] * 2
        assert lost.retries.tolist() == [0, 1]
        assert lost.worker.tolist() == [0, 0]
        assert lost.totals.retried_tokens == 1
        assert lost.totals.retry_wait_s == 22.0
        assert lost.completed == 2

    def test_prefill_of_a_retry_covers_what_was_generated(self) -> None:
        lost = run([0.0], [3], [2], r=2, routing="round_robin", prefill_s_per_token=1.0,
                   faults=[LostWorker(worker=0, at_s=5.0)])  # fmt: skip
        # Ready at 3, first token at 16; lost then, prefill of 3 + 1 tokens, on again from 20.
        assert lost.first_token_s.tolist() == [16.0]
        assert lost.last_token_s.tolist() == [20.0 + 14.0]
        assert lost.admitted_s.tolist() == [3.0]
        assert lost.gaps.mean_s == pytest.approx(18.0)

    def test_a_slow_worker_and_a_pause_stretch_the_steps_they_meet(self) -> None:
        for semantics in ("barrier", "pingpong"):
            slow = run([0.0], [0], [3], semantics=semantics, one_way_s=0.0, coefficients=CLOCKWORK,
                       faults=[SlowWorker(worker=0, factor=4.0, start_s=1.0, end_s=2.5),
                               PauseWorker(worker=0, at_s=0.25, duration_s=0.5)])  # fmt: skip
            extra = 0.0 if semantics == "barrier" else 0.5
            assert slow.first_token_s.tolist() == [1.5 + extra]
            assert slow.totals.fault_s == pytest.approx(0.5 + 3.0)

    def test_a_timeline_has_the_stages_of_the_first_steps(self) -> None:
        drawn = run([3.0], [5], [3], timeline_cycles=1)
        assert [tuple(interval) for interval in drawn.timeline] == [
            ("attention 0", 3.0, 18.0, 0, "attention"),
            ("link", 3.0, 5.0, 0, "transfer"),
            ("ffn", 3.0, 4.0, 0, "ffn"),
        ]


class TestTheory:
    @pytest.mark.parametrize("semantics", ["barrier", "pingpong"])
    def test_one_slot_is_an_m_g_1_queue(self, semantics: str) -> None:
        # Service is D steps of 1 s (barrier) or 1 + 0.5 s (pingpong), D geometric of mean 4:
        # Pollaczek-Khinchine, W = lambda E[S^2] / (2 (1 - rho)).
        n, step_s, mean, rho = 30_000, 1.0 if semantics == "barrier" else 1.5, 4.0, 0.7
        rng = stream(21, "queue")
        outputs = rng.geometric(1 / mean, n)
        arrivals = np.cumsum(rng.exponential(mean * step_s / rho, n))
        queue = run(arrivals, np.ones(n), outputs, b=1, semantics=semantics, one_way_s=0.0,
                    coefficients=CLOCKWORK)  # fmt: skip
        second_moment = step_s**2 * (2 - 1 / mean) * mean**2
        waiting = rho / (mean * step_s) * second_moment / (2 * (1 - rho))
        estimate = batch_means(queue.queue_s[2000:], num_batches=30)
        assert abs(estimate.mean - waiting) < 4 * estimate.standard_error
        assert estimate.standard_error < 0.06 * waiting
        assert queue.attention_idle == pytest.approx(1 - rho / step_s, abs=0.02)

    def test_one_token_and_many_slots_are_a_bulk_service_queue(self) -> None:
        # Service of 1 s for up to 3 waiting requests; an idle server starts at once. The states
        # at service ends are a Markov chain, solved here by power iteration.
        rate, most, size = 2.0, 3, 80
        poisson = np.exp(-rate) * np.cumprod(np.r_[1.0, rate / np.arange(1, size)])
        chain = np.zeros((size, size))
        for left in range(size):
            stay = max(0, (left if left else 1) - most)
            chain[left, stay:] = poisson[: size - stay]
            chain[left, -1] += 1.0 - chain[left].sum()
        law = np.linalg.matrix_power(chain, 4096)[0]
        # Served per service: min(left, 3), or 1 after an idle spell.
        served = float(law @ np.r_[1.0, np.minimum(np.arange(1, size), most)])
        n = 80_000
        arrivals = np.cumsum(stream(5, "bulk").exponential(1 / rate, n))
        bulk = run(arrivals, np.zeros(n), np.ones(n), b=most, coefficients=CLOCKWORK)
        assert bulk.totals.tokens / bulk.totals.steps == pytest.approx(served, rel=0.01)
        idle = 1.0 - rate / served
        assert bulk.attention_idle == pytest.approx(idle, abs=0.01)

    @pytest.mark.parametrize(
        ("semantics", "m"), [("barrier", 1), ("barrier", 2), ("pingpong", 2), ("pingpong", 3)]
    )
    def test_little_s_law_holds_for_slots(self, semantics: str, m: int) -> None:
        # Slot seconds of all requests equal the filled slots integrated over all steps.
        rng = stream(3, "little")
        n = 3000
        arrivals = np.cumsum(rng.exponential(6.0, n))
        prompts, outputs = rng.integers(0, 9, n), rng.integers(1, 12, n)
        busy = run(arrivals, prompts, outputs, r=3, b=4, semantics=semantics, microbatches=m,
                   routing="power_of_two")  # fmt: skip
        in_slots = float((busy.last_token_s - busy.admitted_s).sum())
        first_gaps = float((busy.first_token_s - busy.admitted_s).sum())
        assert busy.gaps.total_s + first_gaps == pytest.approx(in_slots, rel=1e-9)
        assert int(busy.gaps.num_gaps.sum()) == int((outputs - 1).sum())
        assert busy.totals.tokens == int(outputs.sum())

    def test_under_overload_it_becomes_the_saturated_bundle(self) -> None:
        coefficients = LatencyCoefficients(
            alpha_attention=0.01, beta_attention=2.0, alpha_ffn=0.05, beta_ffn=2.0
        )
        law = LengthPairs.from_pairs([70, 90, 60, 30], [1, 90, 40, 20])
        prompts, outputs = law.sample(stream(3, "overload"), 30_000)
        bundle = Bundle(coefficients=coefficients, batch_per_worker=32)
        full = simulate_open_loop(
            bundle, 4, np.zeros(30_000), prompts, outputs, seed=1, routing="random", horizon_s=2.2e5
        )
        cycle_s = [
            simulate_saturated(bundle, 4, law, seed=1, replication=k, num_cycles=3000).mean_cycle_s
            for k in range(20)
        ]
        late = batch_means([point.step_s for point in full.series if point.time_s > 1e4])
        fresh = replications(cycle_s)
        error = math.hypot(late.standard_error, fresh.standard_error)
        assert full.queued > 0
        assert error < 0.006 * fresh.mean
        assert abs(late.mean - fresh.mean) < 4 * error
        assert {point.live_slots for point in full.series} == {4 * 32}

    def test_balanced_routing_shortens_steps_when_slots_are_scarce(self) -> None:
        rng = stream(3, "routing test")
        n = 4000
        prompts = rng.pareto(1.5, n).astype(int) * 30
        outputs = rng.geometric(1 / 20, n)
        means = {
            routing: run(np.zeros(n), prompts, outputs, r=6, b=32, routing=routing).gaps.mean_s
            for routing in ("random", "least_token_load", "power_of_two")
        }
        assert means["least_token_load"] < 0.9 * means["random"]


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.floats(0.0, 60.0), min_size=1, max_size=30),
    semantics=st.sampled_from(["barrier", "pingpong"]),
    m=st.integers(1, 3),
    routing=st.sampled_from(["random", "round_robin", "least_token_load", "power_of_two"]),
    horizon_s=st.one_of(st.none(), st.floats(1.0, 800.0)),
    lost_at_s=st.floats(0.0, 300.0),
    prefill=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 5),
)
def test_every_request_is_accounted_for(
    gaps: list[float],
    semantics: str,
    m: int,
    routing: str,
    horizon_s: float | None,
    lost_at_s: float,
    prefill: float,
    seed: int,
) -> None:
    n = len(gaps)
    rng = stream(seed, "requests")
    outputs = rng.integers(1, 9, n)
    kwargs: dict[str, Any] = {
        "r": 3,
        "semantics": semantics,
        "microbatches": m,
        "routing": routing,
        "horizon_s": horizon_s,
        "prefill_s_per_token": prefill,
        "seed": seed,
        "num_layers": 2,
        "faults": [
            LostWorker(worker=0, at_s=lost_at_s, back_after_s=100.0),
            LostWorker(worker=2, at_s=lost_at_s / 2),
            LostWorker(worker=1, at_s=lost_at_s, back_after_s=50.0),
            JitteryWorker(cv=0.3),
        ],
    }
    arrivals, prompts = np.cumsum(gaps), rng.integers(0, 20, n)
    end = run(arrivals, prompts, outputs, **kwargs)
    assert end.injected == end.completed + end.running + end.queued + end.preparing
    done = np.isfinite(end.last_token_s)
    assert end.completed == done.sum()
    if horizon_s is None:
        assert end.completed == n
        assert end.totals.tokens == outputs.sum()
        assert int(end.gaps.num_gaps.sum()) == int((outputs - 1).sum())
    assert (end.ready_s[done] >= arrivals[done]).all()
    assert (end.admitted_s[done] >= end.ready_s[done]).all()
    assert (end.first_token_s[done] > end.admitted_s[done]).all()
    assert (end.last_token_s[done] >= end.first_token_s[done]).all()
    assert ((end.last_token_s > end.first_token_s) == (done & (outputs > 1)))[done].all()
    again = run(arrivals, prompts, outputs, **kwargs)
    for name in ("admitted_s", "first_token_s", "last_token_s", "worker", "retries"):
        assert np.array_equal(getattr(end, name), getattr(again, name), equal_nan=True), name
    assert end.series == again.series


def test_the_series_keeps_its_room_and_covers_the_whole_run() -> None:
    n = 30_000
    long = run(np.arange(n) * 2.0, np.zeros(n), np.ones(n), coefficients=CLOCKWORK)
    assert MAX_SERIES_POINTS // 2 <= len(long.series) <= MAX_SERIES_POINTS
    times = [point.time_s for point in long.series]
    assert times == sorted(times)
    assert times[-1] > 0.99 * long.end_s
    assert {point.queue_length for point in long.series} == {0}


def test_gap_quantiles_are_those_of_all_gaps_pooled() -> None:
    rng = stream(3, "gaps")
    n = 400
    outputs = rng.integers(2, 30, n)
    pooled = run(np.cumsum(rng.exponential(20.0, n)), rng.integers(0, 90, n), outputs, b=1)
    # One slot: gaps follow from the steps, 10 + prompt + age, age >= 1.
    gaps = np.concatenate(
        [10.0 + p + np.arange(1, d) for p, d in zip(pooled.prompt_tokens, outputs, strict=True)]
    )
    assert pooled.gaps.mean_s == pytest.approx(gaps.mean())
    for share in (0.1, 0.5, 0.9, 0.99):
        exact = np.quantile(gaps, share, method="inverted_cdf")
        assert pooled.gaps.quantiles([share])[0] == pytest.approx(exact, rel=6e-4)


def test_a_policy_object_may_be_given_and_is_named_in_the_record() -> None:
    policy = RoundRobin()
    assert run([0.0, 0.0], [1, 1], [1, 1], r=2, routing=policy).routing == "RoundRobin"


def test_a_policy_that_overfills_a_worker_is_found_out() -> None:
    class Stubborn(RoundRobin):
        def assign(self, prompt_tokens: Any, **state: Any) -> Any:
            order = super().assign(prompt_tokens, **state)
            order.workers[:] = 0
            return order

    with pytest.raises(RuntimeError, match="Stubborn uses more slots than are free"):
        run([0.0] * 3, [1] * 3, [1] * 3, r=2, routing=Stubborn())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_s": []}, "arrival_s must have at least one request, found 0"),
        ({"arrival_s": [2.0, 1.0]}, "must not decrease, found 1 after 2 at index 1"),
        ({"arrival_s": [-1.0, 1.0]}, "arrival_s must be >= 0, found -1.0"),
        ({"arrival_s": [1.0, math.nan]}, "arrival_s must be finite"),
        ({"prompts": [1]}, "prompt_tokens must have one value a request, 2, found 1"),
        ({"prompts": [1, -1]}, "prompt_tokens must be >= 0, found -1"),
        ({"outputs": [1, 0]}, "output_tokens must be >= 1, found 0"),
        ({"horizon_s": 0.0}, "horizon_s must be finite and > 0, or None, found 0.0"),
        ({"prefill_base_s": -1.0}, "prefill_base_s must be finite and >= 0, found -1.0"),
        ({"routing": "best"}, "routing must be one of random"),
        ({"r": 0}, "attention_per_ffn must be >= 1, found 0"),
        ({"simulated_layers": 2}, r"simulated_layers must be one of 1\.\.1"),
    ],
)
def test_a_bad_argument_is_named_with_its_rule(change: dict[str, Any], message: str) -> None:
    good = {"arrival_s": [0.0, 1.0], "prompts": [1, 1], "outputs": [1, 1]}
    with pytest.raises(ValueError, match=message):
        run(**{**good, **change})
