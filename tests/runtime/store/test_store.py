"""The store in one process: what is put is found again, and nothing else."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.prefix_costs import TierSpeed
from policies.prefix.keys import Namespace
from runtime.store.arena import arena_path
from runtime.store.config import StoreConfig
from runtime.store.errors import StoreSetupError
from runtime.store.local_link import LocalLink
from runtime.store.node import StoreNode
from runtime.store.nominal_costs import nominal_costs
from runtime.store.store import PrefixStore, open_store
from tests.runtime.store.conftest import BLOCK, block, blocks, chain

Open = Callable[..., PrefixStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    stores: list[PrefixStore] = []

    def open_one(**changes: Any) -> PrefixStore:
        given_settings = {
            "directory": tmp_path / "s",
            "dram": 16 * BLOCK,
            "block_bytes": BLOCK,
            "eviction": "lru",
        }
        store = open_store(**(given_settings | changes))
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()


def test_a_put_is_found_in_place(opened: Open) -> None:
    store, keys = opened(), chain("a", 5)
    assert store.put(keys, blocks(keys)).stored == 5
    assert store.lookup(chain("a", 9)) == 5
    with store.load(chain("a", 9)) as found:
        assert found.leading == 5
        assert [bytes(view) for view in found.views] == blocks(keys)
        assert all(view.readonly for view in found.views)
        assert found.still_valid() == 5


def test_only_what_is_new_is_stored(opened: Open) -> None:
    store, keys = opened(), chain("a", 6)
    store.put(keys[:4], blocks(keys[:4]))
    put = store.put(keys, blocks(keys))
    assert (put.stored, put.reason) == (2, "")
    assert store.put(keys, blocks(keys)).reason == "exists"


def test_blocks_behind_a_gap_are_orphans_and_not_stored(opened: Open) -> None:
    store, keys = opened(), chain("a", 6)
    store.put(keys[:2], blocks(keys[:2]))
    put = store.put(keys, blocks(keys[4:]), first=4)
    assert (put.stored, put.reason) == (0, "orphan")
    assert store.lookup(keys) == 2


def test_a_second_writer_of_the_same_blocks_is_told_busy_and_loses_nothing(opened: Open) -> None:
    store, keys = opened(), chain("a", 3)
    with store.reserve(keys, [BLOCK] * 3) as room:
        assert len(room.buffers) == 3
        assert store.put(keys, blocks(keys)).reason == "busy"
        assert store.lookup(keys) == 0
        for buffer, data in zip(room.buffers, blocks(keys), strict=True):
            buffer[:] = data
        assert room.commit() == 3
    assert store.lookup(keys) == 3


def test_uncommitted_blocks_are_never_visible(opened: Open) -> None:
    store, keys = opened(), chain("a", 3)
    with store.reserve(keys, [BLOCK] * 3) as room:
        room.buffers[0][:] = block(keys[0])
    assert store.lookup(keys) == 0
    assert store.stats()["gauges"]["reservations"] == 0
    assert store.put(keys, blocks(keys)).stored == 3


def test_a_block_larger_than_the_stores_is_refused(opened: Open) -> None:
    store, keys = opened(), chain("a", 2)
    put = store.put(keys, [block(keys[0]), bytes(BLOCK + 1)])
    assert (put.stored, store.lookup(keys)) == (1, 1)
    assert store.put(chain("b", 1), [bytes(BLOCK + 1)]).reason == "size"


def test_what_does_not_fit_is_left_out_at_the_end_of_the_chain(opened: Open) -> None:
    store, keys = opened(), chain("a", 40)
    put = store.put(keys, blocks(keys))
    assert put.reason == "full"
    assert 0 < put.stored == store.lookup(keys) < 40


def test_blocks_that_are_being_read_are_not_given_up(opened: Open) -> None:
    store, keys = opened(), chain("a", 8)
    store.put(keys, blocks(keys))
    with store.load(keys) as found:
        for i in range(30):
            other = chain(f"b{i}", 4)
            store.put(other, blocks(other))
        assert found.still_valid() == 8
        assert [bytes(view) for view in found.views] == blocks(keys)
    for i in range(30):
        other = chain(f"c{i}", 4)
        store.put(other, blocks(other))
    assert store.lookup(keys) == 0


def test_a_reader_that_hangs_loses_its_lease_and_can_tell(opened: Open) -> None:
    store, keys = opened(lease_s=0.05), chain("a", 8)
    store.put(keys, blocks(keys))
    found = store.load(keys)
    assert found.leading == 8
    time.sleep(0.1)
    for i in range(30):
        other = chain(f"b{i}", 4)
        store.put(other, blocks(other))
    assert found.still_valid() == 0
    assert found.copy_into([bytearray(BLOCK) for _ in keys]) == 0
    assert store.stats()["counters"]["leases_expired"] == 1
    found.close()


def test_a_writer_that_hangs_loses_its_room_and_commits_nothing(opened: Open) -> None:
    store, keys = opened(reservation_s=0.05), chain("a", 3)
    with store.reserve(keys, [BLOCK] * 3) as room:
        time.sleep(0.1)
        assert store.put(keys, blocks(keys)).stored == 3
        assert room.commit() == 0
    with store.load(keys) as found:
        assert [bytes(view) for view in found.views] == blocks(keys)


def test_a_block_broken_in_memory_ends_the_prefix_and_is_counted(opened: Open) -> None:
    store, keys = opened(), chain("a", 6)
    store.put(keys, blocks(keys))
    with store.load(keys) as found:
        slot = found._slots[3][0]
    arena = store._link.arena
    arena.slot(slot)[100] ^= 1
    with store.load(keys) as found:
        assert found.leading == 3
        assert [bytes(view) for view in found.views] == blocks(keys[:3])
    assert store.stats()["counters"]["blocks_broken_in_memory"] == 1
    assert store.put(keys, blocks(keys[3:]), first=3).stored > 0


def test_evicted_blocks_come_back_from_ssd(opened: Open) -> None:
    store = opened(ssd=64 * BLOCK * 4)
    names = [f"n{i}" for i in range(6)]
    for name in names:
        keys = chain(name, 6)
        assert store.put(keys, blocks(keys)).stored == 6
        assert store.flush()
    for name in names:
        keys = chain(name, 6)
        with store.load(keys, deadline_s=5) as found:
            assert [bytes(view) for view in found.views] == blocks(keys)
    assert store.stats()["counters"]["blocks_hit_ssd"] >= 18


def test_a_clean_restart_keeps_what_is_on_ssd(opened: Open) -> None:
    store, keys = opened(ssd=64 * BLOCK * 4), chain("a", 6)
    assert store.put(keys, blocks(keys), durable=True, deadline_s=5).stored == 6
    store.close()
    store = opened(ssd=64 * BLOCK * 4)
    with store.load(keys, deadline_s=5) as found:
        assert [bytes(view) for view in found.views] == blocks(keys)


def test_blocks_in_memory_survive_the_death_of_the_server(opened: Open, tmp_path: Path) -> None:
    keys = chain("a", 6)
    pid = os.fork()
    if pid == 0:  # a server that dies without a word
        store = open_store(tmp_path / "s", dram=16 * BLOCK, block_bytes=BLOCK, eviction="lru")
        store.put(keys, blocks(keys))
        with store.reserve(chain("b", 2), [BLOCK] * 2):
            os.kill(os.getpid(), 9)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == 9
    store = opened()
    assert store.lookup(chain("b", 2)) == 0
    with store.load(keys) as found:
        assert [bytes(view) for view in found.views] == blocks(keys)
    assert store.stats()["counters"]["blocks_recovered_in_memory"] == 6


def test_memory_of_another_shape_is_not_taken_over(tmp_path: Path, opened: Open) -> None:
    keys = chain("a", 3)
    store = opened(is_arena_kept=True)
    store.put(keys, blocks(keys))
    store.close()
    store = opened(dram=32 * BLOCK)
    assert store.lookup(keys) == 0
    store.close()
    assert not arena_path(tmp_path / "s").exists()


def test_concurrent_readers_of_one_prefix_on_ssd_all_get_it(opened: Open) -> None:
    store, keys = opened(ssd=64 * BLOCK * 4), chain("a", 6)
    store.put(keys, blocks(keys), durable=True, deadline_s=5)
    store.close()
    store = opened(ssd=64 * BLOCK * 4)
    results: list[bool] = []

    def read() -> None:
        with store.load(keys, deadline_s=5) as found:
            results.append([bytes(view) for view in found.views] == blocks(keys))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [True] * 8
    gauges = store.stats()["gauges"]
    assert (gauges["leases"], gauges["pinned_blocks"]) == (0, 0)


def test_blocks_that_are_cheaper_computed_are_left_to_the_engine(opened: Open) -> None:
    slow = nominal_costs(BLOCK)
    costs = type(slow)(
        prefill=slow.prefill,
        block_tokens=slow.block_tokens,
        local=slow.local,
        remote=slow.remote,
        ssd=TierSpeed(bytes_per_s=1e3, request_s=0.1),
    )
    store, keys = opened(ssd=64 * BLOCK * 4, costs=costs), chain("a", 4)
    store.put(keys, blocks(keys), durable=True, deadline_s=5)
    store.close()
    store = opened(ssd=64 * BLOCK * 4, costs=costs)
    assert store.lookup(keys) == 0  # what a lookup promises a load may bring
    with store.load(keys) as found:
        assert found.leading == 0
    assert store.stats()["counters"]["blocks_left_to_compute"] == 4


def test_load_into_copies_the_leading_blocks(opened: Open) -> None:
    store, keys = opened(), chain("a", 5)
    store.put(keys[:3], blocks(keys[:3]))
    targets = [bytearray(BLOCK) for _ in keys]
    assert store.load_into(keys, targets) == 3
    assert [bytes(target) for target in targets[:3]] == blocks(keys[:3])
    with pytest.raises(ValueError, match="5 keys but 2 destinations"):
        store.load_into(keys, targets[:2])
    with pytest.raises(ValueError, match="does not fit"):
        store.load_into(keys, [bytearray(10) for _ in keys])


def test_two_salts_and_two_models_share_nothing(opened: Open) -> None:
    store = opened()
    base = {
        "model": "m",
        "revision": "r",
        "dtype": "bf16",
        "layout": "v1",
        "layers": "0-1",
        "kv_heads": "0-1",
        "block": 16,
    }
    tokens = list(range(64))
    first = store.session(Namespace(**base), "tenant a")
    data = [bytes([i]) * BLOCK for i in range(4)]
    assert first.put(tokens, data).stored == 4
    assert first.lookup(tokens) == 4
    assert store.session(Namespace(**base), "tenant b").lookup(tokens) == 0
    assert store.session(Namespace(**base)).lookup(tokens) == 0
    assert store.session(Namespace(**(base | {"layout": "v2"})), "tenant a").lookup(tokens) == 0


def test_a_quota_holds_its_tenant_alone(opened: Open) -> None:
    store = opened(dram=32 * BLOCK, quota_bytes={b"t" * 16: 4 * BLOCK})
    keys, mine = chain("a", 20), chain("t", 8)
    store.put(keys, blocks(keys))
    put = store.put(mine, blocks(mine), tenant=b"t" * 16)
    assert (put.stored, put.reason) == (4, "quota")
    assert store.lookup(keys) == 20


def test_a_second_process_or_store_may_not_use_the_folder(opened: Open) -> None:
    opened()
    with pytest.raises(StoreSetupError, match="another process serves this store"):
        opened()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dram": "lots"}, "dram: must be a size"),
        ({"dram": 100}, "must hold at least one block"),
        ({"dram": "100TiB"}, "shared memory are not to be had"),
        ({"ssd": "-1GiB"}, "ssd: must be a size"),
        ({"lease_s": 0}, "lease_s: must be > 0"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
        ({"block_bytes": 8, "dram": 64}, "slot size: must be >= 64"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(
    opened: Open, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(StoreSetupError, match=said) as error:
        opened(**changes)
    assert "\n" not in str(error.value)


def test_a_closed_store_answers_with_misses(opened: Open) -> None:
    store, keys = opened(), chain("a", 2)
    store.put(keys, blocks(keys))
    store.close()
    assert store.lookup(keys) == 0
    assert store.put(keys, blocks(keys)).reason == "unavailable"
    assert store.load(keys).leading == 0


_STEP = st.tuples(
    st.sampled_from(["put", "load", "hold", "release", "flush", "break"]),
    st.integers(0, 7),
    st.integers(1, 7),
)


@given(st.lists(_STEP, min_size=5, max_size=40), st.sampled_from(["lru", "gdsf", "tree_lru"]))
@settings(deadline=None, max_examples=25)
def test_whatever_happens_no_wrong_byte_is_served_and_nothing_leaks(
    steps: list[tuple[str, int, int]], eviction: str
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        config = StoreConfig(
            folder=Path(folder) / "s",
            dram_bytes=12 * BLOCK,
            ssd_bytes=256 * BLOCK,
            block_bytes=BLOCK,
            eviction=eviction,
        )
        node = StoreNode(config)
        store = PrefixStore(LocalLink(node, is_owner=True))
        held: list[Any] = []
        for kind, name, length in steps:
            keys = chain(str(name), length)
            if kind == "put":
                store.put(keys, blocks(keys))
            elif kind in ("load", "hold"):
                found = store.load(keys, deadline_s=5)
                assert [bytes(view) for view in found.views] == blocks(keys[: found.leading])
                if kind == "hold":
                    held.append((found, keys))
                else:
                    found.close()
            elif kind == "release" and held:
                found, keys = held.pop(0)
                assert [bytes(view) for view in found.views] == blocks(keys[: found.leading])
                found.close()
            elif kind == "flush":
                assert store.flush()
            elif kind == "break" and not held:
                room = node.state.memory.get(keys[-1])
                if room is not None:
                    node.state.memory.view(room)[0] ^= 0xFF
        for found, _ in held:
            found.close()
        store.flush()
        gauges = node.gauges()
        assert (gauges["leases"], gauges["pinned_blocks"], gauges["reservations"]) == (0, 0, 0)
        assert gauges["free_slots"] + gauges["memory_blocks"] == gauges["slots"]
        assert gauges["memory_used_bytes"] == gauges["memory_blocks"] * BLOCK
        store.close()
        assert not arena_path(Path(folder) / "s").exists()


def test_a_deleted_store_does_not_come_back_and_its_memory_is_given_back(
    tmp_path: Path, opened: Open
) -> None:
    keys = chain("a", 4)
    for folder in ("s", "t"):
        store = opened(directory=tmp_path / folder, is_arena_kept=True)
        store.put(keys, blocks(keys))
        store.close()
    left = arena_path(tmp_path / "t")
    assert left.exists()
    for folder in ("s", "t"):
        shutil.rmtree(tmp_path / folder)
    store = opened(directory=tmp_path / "s")
    assert store.lookup(keys) == 0
    assert not left.exists()
