"""The prefix cache of the engine: right bytes or none, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engine.prefix_blocks import PrefixBlocks, PrefixLimits
from runtime.model.kv_layout import LayerKv
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.store import PrefixStore, open_store
from tests.runtime.engine.prefix_cases import (
    BLOCK_BYTES,
    WHOLE,
    chain,
    compute,
    expected,
    held,
    layout,
    loaded,
    namespace,
    new_cache,
    prompt,
    saved,
    until,
)

Open = Callable[..., PrefixBlocks]
TOKENS = prompt(100)  # six full blocks
OTHER = TOKENS[:70] + prompt(60, seed=1)  # four in common


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    made: list[PrefixBlocks] = []

    def open_one(
        cache: Any = None,
        *,
        dram: int = 64 * BLOCK_BYTES,
        limits: dict[str, Any] | None = None,
        on_done: Callable[[], None] | None = None,
        **changes: Any,
    ) -> PrefixBlocks:
        cache = cache or new_cache()
        store = open_store(tmp_path / "s", dram=dram, block_bytes=BLOCK_BYTES, eviction="lru")
        space = namespace(cache.layout, **changes)
        made.append(
            PrefixBlocks(
                store, cache, space, limits=PrefixLimits(**(limits or {})), on_done=on_done
            )
        )
        return made[-1]

    yield open_one
    for one in made:
        one.close()


class Gate:
    """Holds a store's loads, or what else is given, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: PrefixStore, verb: str) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        real = getattr(store, verb)

        def held_up(*args: Any, **options: Any) -> Any:
            self.entered.set()
            assert self.opened.wait(20)
            return real(*args, **options)

        monkeypatch.setattr(store, verb, held_up)


def test_a_sequence_gets_the_bytes_of_the_prefix_it_shares_with_another(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    assert saved(prefix, 1, TOKENS) == 6
    keys = chain(prefix, OTHER)
    assert prefix.lookup(keys) == 4
    end = loaded(prefix, cache, 2, OTHER)
    assert (end.sequence, end.first_block, end.blocks, end.reason) == (2, 0, 4, "missing")
    assert np.array_equal(held(cache, 2, 4), held(cache, 1, 4))
    assert np.array_equal(held(cache, 2, 4), expected(OTHER, cache.layout)[:4])
    cache.set_tokens(2, 64)
    for sequence in (1, 2):
        cache.release(sequence)
    cache.check()
    assert cache.held_pages == 0


def test_a_load_may_begin_behind_blocks_that_are_there(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS)
    cache.add(2)
    assert cache.grow(2, 96)
    prefix.start_load(2, chain(prefix, TOKENS), 2, 5)
    (end,) = until(prefix.poll_loads)
    assert (end.first_block, end.blocks, end.reason) == (2, 3, "")
    found, want = held(cache, 2, 6), expected(TOKENS, cache.layout)
    assert np.array_equal(found[2:5], want[2:5])
    assert not found[[0, 1, 5]].any()


def test_pages_in_any_order_are_filled_block_by_block(opened: Open) -> None:
    cache = new_cache(num_pages=512)
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS)
    for number in range(10, 50):  # the arena's free pages lie scattered from here on
        cache.add(number)
        assert cache.grow(number, 16 + number % 3 * 16)
    for number in range(10, 50, 2):
        cache.release(number)
    assert loaded(prefix, cache, 2, TOKENS).blocks == 6
    assert np.any(np.diff(cache.table(2).ravel()) != 1)
    assert np.array_equal(held(cache, 2, 6), expected(TOKENS, cache.layout))


