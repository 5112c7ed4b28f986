"""Faults of readers, writers and memory on one node: a miss in bounded time, a count, no leak."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from policies.catalog import EVICTION
from runtime.store.background import Background
from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.local_link import LocalLink
from runtime.store.node_peers import NodePeers
from runtime.store.store import PrefixStore, open_store
from tests.runtime.store.conftest import BLOCK, block, blocks, chain
from tests.runtime.store.faults.accounts import counter, right, settled

Open = Callable[..., PrefixStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    stores: list[PrefixStore] = []

    def open_one(**changes: Any) -> PrefixStore:
        given: dict[str, Any] = {
            "directory": tmp_path / "s",
            "dram": 16 * BLOCK,
            "block_bytes": BLOCK,
            "eviction": "lru",
        }
        stores.append(open_store(**(given | changes)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def node_of(store: PrefixStore) -> Any:
    assert isinstance(store._link, LocalLink)
    return store._link._node


@pytest.mark.parametrize("eviction", sorted(EVICTION))
def test_a_block_named_twice_in_a_chain_costs_no_room_and_no_key(
    opened: Open, eviction: str
) -> None:
    """Row 7: accounts that never come right again."""
    store, keys = opened(eviction=eviction, ssd="4MiB"), chain("a", 4)
    twice = [keys[0], keys[1], keys[0], keys[2]]
    with pytest.raises(ValueError, match="found one twice"):
        store.put(twice, blocks(twice))
    # A client that does not check is not believed.
    end = Deadline.after(5)
    room = store._link.reserve(twice, [BLOCK] * 4, 0, b"", False, end)
    assert len(room.slots) == 2
    for slot, key in zip(room.slots, keys, strict=False):
        store._link.arena.slot(slot, BLOCK)[:] = block(key)
    sums = [checksum(block(key)) for key in keys[:2]]
    assert store._link.commit(room.reservation_id, sums, False, end) == 2
    store.flush()
    settled(store)
    assert store.load([keys[0], keys[0]]).leading == 1
    assert store.put(keys, blocks(keys)).stored == 2
    assert right(store, keys) == 4
    store.close()
    store = opened(eviction=eviction, ssd="4MiB")
    with store.load([keys[0], keys[0]], deadline_s=5) as found:  # from SSD this time
        assert found.leading == 1
    settled(store)


def test_memory_full_of_pinned_blocks_refuses_at_once_and_recovers(opened: Open) -> None:
    """Rows 5, 6, 27: nothing can go, yet nobody waits and nothing is pinned for ever."""
    store, keys = opened(), chain("a", 15)
    store.put(keys, blocks(keys))
    found = store.load(keys)
    start = time.monotonic()
    for number in range(50):
        more = chain(f"b{number}", 3)
        assert store.put(more, blocks(more), deadline_s=60).stored <= 1
    assert time.monotonic() - start < 20
    assert counter(store, "puts_full") >= 49
    assert right(store, keys) == 15
    found.close()
    more = chain("c", 5)
    assert store.put(more, blocks(more)).stored == 5
    settled(store)


@pytest.mark.parametrize("eviction", sorted(EVICTION))
def test_hits_do_not_decay_while_pinned_blocks_come_and_go(opened: Open, eviction: str) -> None:
    """Rows 7, 25: thousands of rounds at the limit, with readers in the way of eviction."""
    store = opened(eviction=eviction)
    hot = chain("hot", 4)
    for number in range(150):
        keys = chain(f"n{number % 23}", 1 + number % 7)
        with store.load(keys), store.load(hot):
            store.put(keys, blocks(keys))
            store.put(hot, blocks(hot))
    store.put(hot, blocks(hot))
    assert right(store, hot) == 4
    settled(store)


def test_a_late_writer_never_writes_into_another_ones_block(opened: Open) -> None:
    """Rows 3, 14: the writer's room is over, but its hands are still in it."""
    store = opened(reservation_s=0.05)
    keys = chain("late", 3)
    with store.reserve(keys, [BLOCK] * 3) as room:
        time.sleep(0.1)
        others = [chain(f"o{i}", 3) for i in range(3)]
        for other in others:
            assert store.put(other, blocks(other)).stored == 3
        views = [store.load(other) for other in others]
        for buffer in room.buffers:
            buffer[:] = b"\xee" * BLOCK
        for other, found in zip(others, views, strict=True):
            assert [bytes(view) for view in found.views] == blocks(other)
            found.close()
        assert store.stats()["gauges"]["overdue_slots"] == 3
        assert room.commit() == 0
    assert counter(store, "puts_late") == counter(store, "reservations_expired") == 1
    assert right(store, keys) == 0
    settled(store)
    for number in range(12):  # its slots serve again
        more = chain(f"m{number}", 5)
        assert store.put(more, blocks(more)).stored == 5


