"""KV pages, the copy link and drifting experts of the paged-weight twin, each by itself."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.kv_bytes import kv_layers, kv_sequence_pages
from models.llm_catalog import load_llm
from models.precision_settings import ExpertRouting
from policies.weight_page_ledger import PageLedger
from twin.paged_weight_cache import KvPages
from twin.paged_weight_link import CopyLink
from twin.paged_weight_traffic import ExpertTraffic

GEMMA, MIXTRAL = "Gemma-4-26B-A4B", "Mixtral-8x7B"


def cache_of(name: str, num_pages: int) -> tuple[KvPages, PageLedger]:
    ledger = PageLedger(num_pages)
    return KvPages(ledger, kv_layers(load_llm(name)), page_bytes=32_768), ledger


def grow(cache: KvPages, sequence: int, held: int, added: int) -> bool:
    cache.leave_behind(sequence, held)
    return cache.reserve(sequence, held, added)


# --- KV pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [MIXTRAL, GEMMA])
@pytest.mark.parametrize("chunk", [1, 16, 100])
def test_a_growing_sequence_holds_what_its_tokens_take(name, chunk):
    """While decoding: to the page. In chunks a window also keeps what the chunk's start sees."""
    cache, ledger = cache_of(name, 200_000)
    shape = load_llm(name)
    for held in range(0, 2600, chunk):
        assert grow(cache, 0, held, chunk)
        exact = kv_sequence_pages(shape, held + chunk)
        found = ledger.held_pages("kv")
        if chunk == 1:
            assert found == exact
        else:
            assert exact <= found <= exact + 25 * 4 * (chunk // 16 + 2)
    cache.release(0)
    assert ledger.free_pages == 200_000
    ledger.check()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([MIXTRAL, GEMMA]),
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 1, 1, 15, 16, 300, 1500])),
                 min_size=1, max_size=5, unique_by=lambda entry: entry[0]),
        max_size=25,
    ),
    num_pages=st.integers(1, 40_000),
)  # fmt: skip
def test_many_at_once_are_served_as_one_after_the_other_or_not_at_all(name, steps, num_pages):
    together, ledger = cache_of(name, num_pages)
    singly, other = cache_of(name, num_pages)
    held = dict.fromkeys(range(5), 0)
    for step in steps:
        ids = np.array([sequence for sequence, _ in step])
        now = np.array([held[sequence] for sequence, _ in step])
        added = np.array([count for _, count in step])
        for sequence in ids.tolist():
            singly.leave_behind(sequence, held[sequence])
        left = other.held_pages("kv")
        if together.reserve_all(ids, now, added):
            for sequence, count in step:
                assert singly.reserve(sequence, held[sequence], count)
                held[sequence] += count
        else:
            assert ledger.held_pages("kv") == left  # windows have moved on, nothing is taken
            assert ledger.free_pages < singly.pages_needed(now, added).sum()
        assert ledger.held_pages("kv") == other.held_pages("kv")
        ledger.check()
    for sequence in held:
        together.release(sequence)
    assert ledger.free_pages == num_pages


def test_a_refused_reservation_takes_nothing():
    cache, ledger = cache_of(MIXTRAL, 100)
    assert cache.reserve(0, 0, 16) and ledger.held_pages("kv") == 64
    assert not cache.reserve(0, 16, 1)
    assert ledger.held_pages("kv") == 64


# --- the link -----------------------------------------------------------------------------------


def link(**more: float) -> CopyLink:
    return CopyLink(100.0, rng=np.random.default_rng(1), **more)


def test_copies_land_one_after_the_other_after_latency_and_bytes_over_bandwidth():
    one = link(latency_s=0.5)
    one.put(np.array([7, 8]), np.array([100, 50]), now=10.0)  # until 11.5 and 12.5
    assert one.ended(11.49)[0].tolist() == []
    assert one.ended(11.5)[0].tolist() == [7]
    one.put(np.array([9]), np.array([200]), now=11.5)  # waits until 12.5, lands at 15
    assert one.idle_s() == pytest.approx(15.0)
    assert one.ended(14.9)[0].tolist() == [8]
    assert one.ended(15.1)[0].tolist() == [9]
    assert not one.is_busy and one.busy_s == pytest.approx(5.0)


