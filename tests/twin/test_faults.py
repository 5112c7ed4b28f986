"""Slow, jittery, paused and lost workers, by hand and by law."""

import math
from typing import Any

import numpy as np
import pytest

from models.bundle import Bundle, LatencyCoefficients
from traces.lengths import LengthPairs
from twin.bundle import simulate_saturated
from twin.fault_effects import FaultEffects
from twin.faults import JitteryWorker, LostWorker, PauseWorker, SlowWorker
from twin.saturated_run import SaturatedRun

COEFFICIENTS = LatencyCoefficients(
    alpha_attention=1.0, beta_attention=5.0, alpha_ffn=0.5, beta_ffn=1.0, beta_communication=2.0
)
# Prompts of 10 and one token each: every worker holds 4 * 10 tokens for good, attention takes 45.
ONE_TOKEN = LengthPairs.from_pairs([10], [1])
MIXED = LengthPairs.from_pairs([7, 0, 40, 3], [1, 9, 4, 2], [0.4, 0.2, 0.1, 0.3])


def run(
    *faults: Any, law: LengthPairs = ONE_TOKEN, cycles: int = 12, **bundle: Any
) -> SaturatedRun:
    return simulate_saturated(
        Bundle(coefficients=COEFFICIENTS, batch_per_worker=4, **bundle),
        2,
        law,
        seed=3,
        num_cycles=cycles,
        faults=faults,
    )


def test_a_slow_worker_stretches_the_cycles_that_begin_in_its_window() -> None:
    # Cycles of 45 until the first one that starts at or after 100, then 90 until 300.
    slow = run(SlowWorker(worker=1, factor=2.0, start_s=100.0, end_s=300.0))
    assert slow.cycle_s.tolist() == [45, 45, 45, 90, 90, 45, 45, 45, 45, 45, 45, 45]
    assert slow.healthy_cycle_s.tolist() == [45] * 12
    assert slow.attention_mean_s.tolist()[3] == (45 + 90) / 2
    assert slow.fault_overhead == pytest.approx((12 * 45 + 2 * 45) / (12 * 45) - 1)
    assert slow.engine == "simpy"
    assert "Ran on SimPy's clock: the compiled loops know no faults." in slow.notes


def test_a_slow_worker_under_pingpong_paces_the_whole_bundle() -> None:
    # Two microbatches: worker 1 works 2 * 1.5 * 45 per round without a gap.
    slow = run(SlowWorker(worker=1, factor=1.5), cycles=2000, semantics="pingpong", microbatches=2)
    assert slow.cycle_s[-500:].mean() == pytest.approx(67.5, rel=1e-9)
    assert slow.healthy_cycle_s[-500:].mean() == pytest.approx(45.0, rel=1e-9)
    assert slow.attention_max_s[-1] == pytest.approx(67.5)
    assert slow.attention_mean_s[-1] == pytest.approx(56.25)


def test_a_slow_worker_hidden_behind_the_ffn_costs_nothing() -> None:
    coefficients = LatencyCoefficients(
        alpha_attention=1.0, beta_attention=5.0, alpha_ffn=0.0, beta_ffn=100.0
    )
    bundle = Bundle(coefficients=coefficients, batch_per_worker=4)
    slow = simulate_saturated(
        bundle, 2, ONE_TOKEN, seed=3, num_cycles=9, faults=[SlowWorker(worker=0, factor=2.0)]
    )
    assert slow.cycle_s.tolist() == [100.0] * 9
    assert slow.fault_overhead == 0.0


def test_a_pause_delays_the_stage_it_falls_into_by_its_length() -> None:
    paused = run(PauseWorker(worker=0, at_s=60.0, duration_s=30.0))
    assert paused.cycle_s.tolist() == [45, 75] + [45] * 10


def test_a_pause_that_covers_a_start_delays_it_to_the_end_of_the_pause() -> None:
    # The second cycle starts at 45, in the pause from 40 to 70; the first is cut at 40.
    effects = FaultEffects(
        [PauseWorker(worker=0, at_s=40, duration_s=30)], 1, seed=1, replication=0
    )
    assert effects.finish_s(0, 0.0, 45.0) == 75.0
    assert effects.finish_s(0, 50.0, 45.0) == 115.0
    assert effects.finish_s(0, 70.0, 45.0) == 115.0
    assert effects.finish_s(0, 0.0, 40.0) == 40.0