def test_a_writer_that_gives_up_late_gives_its_room_back(opened: Open) -> None:
    """Row 6."""
    store = opened(reservation_s=0.05)
    with store.reserve(chain("late", 3), [BLOCK] * 3):
        time.sleep(0.1)
        store.put(chain("a", 1), blocks(chain("a", 1)))
    settled(store)


@pytest.mark.parametrize("fails_at", ["choose", "reserve", "bring"])
def test_an_error_in_the_middle_of_a_load_leaves_nothing_pinned(
    opened: Open, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    """Rows 2, 6: an error of the store's own is not allowed to pin or to reserve."""
    store, keys = opened(ssd="4MiB"), chain("a", 4)
    store.put(keys, blocks(keys), durable=True, deadline_s=5)
    store.close()
    store = opened(ssd="4MiB")
    node = node_of(store)
    assert right(store, keys[:2]) == 2  # in memory from now on

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        if fails_at == "choose":
            patch.setattr("runtime.store.node_load.choose_sources", fail)
        elif fails_at == "reserve":
            patch.setattr(node.state.policy, "reserve", fail)
        else:
            patch.setattr(node.state.ssd, "read_into", fail)
        with pytest.raises(RuntimeError, match="injected"):
            store.load(keys)
    assert right(store, keys) == 4
    settled(store)


def test_an_error_while_blocks_are_read_for_another_node_leaves_nothing_pinned(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 6, 29."""
    store, keys = opened(ssd="4MiB"), chain("a", 4)
    store.put(keys, blocks(keys), durable=True, deadline_s=5)
    store.close()
    store = opened(ssd="4MiB")
    peers = NodePeers(node_of(store))
    with monkeypatch.context() as patch:

        def fail(*args: Any) -> Any:
            raise RuntimeError("injected")

        patch.setattr(node_of(store).state.ssd, "read_into", fail)
        with pytest.raises(RuntimeError), peers.open_blocks(keys):
            pass
    settled(store)
    with peers.open_blocks(keys) as found:
        assert [bytes(one[1]) for one in found if one] == blocks(keys)
    settled(store)


def test_a_block_that_a_load_brings_while_another_node_waits_for_it_is_given(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 13, 29: two ways into memory at once."""
    store, keys = opened(ssd="4MiB"), chain("a", 3)
    store.put(keys, blocks(keys), durable=True, deadline_s=5)
    store.close()
    store = opened(ssd="4MiB")
    ssd, loaded = node_of(store).state.ssd, []
    read = ssd.read_into

    def meanwhile(key: bytes, view: memoryview, deadline: Deadline) -> Any:
        if not loaded:
            loaded.append(1)
            assert right(store, keys[1:]) == 2
        return read(key, view, deadline)

    monkeypatch.setattr(ssd, "read_into", meanwhile)
    with NodePeers(node_of(store)).open_blocks(keys) as found:
        assert [bytes(one[1]) for one in found if one] == blocks(keys)
    settled(store)


def test_a_load_waits_for_another_ones_blocks_no_longer_than_its_own_deadline(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 21, 26: a slow disk holds up nobody beyond the time it was given."""
    store, keys = opened(ssd="4MiB"), chain("a", 4)
    store.put(keys, blocks(keys), durable=True, deadline_s=5)
    store.close()
    store = opened(ssd="4MiB")
    ssd, gate, entered = node_of(store).state.ssd, threading.Event(), threading.Event()
    read = ssd.read_into

    def slow(key: bytes, view: memoryview, deadline: Deadline) -> Any:
        entered.set()
        gate.wait(20)
        return read(key, view, deadline)

    monkeypatch.setattr(ssd, "read_into", slow)
    first: list[int] = []
    thread = threading.Thread(target=lambda: first.append(right(store, keys, 60)))
    thread.start()
    assert entered.wait(10)
    start = time.monotonic()
    assert right(store, keys, 0.1) == 0
    assert time.monotonic() - start < 10
    gate.set()
    thread.join(20)
    assert first == [4]
    settled(store)


def test_loads_that_bring_blocks_for_each_other_do_not_wait_in_a_circle(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 19, 26: whoever has brought its part lets the others have it before it waits itself."""
    store, keys = opened(ssd="4MiB"), chain("a", 2)
    store.put(keys, blocks(keys), durable=True, deadline_s=5)
    store.close()
    store = opened(ssd="4MiB")
    node = node_of(store)
    with node.state.lock:  # another load is bringing the first block, and fails later
        rooms, _ = node.state.memory.reserve(
            [next(i for i in node.state.ssd.entries() if i.key == keys[0])],
            is_owned=True,
            pinned=(),
            may_pass=False,
            now=node.state.now(),
        )
    waiting: list[int] = []
    thread = threading.Thread(target=lambda: waiting.append(right(store, keys, 30)))
    thread.start()
    end = time.monotonic() + 15
    while node.state.memory.get(keys[1]) is None:  # there for all while the load still waits
        assert time.monotonic() < end
        time.sleep(0.005)
    assert waiting == []
    with node.state.lock:
        node.state.memory.cancel(rooms, now=node.state.now())
        node.state.changed.notify_all()
    thread.join(15)
    assert waiting == [0]
    assert right(store, keys) == 2
    settled(store)


def test_a_fetch_that_finds_no_thread_is_a_miss_at_its_deadline(opened: Open) -> None:
    """Rows 21, 28: other loads with long deadlines use all threads up."""
    store, keys = opened(), chain("remote", 2)
    node = node_of(store)
    gate, asked = threading.Event(), []

    def fetch(wanted: Any, deadline: Deadline) -> Any:
        asked.append(1)
        gate.wait(20)
        return {}

    node.join(fetch, lambda *args: 0, lambda added, removed: None)
    node.state.weights["far"] = 1.0
    peers = NodePeers(node)

    def announce(chain_keys: list[bytes]) -> None:
        from runtime.store.peer_messages import Announcement

        peers.announced(
            "far",
            1,
            [
                Announcement(key, chain_keys[0], i, i, BLOCK, "memory", True)
                for i, key in enumerate(chain_keys)
            ],
            [],
        )

    with ThreadPoolExecutor(8) as threads:
        for number in range(8):
            others = chain(f"other-{number}", 1)
            announce(others)
            threads.submit(lambda k=others: store.load(k, deadline_s=60).close())
        end = time.monotonic() + 10
        while len(asked) < 8 and time.monotonic() < end:
            time.sleep(0.005)
        announce(keys)
        start = time.monotonic()
        assert store.load(keys, deadline_s=0.1).leading == 0
        assert time.monotonic() - start < 8
        assert counter(store, "fetches_not_started") == 1
        gate.set()
    settled(store)


def test_a_fetch_that_breaks_is_a_miss_and_counted(opened: Open) -> None:
    """Rows 2, 22: a failed transfer is never taken for a loaded block."""
    store, keys = opened(), chain("remote", 1)
    node = node_of(store)

    def fetch(wanted: Any, deadline: Deadline) -> Any:
        raise OSError("injected")

    node.join(fetch, lambda *args: 0, lambda added, removed: None)
    node.state.weights["far"] = 1.0
    from runtime.store.peer_messages import Announcement

    NodePeers(node).announced(
        "far", 1, [Announcement(keys[0], keys[0], 0, 0, BLOCK, "memory", True)], []
    )
    assert store.load(keys).leading == 0
    assert counter(store, "fetches_failed") == 1
    settled(store)


def test_another_nodes_replica_never_takes_a_slot_for_good(opened: Open) -> None:
    """Rows 7, 16: what another node sends and the policy does not keep is not left lying about."""
    store = opened(replicas="none")
    node, peers = node_of(store), None
    peers = NodePeers(node)
    for number in range(40):
        keys = chain(f"r{number}", 2)
        infos = [
            BlockInfo(k, keys[i - 1] if i else b"", keys[0], i, i, BLOCK, checksum(block(k)))
            for i, k in enumerate(keys)
        ]
        with peers.receive_region(infos, "far", False, Deadline.after(5)) as room:
            for buffer, key in zip(room.buffers, keys, strict=False):
                buffer[:] = block(key)
            room.commit()
    settled(store)


def test_a_queue_that_nobody_works_off_stays_short() -> None:
    """Row 16: what waits too long for a hanging disk is dropped, oldest first, and counted."""
    gate, done, dropped = threading.Event(), [], [0]

    def work(jobs: Any) -> None:
        gate.wait(20)
        done.extend(jobs)

    def drop(count: int) -> None:
        dropped[0] += count

    queue = Background(
        "q", work, most_jobs=1, most_waiting=10, on_error=lambda error: None, on_drop=drop
    )
    last = queue.add(range(1000))
    assert queue.num_waiting <= 12
    assert not queue.wait_for(last, Deadline.after(0.05))
    gate.set()
    assert queue.wait_for(last, Deadline.after(20))
    assert done[-10:] == list(range(990, 1000))
    assert len(done) + dropped[0] == 1000
    queue.stop(Deadline.after(5))


def test_two_writers_of_one_chain_store_it_once_and_whole(opened: Open) -> None:
    """Row 13: never "exists" and yet empty."""
    store = opened(dram=256 * BLOCK)
    chains = [chain(f"c{i}", 5) for i in range(20)]
    reasons: list[str] = []

    def write() -> None:
        for keys in chains:
            reasons.append(store.put(keys, blocks(keys), deadline_s=10).reason)
            assert right(store, keys) in range(6)

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(write) for _ in range(6)]:
            done.result(60)
    assert set(reasons) <= {"", "exists", "busy"}
    assert reasons.count("") >= 20
    for keys in chains:
        assert right(store, keys) == 5
    settled(store)


def test_slots_of_late_writers_leave_room_for_others(opened: Open) -> None:
    """More slots in the hands of late writers than are kept for passing blocks."""
    store = opened(dram=32 * BLOCK, reservation_s=0.05)
    with contextlib.ExitStack() as stack:
        for number in range(4):
            stack.enter_context(store.reserve(chain(f"late {number}", 2), [BLOCK] * 2))
        time.sleep(0.1)
        for number in range(20):
            keys = chain(f"on time {number}", 4)
            put = store.put(keys, blocks(keys))
            assert (put.stored, put.reason) == (4, ""), number
            with store.load(keys) as found:
                assert [bytes(view) for view in found.views] == blocks(keys)
        assert store.stats()["gauges"]["overdue_slots"] == 8
    gauges = store.stats()["gauges"]
    assert gauges["overdue_slots"] == 0
    assert gauges["free_slots"] + gauges["memory_blocks"] == gauges["slots"]
