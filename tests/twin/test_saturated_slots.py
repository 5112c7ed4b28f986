"""Always-full slots against a slot-by-slot replay that looks at every slot in every step."""

import numpy as np
import pytest

from models.bundle import Bundle, LatencyCoefficients
from models.streams import stream
from policies.catalog import ROUTING
from traces.lengths import LengthPairs
from twin.bundle import simulate_saturated
from twin.request_stream import RequestLaw
from twin.saturated_run import SaturatedRun

COEFFICIENTS = LatencyCoefficients(
    alpha_attention=0.01, beta_attention=3.0, alpha_ffn=0.05, beta_ffn=2.0, beta_communication=1.5
)
LAW = LengthPairs.from_pairs([7, 0, 40, 3], [1, 9, 4, 2], [0.4, 0.2, 0.1, 0.3])


def replay(law: LengthPairs, *, r: int, b: int, m: int, cycles: int, seed: int) -> dict[str, list]:
    """Loads and completions of a run with in-place refill, the slow way."""
    slots: list[list[list[list[int]]]] = [[] for _ in range(m)]
    for worker in range(r):
        rng = stream(seed, f"slots at start/worker {worker}")
        found = np.stack(law.sample_in_service(rng, m * b)).T.tolist()
        for u in range(m):
            slots[u].append(found[u * b : (u + 1) * b])
    lines = [
        RequestLaw(law).endless(stream(seed, f"requests/worker {worker}")) for worker in range(r)
    ]
    loads, completed = [], []
    for cycle in range(cycles):
        pool = slots[cycle % m]
        loads.append([sum(p + age for p, _, age in worker) for worker in pool])
        done = 0
        for line, worker in zip(lines, pool, strict=True):
            for slot in worker:
                slot[2] += 1
                if slot[2] == slot[1]:
                    done += 1
                    slot[:] = [*next(line), 0]
        completed.append(done)
    return {"loads": loads, "completed": completed}


@pytest.mark.parametrize(("semantics", "m"), [("barrier", 1), ("barrier", 3), ("pingpong", 2)])
def test_running_sums_equal_a_recount_of_every_slot(semantics: str, m: int) -> None:
    bundle = Bundle(
        coefficients=COEFFICIENTS, batch_per_worker=5, semantics=semantics, microbatches=m
    )
    run = simulate_saturated(bundle, 3, LAW, seed=9, num_cycles=400, engine="simpy")
    slow = replay(LAW, r=3, b=5, m=m, cycles=400, seed=9)
    assert run.load_samples.tolist() == slow["loads"]
    assert run.completed.tolist() == slow["completed"]
    assert run.max_load_tokens.tolist() == [max(loads) for loads in slow["loads"]]
    assert run.mean_load_tokens == pytest.approx(np.mean(slow["loads"], axis=1), rel=1e-12)


def test_a_barrier_cycle_lasts_as_long_as_its_slowest_stage() -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=5, num_layers=7)
    run = simulate_saturated(bundle, 3, LAW, seed=9, num_cycles=400, engine="simpy")
    expected = np.maximum(0.01 * run.max_load_tokens + 3.0, 0.05 * 15 + 2.0)
    assert run.cycle_s.tolist() == expected.tolist()
    assert run.cycle_end_s == pytest.approx(7 * np.cumsum(expected), rel=1e-12)
    assert {*np.unique(run.transfer_s), *np.unique(run.ffn_s)} == {1.5, 2.75}


def one_token_run(**kwargs: object) -> SaturatedRun:
    """Every request has one token, so every worker holds B prompts of 10 tokens for good."""
    bundle = Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=1.0, beta_attention=5.0, alpha_ffn=0.5, beta_ffn=1.0
        ),
        batch_per_worker=4,
        num_layers=3,
        attention_price=2.0,
        ffn_price=3.0,
    )
    law = LengthPairs.from_pairs([10], [1])
    return simulate_saturated(bundle, 2, law, seed=1, num_cycles=50, **kwargs)


def test_shares_and_throughput_by_hand() -> None:
    # attention 1 * 40 + 5 = 45, FFN 0.5 * 8 + 1 = 5, price 2 * 2 + 3 = 7
    run = one_token_run()
    assert run.mean_cycle_s == pytest.approx(45.0)
    assert run.throughput_per_instance == pytest.approx(8 / (7 * 45))
    assert run.tokens_per_s_per_instance == pytest.approx(8 / (7 * 45 * 3))
    assert run.tpot_s == pytest.approx(3 * 45)
    assert run.attention_idle == pytest.approx(0.0)
    assert run.ffn_idle == pytest.approx(1 - 5 / 45)
    assert run.barrier_wait_share == pytest.approx(0.0)
    assert run.barrier_overhead == pytest.approx(0.0)
    assert run.completed_requests == 50 * 8
    assert run.in_flight == 8
    assert run.cycle_end_s[-1] == pytest.approx(50 * 3 * 45)