def test_saves_of_a_sequence_go_on_where_they_ended(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    keys = chain(prefix, TOKENS)
    assert prefix.start_save(1, keys, 0, 2) == 2
    assert prefix.start_save(1, keys, 2, 6) == 4
    first, second = until(prefix.poll_saves, 2)
    assert [(e.first_block, e.blocks, e.stored, e.reason) for e in (first, second)] == [
        (0, 2, 2, ""),
        (2, 4, 4, ""),
    ]
    assert prefix.start_save(1, keys, 0, 6) == 6
    (again,) = until(prefix.poll_saves)
    assert (again.blocks, again.stored, again.reason) == (6, 0, "")
    counts = prefix.counters()
    assert (counts["saved_blocks"], counts["save_known_blocks"]) == (6, 6)
    assert counts["saved_bytes"] == 6 * BLOCK_BYTES


def test_a_block_without_the_one_before_it_is_not_stored(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    prefix.start_save(1, chain(prefix, TOKENS), 3, 6)
    (end,) = until(prefix.poll_saves)
    assert (end.first_block, end.blocks, end.stored, end.reason) == (3, 0, 0, "orphan")
    assert prefix.counters()["unsaved_orphan"] == 3


def test_pages_of_a_sequence_released_during_its_load_go_to_nobody_until_its_end(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache(num_pages=60)
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS)
    cache.release(1)
    gate = Gate(monkeypatch, prefix._store, "load")
    cache.add(2)
    cache.grow(2, 100)
    pages = cache.table(2)[:6].ravel().copy()
    prefix.start_load(2, chain(prefix, TOKENS), 0, 6)
    assert gate.entered.wait(20)
    cache.release(2)
    cache.check()
    cache.add(3)
    assert not cache.grow(3, 16 * 15)  # all pages but those that are written
    assert cache.grow(3, 16 * 9)
    assert not set(cache.table(3).ravel()) & set(pages)
    gate.opened.set()
    (end,) = until(prefix.poll_loads)
    assert (end.sequence, end.blocks) == (2, 6)
    assert not held(cache, 3, 9)[1:].any()
    cache.check()
    assert cache.grow(3, 16 * 15)


def test_a_cancelled_load_writes_nothing_any_more(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache(num_pages=40)
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS)
    cache.release(1)
    cache.arena.buffer.array[:] = 0
    gate = Gate(monkeypatch, prefix._store, "load")
    cache.add(2)
    cache.grow(2, 100)
    prefix.start_load(2, chain(prefix, TOKENS), 0, 6)
    assert gate.entered.wait(20)
    prefix.cancel_load(2)
    cache.release(2)
    assert cache.arena.ledger.free_pages == 40
    gate.opened.set()
    assert prefix.drain(20)
    monkeypatch.undo()
    assert prefix.poll_loads() == []
    again = loaded(prefix, cache, 3, TOKENS[:32])  # behind the cancelled one, on the same thread
    assert again.blocks == 2
    rest = np.setdiff1d(np.arange(40), cache.table(3).ravel())
    assert not cache.arena.buffer.array[rest].any()
    assert prefix.counters()["loads_cancelled"] == 1


def test_a_store_that_hangs_ends_a_load_at_its_deadline_and_writes_nothing_later(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    prefix = opened(cache, limits={"load_s": 0.05})
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS)
    gate = Gate(monkeypatch, prefix._store, "load")
    end = loaded(prefix, cache, 2, TOKENS)
    assert (end.blocks, end.reason) == (0, "late")
    counts = prefix.counters()
    assert (counts["loads_late"], counts["load_missed_blocks"]) == (1, 6)
    assert prefix.lookup(chain(prefix, TOKENS)) == 0  # it is left alone for a while
    gate.opened.set()
    prefix.close()
    assert not held(cache, 2, 6).any()
    cache.release(2)
    cache.check()


@pytest.mark.parametrize("broken", [0, 3, 5])
def test_a_load_ends_before_a_block_that_is_broken(opened: Open, broken: int) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS)
    store = prefix._store
    with store.load(chain(prefix, TOKENS).leading(6)) as found:
        slot = found._slots[broken][0]
    store._link.arena.slot(slot)[1000] ^= 1
    end = loaded(prefix, cache, 2, TOKENS)
    assert (end.blocks, end.reason) == (broken, "broken")
    assert np.array_equal(held(cache, 2, broken), expected(TOKENS, cache.layout)[:broken])
    assert store.stats()["counters"]["blocks_broken_in_memory"] == 1
    assert saved(prefix, 1, TOKENS) == 6  # and it is put right
    assert loaded(prefix, cache, 3, TOKENS).blocks == 6


def test_saves_beyond_the_limit_are_refused_and_counted(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    prefix = opened(cache, limits={"saving_bytes": 3 * BLOCK_BYTES})
    compute(cache, 1, TOKENS)
    keys = chain(prefix, TOKENS)
    gate = Gate(monkeypatch, prefix._store, "reserve")
    assert prefix.start_save(1, keys, 0, 2) == 2
    assert prefix.start_save(1, keys, 2, 6) == 1
    assert prefix.start_save(1, keys, 3, 6) == 0
    assert prefix.counters()["unsaved_backpressure"] == 3 + 3
    assert prefix.counters()["saving_blocks"] == 3
    cache.release(1)
    assert cache.held_pages == 3 * 4
    gate.opened.set()
    assert sum(end.blocks for end in until(prefix.poll_saves, 2)) == 3
    assert cache.held_pages == 0
    cache.check()
    assert prefix.lookup(keys) == 3


def test_saves_that_are_cancelled_free_their_pages_at_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    gate = Gate(monkeypatch, prefix._store, "reserve")
    prefix.start_save(1, chain(prefix, TOKENS), 0, 6)
    assert gate.entered.wait(20)
    cache.release(1)
    assert prefix.cancel_saves() == 24
    assert cache.held_pages == 0
    cache.check()
    gate.opened.set()
    (end,) = until(prefix.poll_saves)
    assert (end.blocks, end.reason) == (0, "cancelled")
    assert prefix.counters()["unsaved_cancelled"] == 6


def test_saves_given_up_while_they_waited_are_no_failure_of_the_store(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    keys = chain(prefix, TOKENS)
    gate = Gate(monkeypatch, prefix._store, "reserve")
    prefix.start_save(1, keys, 0, 2)
    assert gate.entered.wait(20)
    for last in (3, 4, 5):
        prefix.start_save(1, keys, last - 1, last)
    prefix.cancel_saves()
    assert [end.reason for end in prefix.poll_saves()] == ["cancelled"] * 4
    gate.opened.set()
    monkeypatch.undo()
    assert saved(prefix, 1, TOKENS) == 6  # behind all of them
    assert prefix.counters()["store_failures"] == 0


def test_a_save_that_fails_midway_leaves_nothing_visible(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    real, calls = prefix._save_copies.read, []

    def fail(pages: Any, destination: memoryview) -> int:
        calls.append(pages)
        if len(calls) == 3:
            raise RuntimeError("injected")
        return real(pages, destination)

    monkeypatch.setattr(prefix._save_copies, "read", fail)
    keys = chain(prefix, TOKENS)
    prefix.start_save(1, keys, 0, 6)
    (end,) = until(prefix.poll_saves)
    assert (end.blocks, end.stored, end.reason) == (0, 0, "unavailable")
    assert prefix._store.lookup(keys.leading(6)) == 0
    assert prefix._store.stats()["gauges"]["reservations"] == 0
    assert prefix.counters()["store_failures"] == 1


def test_blocks_that_a_window_left_behind_are_not_saved(opened: Open) -> None:
    cache = new_cache(layout(WHOLE, LayerKv(kv_heads=2, head_dim=8, window_tokens=20)))
    prefix = opened(cache)
    compute(cache, 1, TOKENS, step=16)  # leaves the first blocks behind on its way
    assert (cache.block_pages(1, 0) == -1).any()
    keys = chain(prefix, TOKENS)
    assert prefix.start_save(1, keys, 0, 6) == 6
    (end,) = until(prefix.poll_saves)
    assert (end.first_block, end.reason) == (4, "orphan")
    assert prefix.counters()["unsaved_left_behind"] == 4
    assert prefix.lookup(keys) == 0
    assert prefix.start_save(1, keys, 0, 4) == 4
    assert prefix.save_now(1, keys, 0, 4, within_s=5) == 0
    assert prefix.poll_saves() == []


def test_a_windowed_sequence_saved_on_its_way_is_found_whole(opened: Open) -> None:
    own = layout(WHOLE, LayerKv(kv_heads=2, head_dim=8, window_tokens=20))
    cache = new_cache(own)
    prefix = opened(cache)
    keys, want = prefix.keys(), expected(TOKENS, own)
    cache.add(1)
    for block in range(6):
        assert cache.grow(1, 16)
        cache.arena.buffer.array[cache.block_pages(1, block)] = want[block]
        cache.advance(1, 16)
        keys.update(TOKENS[: 16 * (block + 1)])
        assert prefix.start_save(1, keys, block, block + 1) == 1
    assert all(not end.reason for end in until(prefix.poll_saves, 6))
    assert loaded(prefix, cache, 2, TOKENS).blocks == 6
    assert np.array_equal(held(cache, 2, 6), want)
    cache.set_tokens(2, 96)
    assert cache.grow(2, 1)
    assert (cache.block_pages(2, 0) == -1).any()
    cache.check()


def test_pages_left_behind_are_passed_over_by_a_load_and_the_rest_is_right(opened: Open) -> None:
    cache = new_cache(layout(WHOLE, LayerKv(kv_heads=2, head_dim=8, window_tokens=20)))
    prefix = opened(cache)
    compute(cache, 1, TOKENS)  # in one pass: nothing is left behind yet
    saved(prefix, 1, TOKENS)
    before = held(cache, 1, 6)
    assert cache.grow(1, 1)
    for block in range(6):
        pages = cache.block_pages(1, block)
        cache.arena.buffer.array[pages[pages >= 0]] = 0
    prefix.start_load(1, chain(prefix, TOKENS), 0, 6)
    (end,) = until(prefix.poll_loads)
    assert (end.blocks, end.reason) == (6, "")
    for block in range(6):
        pages = cache.block_pages(1, block)
        kept = pages >= 0
        assert np.array_equal(cache.arena.buffer.array[pages[kept]], before[block][kept])


def test_blocks_are_saved_before_a_sequence_gives_its_pages_up(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    keys = chain(prefix, TOKENS)
    prefix.start_save(1, keys, 0, 3)  # its end is waited for
    assert prefix.save_now(1, keys, 0, 6, within_s=10) == 6
    assert prefix.save_now(1, keys, 3, 6, within_s=10) == 3
    until(prefix.poll_saves)
    cache.release(1)
    assert loaded(prefix, cache, 1, TOKENS).blocks == 6
    assert np.array_equal(held(cache, 1, 6), expected(TOKENS, cache.layout))


def test_a_store_that_is_full_of_pinned_blocks_refuses_and_says_so(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache, dram=4 * BLOCK_BYTES)
    compute(cache, 1, TOKENS)
    assert saved(prefix, 1, TOKENS[:64]) == 4
    with prefix._store.load(chain(prefix, TOKENS).leading(4)) as found:
        assert found.leading == 4
        keys = chain(prefix, TOKENS)
        assert prefix.save_now(1, keys, 4, 6, within_s=5) == 0
    assert prefix.counters()["unsaved_full"] == 2


def test_other_tenants_weights_types_and_layouts_find_nothing(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    assert saved(prefix, 1, TOKENS, "mine") == 6
    assert prefix.lookup(chain(prefix, TOKENS, "mine")) == 6
    for salt in ("", "yours", "min"):
        assert prefix.lookup(chain(prefix, TOKENS, salt)) == 0
    for name in ("model", "revision", "dtype", "layout", "layers", "kv_heads"):
        other = PrefixBlocks(prefix._store, cache, namespace(cache.layout, **{name: "another"}))
        assert other.lookup(chain(other, TOKENS, "mine")) == 0, name
        assert other.lookup(chain(other, TOKENS)) == 0, name
        _end_threads(other)
    halves = new_cache(layout(dtype=torch.float16))
    other = PrefixBlocks(prefix._store, halves, namespace(halves.layout))
    assert other.lookup(chain(other, TOKENS, "mine")) == 0
    _end_threads(other)


def test_quotas_count_against_the_tenant_of_the_salt(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS, "mine")
    keys = chain(prefix, TOKENS, "mine")
    with prefix._store.load(keys.leading(6)) as found:
        assert {info.tenant for info in found.infos} == {keys.tenant}
        assert len(keys.tenant) == 16


def test_after_a_reset_nothing_from_before_is_found(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    old = chain(prefix, TOKENS)
    saved(prefix, 1, TOKENS)
    prefix.reset()
    assert prefix.lookup(chain(prefix, TOKENS)) == 0
    assert prefix.start_save(1, old, 0, 6) == 6  # of a sequence from before
    until(prefix.poll_saves)
    assert prefix.lookup(chain(prefix, TOKENS)) == 0
    assert saved(prefix, 1, TOKENS) == 6
    assert prefix.lookup(chain(prefix, TOKENS)) == 6
    prefix.reset()
    assert prefix.lookup(chain(prefix, TOKENS)) == 0


def test_a_load_of_nothing_and_a_second_load_of_a_sequence_are_refused(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    keys = chain(prefix, TOKENS)
    with pytest.raises(ValueError, match="no blocks from 2 to 2"):
        prefix.start_load(1, keys, 2, 2)
    with pytest.raises(IndexError, match="6 full blocks, not 7"):
        prefix.start_load(1, keys, 0, 7)
    gate = Gate(monkeypatch, prefix._store, "load")
    prefix.start_load(1, keys, 0, 1)
    with pytest.raises(ValueError, match="sequence 1 is being loaded already"):
        prefix.start_load(1, keys, 0, 1)
    gate.opened.set()
    until(prefix.poll_loads)


def test_a_store_of_smaller_blocks_is_refused_with_what_fits(tmp_path: Path) -> None:
    cache = new_cache()
    for size, space, said in (
        (2048, namespace(cache.layout), r"4,096 bytes .* --block-bytes 4096"),
        (4096, namespace(cache.layout, block=32), "block: must be 16, found 32"),
    ):
        store = open_store(tmp_path / str(size), dram="1MiB", block_bytes=size)
        with pytest.raises(StoreSetupError, match=said):
            PrefixBlocks(store, cache, space)
        store.close()


def test_limits_out_of_range_are_named() -> None:
    with pytest.raises(StoreSetupError, match=r"load_s: must be > 0 and finite, found 0"):
        PrefixLimits(load_s=0)


def test_the_engine_is_woken_when_a_transfer_has_ended(opened: Open) -> None:
    woken = threading.Event()
    cache = new_cache()
    prefix = opened(cache, on_done=woken.set)
    compute(cache, 1, TOKENS)
    prefix.start_save(1, chain(prefix, TOKENS), 0, 6)
    assert woken.wait(20)
    assert len(prefix.poll_saves()) == 1


def test_closing_ends_threads_holds_and_transfers_under_way(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    load, reserve = (Gate(monkeypatch, prefix._store, verb) for verb in ("load", "reserve"))
    prefix.start_save(1, chain(prefix, TOKENS), 0, 6)
    cache.add(2)
    cache.grow(2, 96)
    prefix.start_load(2, chain(prefix, TOKENS), 0, 6)
    assert load.entered.wait(20)
    assert reserve.entered.wait(20)
    for sequence in (1, 2):
        cache.release(sequence)
    threading.Timer(0.05, lambda: (load.opened.set(), reserve.opened.set())).start()
    prefix.close()
    assert cache.held_pages == 0
    cache.check()
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("prefix-")]
    assert left == []


def test_counters_are_flat_numbers_with_those_of_the_store(opened: Open) -> None:
    cache = new_cache()
    prefix = opened(cache)
    compute(cache, 1, TOKENS)
    saved(prefix, 1, TOKENS)
    prefix.lookup(chain(prefix, TOKENS))
    assert loaded(prefix, cache, 2, TOKENS).blocks == 6
    end = time.monotonic() + 20
    while (counts := prefix.counters()).get("store_blocks_hit_memory_total") != 6:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert all(type(value) is float for value in counts.values())
    assert counts["store_memory_blocks"] == 6
    assert (counts["lookups"], counts["lookup_hit_blocks"], counts["lookup_blocks"]) == (1, 6, 6)
    assert (counts["loaded_blocks"], counts["loaded_bytes"]) == (6, 6 * BLOCK_BYTES)
    assert counts["load_seconds"] > 0
    assert counts["save_seconds"] > 0


def _end_threads(prefix: PrefixBlocks) -> None:
    """Of one that shares its store with another, which closes it."""
    for thread in (prefix._loader, prefix._saver):
        assert thread.close(Deadline.after(5))