def test_overlapping_pauses_count_once() -> None:
    pauses = [PauseWorker(worker=0, at_s=a, duration_s=10) for a in (15, 10)]
    effects = FaultEffects(pauses, 1, seed=1, replication=0)
    assert effects.finish_s(0, 0.0, 12.0) == 27.0


def test_jitter_keeps_the_mean_and_has_the_asked_variation() -> None:
    effects = FaultEffects([JitteryWorker(worker=2, cv=0.3)], 4, seed=1, replication=0)
    noise = np.array([effects.finish_s(2, 0.0, 1.0) for _ in range(20_000)])
    assert noise.mean() == pytest.approx(1.0, abs=4 * 0.3 / math.sqrt(20_000))
    assert noise.std() == pytest.approx(0.3, rel=0.03)
    assert effects.finish_s(1, 0.0, 1.0) == 1.0


def test_jitter_on_every_worker_is_independent_and_costs_the_expected_maximum() -> None:
    # Gamma of cv 1 is exponential: the larger of two has mean 1.5.
    noisy = run(JitteryWorker(cv=1.0), cycles=20_000)
    assert noisy.cycle_s.mean() == pytest.approx(45 * 1.5, rel=0.02)
    assert noisy.fault_overhead == pytest.approx(0.5, rel=0.05)
    assert noisy.barrier_wait_share == pytest.approx(1 / 3, rel=0.03)


def test_jitter_does_not_shift_the_requests() -> None:
    noisy, calm = run(JitteryWorker(cv=1.0), law=MIXED), run(law=MIXED)
    assert noisy.load_samples.tolist() == calm.load_samples.tolist()
    assert noisy.healthy_cycle_s.tolist() == calm.cycle_s.tolist()


def test_a_fault_after_the_end_changes_nothing() -> None:
    for semantics, m in (("barrier", 2), ("pingpong", 2)):
        bundle = {"semantics": semantics, "microbatches": m, "num_layers": 3}
        late = run(SlowWorker(worker=0, factor=9.0, start_s=1e9), law=MIXED, cycles=101, **bundle)
        calm = run(law=MIXED, cycles=101, **bundle)
        assert late.cycle_s == pytest.approx(calm.cycle_s, rel=1e-12)
        assert late.healthy_cycle_s == pytest.approx(calm.cycle_s, rel=1e-12)
        assert late.attention_mean_s == pytest.approx(calm.attention_mean_s, rel=1e-12)


def test_the_barrier_runs_with_one_worker_less_until_the_lost_one_is_back() -> None:
    lost = run(LostWorker(worker=0, at_s=100.0, back_after_s=80.0))
    # Cycles begin at 0, 45, .. 135 (lost), 180 (back).
    assert lost.workers_present.tolist() == [2, 2, 2, 1] + [2] * 8
    assert lost.live_slots.tolist() == [8, 8, 8, 4] + [8] * 8
    assert lost.ffn_s.tolist() == [5, 5, 5, 3] + [5] * 8
    assert lost.cycle_s.tolist() == [45] * 12
    assert lost.missing_slots == pytest.approx(4 / (12 * 8))


@pytest.mark.parametrize("routing", ["random", "least_token_load"])
def test_no_token_of_a_lost_request_is_lost_or_made_twice(routing: str) -> None:
    # Empty prompts: what slots hold is what was generated so far, retries included.
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=30)
    faulty = simulate_saturated(
        bundle,
        3,
        LengthPairs.from_pairs([0, 0], [7, 3]),
        seed=3,
        num_cycles=400,
        start="cold",
        routing=routing,
        faults=[
            LostWorker(worker=1, at_s=3000.0, back_after_s=9000.0),
            LostWorker(worker=2, at_s=25_000.0),
        ],
    )
    assert faulty.retries == 2 * 30
    assert faulty.in_flight == 2 * 30
    assert faulty.waiting == 0
    made = int(faulty.live_slots[:-1].sum())
    held = faulty.mean_load_tokens[-1] * faulty.workers_present[-1]
    outputs = (made - held) / int(faulty.completed[:-1].sum())
    assert outputs == pytest.approx(5.0, rel=0.02)