def test_slots_that_start_together_finish_together() -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=4)
    law = LengthPairs.from_pairs([100], [5])
    run = simulate_saturated(bundle, 2, law, seed=1, num_cycles=15, start="cold")
    assert run.completed.tolist() == [0, 0, 0, 0, 8] * 3
    assert run.max_load_tokens.tolist() == [400, 404, 408, 412, 416] * 3


def test_leaving_out_the_first_cycles_leaves_the_rest_unchanged() -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=5)
    run = simulate_saturated(bundle, 3, LAW, seed=9, num_cycles=400)
    rest = run.after(150)
    assert rest.num_cycles == 250
    assert rest.mean_cycle_s == run.cycle_s[150:].mean()
    assert rest.load_samples.tolist() == run.load_samples[150:].tolist()
    with pytest.raises(ValueError, match=r"first_cycle must be one of 0\.\.399, found 400"):
        run.after(400)


def test_workers_that_two_ratios_share_carry_the_same_loads() -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=5, microbatches=2)
    small = simulate_saturated(bundle, 2, LAW, seed=9, num_cycles=500)
    large = simulate_saturated(bundle, 6, LAW, seed=9, num_cycles=500)
    assert small.load_samples.tolist() == large.load_samples[:, :2].tolist()


def test_every_routing_policy_meets_the_same_requests_in_the_same_steps() -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=5, microbatches=2)
    runs = [
        simulate_saturated(bundle, 4, LAW, seed=9, num_cycles=500, routing=routing)
        for routing in ROUTING
    ]
    for run in runs[1:]:
        assert run.mean_load_tokens.tolist() == runs[0].mean_load_tokens.tolist()
        assert run.completed.tolist() == runs[0].completed.tolist()
        assert run.max_load_tokens.tolist() != runs[0].max_load_tokens.tolist()


def test_replications_and_seeds_differ_and_repeat() -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=5)

    def end_s(seed: int, replication: int) -> float:
        run = simulate_saturated(bundle, 3, LAW, seed=seed, replication=replication, num_cycles=300)
        return float(run.cycle_end_s[-1])

    assert end_s(1, 0) == end_s(1, 0)
    assert len({end_s(1, 0), end_s(1, 1), end_s(2, 0)}) == 3


def test_progress_reaches_the_number_of_cycles() -> None:
    for engine in ("simpy", "compiled"):
        seen: list[int] = []
        one_token_run(engine=engine, on_progress=seen.append)
        assert seen[-1] == 50


def test_load_histogram_and_quantiles_describe_the_samples() -> None:
    bundle = Bundle(coefficients=COEFFICIENTS, batch_per_worker=5)
    run = simulate_saturated(bundle, 3, LAW, seed=9, num_cycles=5000)
    assert run.load_sample_stride == 3
    assert run.load_samples.shape == (1667, 3)
    counts, edges = run.load_histogram(bins=12)
    assert counts.sum() == run.load_samples.size
    assert len(edges) == 13
    low, middle, high = run.load_quantiles([0.0, 0.5, 1.0])
    assert (low, high) == (run.load_samples.min(), run.load_samples.max())
    assert low < middle < high
    assert run.worker_mean_load_tokens == pytest.approx(run.load_samples.mean(axis=0))


def test_a_timeline_shows_the_stages_of_the_first_cycles_whichever_engine_ran() -> None:
    plain, drawn = one_token_run(engine="simpy"), one_token_run(timeline_cycles=2)
    assert plain.timeline == ()
    spans = [(i.lane, i.start_s, i.end_s, i.microbatch, i.stage) for i in drawn.timeline]
    assert spans[:4] == [
        ("attention 0", 0.0, 135.0, 0, "attention"),
        ("attention 1", 0.0, 135.0, 0, "attention"),
        ("ffn", 0.0, 15.0, 0, "ffn"),
        ("attention 0", 135.0, 270.0, 0, "attention"),
    ]
    assert len(spans) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_cycles": 0}, "num_cycles must be >= 1, found 0"),
        ({"routing": "best"}, "routing must be one of random, .* found 'best'"),
        ({"engine": "gpu"}, "engine must be 'auto', 'simpy' or 'compiled', found 'gpu'"),
        ({"start": "warm"}, "start must be 'stationary' or 'cold', found 'warm'"),
        ({"timeline_cycles": -1}, "timeline_cycles must be >= 0, found -1"),
        (
            {"simulated_layers": 0},
            r"simulated_layers must be one of 1\.\.1 \(num_layers\), found 0",
        ),
        ({"seed": -1}, "seed and replication must be >= 0"),
        ({"attention_per_ffn": 0}, "attention_per_ffn must be >= 1, found 0"),
    ],
)
def test_a_bad_argument_is_named_with_its_rule(change: dict, message: str) -> None:
    good = {
        "bundle": Bundle(coefficients=COEFFICIENTS, batch_per_worker=5),
        "attention_per_ffn": 3,
        "lengths": LAW,
        "seed": 1,
        "num_cycles": 10,
    }
    with pytest.raises(ValueError, match=message):
        simulate_saturated(**{**good, **change})