def test_an_idle_link_starts_a_copy_when_it_is_put():
    one = link()
    one.put(np.array([1]), np.array([100]), now=0.0)
    assert one.ended(5.0)[0].tolist() == [1]
    one.put(np.array([2]), np.array([100]), now=5.0)
    assert one.ended(5.99)[0].tolist() == [] and one.ended(6.0)[0].tolist() == [2]


def test_a_cancelled_copy_leaves_the_queue_and_those_behind_it_move_up():
    one = link()
    one.put(np.array([1, 2, 3]), np.array([100, 100, 100]), now=0.0)
    one.cancel(np.array([1, 2]))
    landed, given_up = one.ended(0.5)
    assert landed.tolist() == [] and given_up.tolist() == [2]
    landed, given_up = one.ended(2.0)
    assert landed.tolist() == [1, 3] and given_up.tolist() == []  # one under way runs to its end


def test_failures_come_at_the_given_share_and_every_copy_ends_once():
    one = link(failure_share=0.25)
    keys = np.arange(4000)
    one.put(keys, np.full(4000, 1), now=0.0)
    landed, failed = one.ended(1e9)
    assert sorted([*landed.tolist(), *failed.tolist()]) == keys.tolist()
    assert abs(len(failed) / 4000 - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 4000)


@pytest.mark.parametrize("wrong", [{"latency_s": -1.0}, {"failure_share": 1.5}])
def test_a_link_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        link(**wrong)


# --- experts ------------------------------------------------------------------------------------


def traffic(**more: object) -> ExpertTraffic:
    chosen = {"skew": 0.8, "drift": 0.6, "drift_time_s": 10.0, "interval_s": 1.0}
    return ExpertTraffic(
        ExpertRouting(**(chosen | more)),
        6,
        16,
        4,
        seed=2,
        replication=int(more.pop("replication", 0)),
    )


def test_popularity_depends_on_the_time_and_not_on_who_looks_how_often():
    often, seldom = traffic(), traffic()
    for now in np.arange(0.0, 57.3, 0.01):
        often.advance(float(now))
    seldom.advance(57.3)
    assert often.interval == seldom.interval == 57
    assert (often.now == seldom.now).all()


def test_every_token_picks_k_experts_at_all_times():
    one = traffic()
    for now in range(200):
        one.advance(float(now))
        assert one.now.sum(axis=1) == pytest.approx(np.full(6, 4.0))
        assert (one.now > 0.0).all() and (one.now <= 1.0).all()


def test_without_skew_and_drift_all_experts_are_alike():
    one = traffic(skew=0.0, drift=0.0)
    one.advance(100.0)
    assert one.now == pytest.approx(np.full((6, 16), 0.25))


def test_drift_has_the_spread_and_the_memory_that_were_asked_for():
    one = traffic(skew=0.0)
    logs = []
    for now in range(6000):
        one.advance(float(now))
        logs.append(one._state.copy())
    states = np.array(logs).reshape(6000, -1)
    assert states.std() == pytest.approx(1.0, abs=0.03)
    lag = np.mean(states[10:] * states[:-10]) / states.var()
    assert lag == pytest.approx(np.exp(-1.0), abs=0.03)


def test_default_popularity_spreads_like_measured_expert_counts(data_file):
    """Experts that a batch touches and the load of the top tenth, Qwen3-30B-A3B."""
    file = data_file("moe-qwen3-30b-a3b/coactivation_qwen3-30b-a3b.json.gz")
    table = json.loads(gzip.decompress(file.read_bytes()))
    heat = np.array([layer["heat"] for layer in table["layers"]], dtype=np.float64)
    measured = heat / table["n_decode_tokens"]
    layers, experts = heat.shape
    one = ExpertTraffic(ExpertRouting(), layers, experts, table["k"], seed=1)
    for tokens in (1, 8, 32):
        touched = [float((1 - (1 - share) ** tokens).mean()) for share in (measured, one.now)]
        assert touched[1] == pytest.approx(touched[0], rel=0.1)
    top = [np.sort(share, axis=1)[:, -experts // 10 :].sum() for share in (measured, one.now)]
    assert top[1] == pytest.approx(top[0], rel=0.1)


def test_masses_are_those_of_equal_gates_that_add_up_to_one():
    one = traffic()
    m1, m2 = one.masses(one.now)
    assert m1.sum(axis=1) == pytest.approx(np.ones(6))
    assert m2 == pytest.approx(m1 / 4)