def test_requests_of_equal_length_account_for_every_token_made_across_losses() -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=30)
    faulty = simulate_saturated(
        bundle,
        3,
        LengthPairs.from_pairs([0], [7]),
        seed=3,
        num_cycles=200,
        faults=[
            LostWorker(worker=1, at_s=1000.0, back_after_s=2000.0),
            LostWorker(worker=2, at_s=5000.0),
        ],
    )
    before = faulty.mean_load_tokens[0] * 3
    after = faulty.mean_load_tokens[-1] * faulty.workers_present[-1]
    made = int(faulty.live_slots[:-1].sum())
    assert before + made == 7 * int(faulty.completed[:-1].sum()) + after
    assert faulty.retries == 60
    assert faulty.waiting == 0


def test_when_every_worker_is_away_the_bundle_waits_for_the_first_to_come_back() -> None:
    for semantics in ("barrier", "pingpong"):
        away = run(
            LostWorker(worker=0, at_s=100.0, back_after_s=1000.0),
            LostWorker(worker=1, at_s=100.0, back_after_s=2000.0),
            semantics=semantics,
        )
        assert away.workers_present.min() == 1
        assert away.cycle_end_s[-1] > 1100.0
        assert (np.diff(away.cycle_end_s) > 0).all()


def test_the_healthy_shadow_of_a_pingpong_run_is_the_run_without_faults() -> None:
    bundle = {"semantics": "pingpong", "microbatches": 3, "num_layers": 4}
    noisy = run(JitteryWorker(cv=0.5), law=MIXED, cycles=300, **bundle)
    calm = run(law=MIXED, cycles=300, **bundle)
    assert noisy.healthy_cycle_s == pytest.approx(calm.cycle_s, rel=1e-12)
    assert noisy.mean_cycle_s > calm.mean_cycle_s


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlowWorker(worker=-1, factor=2.0), "SlowWorker.worker must be >= 0, found -1"),
        (lambda: SlowWorker(worker=0, factor=0.0), "factor must be finite and > 0, found 0.0"),
        (
            lambda: SlowWorker(worker=0, factor=2.0, start_s=5.0, end_s=5.0),
            "end_s must be later than start_s = 5.0, found 5.0",
        ),
        (lambda: SlowWorker(worker=0, factor=2.0, start_s=-1.0), "start_s must be finite and >= 0"),
        (lambda: JitteryWorker(cv=-0.1), "JitteryWorker.cv must be finite and > 0, found -0.1"),
        (lambda: JitteryWorker(cv=math.nan), "JitteryWorker.cv must be finite and > 0, found nan"),
        (lambda: PauseWorker(worker=0, at_s=1.0, duration_s=0.0), "PauseWorker.duration_s must be"),
        (lambda: PauseWorker(worker=0, at_s=-1.0, duration_s=1.0), "PauseWorker.at_s must be"),
        (lambda: LostWorker(worker=0, at_s=math.inf), "LostWorker.at_s must be finite"),
        (lambda: LostWorker(worker=0, at_s=0.0, back_after_s=0.0), "LostWorker.back_after_s must"),
        (lambda: run(SlowWorker(worker=2, factor=2.0)), r"worker must be one of 0\.\.1, found 2"),
        (
            lambda: run(LostWorker(worker=0, at_s=1.0), LostWorker(worker=1, at_s=9.0)),
            "every attention worker is lost and none comes back",
        ),
        (
            lambda: run(
                LostWorker(worker=0, at_s=1.0, back_after_s=9.0), LostWorker(worker=0, at_s=5.0)
            ),
            r"LostWorker.at_s = 5.0: worker 0 is already lost from 1.0 until 10.0",
        ),
    ],
)
def test_a_fault_that_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_compiled_engine_refuses_faults_instead_of_ignoring_them() -> None:
    with pytest.raises(ValueError, match="engine must be 'simpy' or 'auto' with faults"):
        simulate_saturated(
            Bundle(coefficients=COEFFICIENTS, batch_per_worker=4),
            2,
            ONE_TOKEN,
            seed=3,
            num_cycles=5,
            engine="compiled",
            faults=[SlowWorker(worker=0, factor=2.0)],
        )
