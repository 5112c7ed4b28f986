"""A store that fails is asked once, not by everybody, and is found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.engine.prefix_counts import COUNTS, PrefixCounts, flat_stats
from runtime.engine.prefix_guard import FIRST_PAUSE_S, MOST_PAUSE_S, StoreGuard
from runtime.store.store import open_store


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def guarded(tmp_path: Path) -> tuple[StoreGuard, Clock, PrefixCounts]:
    store = open_store(tmp_path / "s", dram="1MiB", block_bytes=4096)
    clock, counts = Clock(), PrefixCounts()
    guard = StoreGuard(store, counts, clock=clock)
    store.close()  # every verb says that it is unavailable from now on
    return guard, clock, counts


def attempt(guard: StoreGuard) -> bool:
    """Whether the store was asked."""
    with guard.call("look up") as store:
        if store is not None:
            assert store.lookup([bytes(32)]) == 0
            return True
    return False


def test_pauses_double_while_failures_last(
    guarded: tuple[StoreGuard, Clock, PrefixCounts], caplog: pytest.LogCaptureFixture
) -> None:
    guard, clock, counts = guarded
    pauses = []
    for _ in range(8):
        assert attempt(guard)
        assert guard.is_paused
        assert not attempt(guard)
        start_s = clock.now_s
        while guard.is_paused:
            clock.now_s += FIRST_PAUSE_S / 2
        pauses.append(clock.now_s - start_s)
    assert pauses == [min(FIRST_PAUSE_S * 2**i, MOST_PAUSE_S) for i in range(8)]
    assert counts.all()["store_failures"] == counts.all()["calls_paused"] == 8
    assert len(caplog.records) == 1


def test_a_call_that_works_ends_the_outage(
    guarded: tuple[StoreGuard, Clock, PrefixCounts], caplog: pytest.LogCaptureFixture
) -> None:
    guard, clock, _ = guarded
    for _ in range(3):
        attempt(guard)
        clock.now_s += MOST_PAUSE_S
    with guard.call("look up") as store:
        assert store is not None
    attempt(guard)
    clock.now_s += FIRST_PAUSE_S
    assert not guard.is_paused
    assert [r.getMessage().split("(")[0].strip() for r in caplog.records] == [
        "prefix store: failed to look up",
        "prefix store: answers again",
        "prefix store: failed to look up",
    ]


def test_an_error_inside_ends_there_and_counts_as_a_failure(
    guarded: tuple[StoreGuard, Clock, PrefixCounts],
) -> None:
    guard, _, counts = guarded
    with guard.call("load"):
        raise RuntimeError("injected")
    assert guard.is_paused
    assert counts.all()["store_failures"] == 1


def test_counts_have_names_that_are_told() -> None:
    counts = PrefixCounts()
    with pytest.raises(KeyError):
        counts.add("unsaved_for_no_reason")
    assert set(counts.all()) == set(COUNTS)


def test_stats_become_one_flat_table() -> None:
    stats = {
        "node": "n",
        "gauges": {"slots": 3},
        "counters": {"blocks_hit_ssd": 2},
        "ssd_counters": {"reads": 5},
        "pool_counters": {"peer_lost": 1},
        "settings": {"eviction": "lru"},
    }
    assert flat_stats(stats) == {
        "store_slots": 3.0,
        "store_blocks_hit_ssd_total": 2.0,
        "store_ssd_reads_total": 5.0,
        "store_pool_peer_lost_total": 1.0,
    }
    assert flat_stats({}) == {}
