"""One node under unusual orders of events: late words of lost nodes, blocks that are here already,
quotas that are full, calls after the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from policies.prefix.directory import Directory
from runtime.store.blocks import BlockInfo, checksum
from runtime.store.config import StoreConfig
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreUnavailableError
from runtime.store.leases import Leases
from runtime.store.local_link import LocalLink
from runtime.store.node import StoreNode
from runtime.store.node_peers import NodePeers
from runtime.store.node_state import NodeState
from runtime.store.owner_sender import take_over
from runtime.store.peer_messages import Announcement
from runtime.store.store import PrefixStore
from tests.runtime.store.conftest import BLOCK, block, blocks, chain

TENANT = b"t" * 16
Open = Callable[..., StoreNode]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    nodes: list[StoreNode] = []

    def make(**settings: Any) -> StoreNode:
        given: dict[str, Any] = {
            "folder": tmp_path / str(len(nodes)),
            "dram_bytes": 12 * BLOCK,
            "block_bytes": BLOCK,
            "eviction": "lru",
            "node": "a",
            "is_pooled": True,
            "owner_rule": "writer",
        }
        nodes.append(StoreNode(StoreConfig(**(given | settings))))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def store_of(node: StoreNode) -> PrefixStore:
    return PrefixStore(LocalLink(node, is_owner=False))


def infos_of(keys: Sequence[bytes], tenant: bytes = b"", length: int = BLOCK) -> list[BlockInfo]:
    return [
        BlockInfo(
            key=key,
            parent=keys[i - 1] if i else b"",
            region=keys[0],
            index=i,
            depth=i,
            length=length,
            crc=checksum(block(key, length)),
            tenant=tenant,
        )
        for i, key in enumerate(keys)
    ]


def words_of(keys: Sequence[bytes], tier: Any = "memory") -> list[Announcement]:
    return [
        Announcement(
            key=key, region=keys[0], index=i, depth=i, length=BLOCK, tier=tier, is_owned=True
        )
        for i, key in enumerate(keys)
    ]


def received(peers: NodePeers, keys: Sequence[bytes], *, is_owned: bool = True) -> int:
    with peers.receive_region(infos_of(keys), "b", is_owned, Deadline.after(5)) as room:
        for buffer, key in zip(room.buffers, keys, strict=False):
            buffer[:] = block(key)
        return room.commit()


def lose_from_memory(node: StoreNode, keys: Sequence[bytes]) -> None:
    with node.state.lock:
        for key in reversed(keys):
            node.state.memory.forget(key, now=node.state.now())


# --- what is here already ------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["lru", "tree_hd", "gdsf"])
def test_blocks_an_owner_has_are_not_given_up_for_the_rest_of_their_region(
    opened: Open, eviction: str
) -> None:
    node = opened(dram_bytes=4 * BLOCK, eviction=eviction)
    store, peers, keys = store_of(node), NodePeers(node), chain("region", 2)
    store.put(keys[:1], blocks(keys[:1]))
    for number in range(3):
        other = chain(f"other-{number}", 1)
        assert store.put(other, blocks(other)).stored == 1
    assert received(peers, keys) == 2
    assert all(node.state.memory.get(key) is not None for key in keys)
    assert len(node.state.leases) == 0


def test_blocks_that_are_here_already_share_one_buffer(opened: Open) -> None:
    node = opened(dram_bytes=32 * BLOCK)
    peers, keys = NodePeers(node), chain("long", 10)
    assert received(peers, keys[:8]) == 8
    with peers.receive_region(infos_of(keys), "b", True, Deadline.after(5)) as room:
        assert [buffer.nbytes for buffer in room.buffers] == [BLOCK] * 10
        assert len({id(buffer.obj) for buffer in room.buffers[:8]}) == 1
        assert memoryview(room.buffers[0].obj).nbytes == BLOCK
        for buffer, key in zip(room.buffers, keys, strict=True):
            buffer[:] = block(key)
        assert room.commit() == 10
    with store_of(node).load(keys) as found:
        assert [bytes(view) for view in found.views] == blocks(keys)


# --- other nodes ---------------------------------------------------------------------------


def test_late_words_of_a_lost_node_do_not_make_blocks_unstorable(opened: Open) -> None:
    node, keys = opened(), chain("zombie", 2)
    store, peers = store_of(node), NodePeers(node)
    peers.joined("b", 1, 1.0)
    peers.left("b")
    peers.announced("b", 1, words_of(keys), [])
    assert store.lookup(keys) == 0
    put = store.put(keys, blocks(keys))
    assert (put.stored, put.reason) == (2, "")
    node.state.forget_strangers(now=1e6)
    node.state.forget_strangers(now=2e6)
    assert node.state.directory.nodes() == ("a",)
    assert store.lookup(keys) == 2


def test_words_that_overtake_the_first_heartbeat_are_not_lost(opened: Open) -> None:
    node, keys, mine = opened(dram_bytes=4 * BLOCK), chain("early", 2), chain("mine", 1)
    store, peers = store_of(node), NodePeers(node)
    store.put(mine, blocks(mine))
    peers.announced("b", 1, words_of(keys) + words_of(mine), [])
    node.state.forget_strangers(now=1.0)
    assert store.lookup(keys) == 0
    peers.joined("b", 1, 1.0)
    node.state.forget_strangers(now=1e6)
    assert store.lookup(keys) == 2
    assert is_last_copy(node, mine[0]) is False


def is_last_copy(node: StoreNode, key: bytes) -> bool:
    """Whether its eviction is counted as the loss of the last copy."""
    before = node.state.counters["blocks_evicted_last_copy"]
    store, number = store_of(node), 0
    while node.state.memory.get(key) is not None:
        other = chain(f"pushes-{key.hex()}-{number}", 1)
        assert store.put(other, blocks(other)).stored == 1
        number += 1
    return node.state.counters["blocks_evicted_last_copy"] > before


def test_a_promoted_block_that_another_node_holds_too_is_not_the_last_copy(opened: Open) -> None:
    node, keys = opened(dram_bytes=2 * BLOCK), chain("promoted", 1)
    peers = NodePeers(node)
    peers.joined("c", 1, 1.0)
    assert received(peers, keys, is_owned=False) == 1
    peers.announced("c", 1, words_of(keys), [])
    with node.state.lock:
        take_over(node.state, keys)
    assert node.state.policy.in_memory(keys[0]) == "owned"
    assert is_last_copy(node, keys[0]) is False
    assert node.state.counters["blocks_taken_over"] == 1


def test_a_block_that_comes_from_ssd_is_not_the_last_copy_if_another_node_holds_it(
    opened: Open,
) -> None:
    node, keys = opened(dram_bytes=2 * BLOCK, ssd_bytes=2 << 20, flush="never"), chain("x", 1)
    peers = NodePeers(node)
    peers.joined("c", 1, 1.0)
    peers.announced("c", 1, words_of(keys), [])
    assert received(peers, keys) == 1
    assert is_last_copy(node, keys[0]) is False


def test_a_read_by_another_node_is_a_reuse_that_brings_blocks_to_ssd(opened: Open) -> None:
    node, keys = opened(ssd_bytes=2 << 20, flush="on_reuse"), chain("reused", 3)
    store_of(node).put(keys, blocks(keys))
    assert node.flush(Deadline.after(5))
    assert not any(node.state.policy.on_ssd(key) for key in keys)
    with NodePeers(node).open_blocks(keys) as given:
        assert all(given)
    assert node.flush(Deadline.after(5))
    assert all(node.state.policy.on_ssd(key) for key in keys)


# --- parents and tenants of blocks on SSD --------------------------------------------------


def read_by_peer(node: StoreNode, keys: Sequence[bytes]) -> int:
    with NodePeers(node).open_blocks(keys) as given:
        return sum(one is not None for one in given)


def read_by_stranger(node: StoreNode, keys: Sequence[bytes]) -> int:
    with store_of(node).load(keys) as found:
        return found.leading


@pytest.mark.parametrize("read", [read_by_peer, read_by_stranger])
def test_blocks_read_from_ssd_count_against_the_quota_of_their_tenant(
    opened: Open, read: Callable[[StoreNode, Sequence[bytes]], int]
) -> None:
    node = opened(dram_bytes=32 * BLOCK, ssd_bytes=4 << 20, quota_bytes={TENANT: 4 * BLOCK})
    store, keys, more = store_of(node), chain("old", 4), chain("new", 4)
    assert store.put(keys, blocks(keys), tenant=TENANT).stored == 4
    assert store.flush()
    lose_from_memory(node, keys)
    assert read(node, keys) == 4
    assert store.put(more, blocks(more), tenant=TENANT).stored == 4
    assert len(node.state.memory) == 4


@pytest.mark.parametrize("read", [read_by_peer, read_by_stranger])
def test_blocks_read_from_ssd_go_again_from_the_end_of_their_chain(
    opened: Open, read: Callable[[StoreNode, Sequence[bytes]], int]
) -> None:
    node = opened(dram_bytes=4 * BLOCK, ssd_bytes=4 << 20, eviction="tree_lru")
    store, keys, other = store_of(node), chain("old", 4), chain("new", 1)
    assert store.put(keys, blocks(keys)).stored == 4
    assert store.flush()
    lose_from_memory(node, keys)
    assert read(node, keys[:2]) == 2
    assert read(node, keys[2:] if read is read_by_peer else keys) > 0
    assert store.put(other, blocks(other)).stored == 1
    held = [node.state.memory.get(key) is not None for key in keys]
    assert held == [True, True, True, False]


# --- quotas --------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["lru", "tree_hd"])
def test_within_its_quota_nobody_pushes_a_tenant_out(opened: Open, eviction: str) -> None:
    node = opened(quota_bytes={TENANT: 4 * BLOCK}, eviction=eviction)
    store = store_of(node)
    mine, shared, new = chain("mine", 4), chain("shared", 8), chain("new", 1)
    assert store.put(mine, blocks(mine), tenant=TENANT).stored == 4
    assert store.put(shared, blocks(shared)).stored == 8
    with store.load(shared) as found:
        assert found.leading == 8
        put = store.put(new, blocks(new))
        assert (put.stored, put.reason) == (0, "full")
    assert store.lookup(mine) == 4
    assert store.put(new, blocks(new)).stored == 1
    assert store.lookup(mine) == 4


# --- wrong arguments -----------------------------------------------------------------------


@pytest.mark.parametrize("sums", [[-1], [2**32], ["a"], [1.5], [7, -1]])
def test_a_commit_with_an_impossible_checksum_leaves_the_reservation_as_it_was(
    opened: Open, sums: list[Any]
) -> None:
    node, keys = opened(), chain("sums", 2)
    holder = node.new_holder()
    reservation = node.reserve(keys, [BLOCK] * 2, first=0, tenant=b"", holder=holder)
    with pytest.raises(ValueError, match="checksum"):
        node.commit(reservation.reservation_id, sums, holder=holder, deadline=Deadline.after(1))
    assert node.gauges()["reservations"] == 1
    node.abort(reservation.reservation_id, holder)
    assert node.gauges()["free_slots"] == 12
    assert store_of(node).put(keys, blocks(keys)).stored == 2


@pytest.mark.parametrize("tenant", ["abc", b"abc", b"t" * 17, None])
def test_room_for_an_impossible_tenant_is_refused_before_anything_is_reserved(
    opened: Open, tenant: Any
) -> None:
    node, keys = opened(), chain("tenant", 1)
    holder = node.new_holder()
    with pytest.raises(ValueError, match="tenant"):
        node.reserve(keys, [BLOCK], first=0, tenant=tenant, holder=holder)
    assert node.gauges()["free_slots"] == 12
    assert store_of(node).put(keys, blocks(keys)).stored == 1


def test_durable_room_without_an_ssd_is_refused_before_anything_is_written(opened: Open) -> None:
    node, keys = opened(), chain("durable", 1)
    refused = node.reserve(
        keys, [BLOCK], first=0, tenant=b"", holder=node.new_holder(), is_durable=True
    )
    assert (refused.reservation_id, refused.reason) == (0, "no_ssd")
    assert store_of(node).lookup(keys) == 0


# --- work that must not grow ---------------------------------------------------------------


def test_a_lookup_makes_no_list_of_the_copies_of_each_block(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, keys = opened(), chain("many", 8)
    peers = NodePeers(node)
    for name in "bcd":
        peers.joined(name, 1, 1.0)
        peers.announced(name, 1, words_of(keys), [])

    def copies(self: Directory, key: bytes) -> None:
        raise AssertionError("copies were listed")

    monkeypatch.setattr(Directory, "copies", copies)
    assert store_of(node).lookup(keys) == 8


def test_a_load_from_many_places_gathers_its_pins_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, keys = opened(dram_bytes=128 * BLOCK, ssd_bytes=4 << 20, replicas="unified"), []
    keys = chain("alternating", 40)
    assert store_of(node).put(keys, blocks(keys)).stored == 40
    assert node.flush(Deadline.after(5))
    lose_from_memory(node, keys)
    peers = NodePeers(node)
    peers.joined("b", 1, 1.0)
    with node.state.lock:
        for key in keys[1::2]:
            node.state.policy.lost(key, "ssd", now=node.state.now())
            node.state.gone(key, "ssd")
        words = words_of(keys)[1::2]
    peers.announced("b", 1, words, [])
    node.join(_fetched, lambda *args: 0, lambda added, removed: None)
    calls, pin_chain = [], NodeState.pin_chain

    def counted(self: NodeState, chain_keys: Any) -> Any:
        calls.append(len(chain_keys))
        return pin_chain(self, chain_keys)

    monkeypatch.setattr(NodeState, "pin_chain", counted)
    with store_of(node).load(keys, deadline_s=5) as found:
        assert [bytes(view) for view in found.views] == blocks(keys)
    assert calls == [40]


def _fetched(wanted: Any, deadline: Deadline) -> Any:
    answers = {}
    for node, (keys, views) in wanted.items():
        for key, view in zip(keys, views, strict=True):
            view[:] = block(key)
        infos = {info.key: info for info in infos_of(keys)}
        answers[node] = [infos[key] for key in keys]
    return answers


def test_a_read_of_many_blocks_on_ssd_gathers_no_pins_for_each(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, keys = opened(dram_bytes=64 * BLOCK, ssd_bytes=4 << 20), chain("on-ssd", 20)
    assert store_of(node).put(keys, blocks(keys)).stored == 20
    assert node.flush(Deadline.after(5))
    lose_from_memory(node, keys)
    monkeypatch.delattr(NodeState, "pin_chain")
    assert read_by_peer(node, keys) == 20


class CountedEnd(float):
    """An end of a lease that knows how often it was looked at."""

    looks = 0

    def __le__(self, other: float) -> bool:
        CountedEnd.looks += 1
        return float(self) <= other

    def __gt__(self, other: float) -> bool:
        CountedEnd.looks += 1
        return float(self) > other


def test_leases_that_go_on_are_not_looked_at_when_others_end() -> None:
    ended: list[int] = []
    leases = Leases(lambda lease: ended.append(lease.lease_id))
    made = [leases.open(1, [bytes([i])], (), CountedEnd(i)) for i in range(200)]
    leases.close(made[0].lease_id, 1)
    leases.close(made[150].lease_id, 1)
    ended.clear()
    CountedEnd.looks = 0
    assert leases.expire(9.0) == 9
    assert CountedEnd.looks <= 10
    assert ended == [lease.lease_id for lease in made[1:10]]
    assert leases.expire(500.0) == 189
    assert len(leases) == leases.num_leases == 0


def test_a_lease_never_ends_before_one_that_began_earlier() -> None:
    leases = Leases(lambda lease: None)
    leases.open(1, [b"a"], (), 10.0)
    assert leases.open(1, [b"b"], (), 5.0).ends_s == 10.0
    assert leases.expire(7.0) == 0
    assert leases.expire(10.0) == 2


# --- after the end -------------------------------------------------------------------------


def test_every_call_after_close_says_so_and_none_touches_the_memory(opened: Open) -> None:
    node, keys = opened(ssd_bytes=2 << 20), chain("closed", 3)
    store_of(node).put(keys, blocks(keys))
    holder, soon = node.new_holder(), Deadline.after(1)
    offer = node.load(keys, holder=holder, deadline=soon)
    more = chain("open", 1)
    room = node.reserve(more, [BLOCK], first=0, tenant=b"", holder=holder)
    peers = NodePeers(node)
    node.close()
    node.close()
    assert offer.lease is not None
    calls: list[Callable[[], Any]] = [
        lambda: node.lookup(keys),
        lambda: node.load(keys, holder=holder, deadline=soon),
        lambda: node.reserve(keys, [BLOCK] * 3, first=0, tenant=b"", holder=holder),
        lambda: node.commit(room.reservation_id, [1], holder=holder, deadline=soon),
        lambda: node.receive(infos_of(more), is_owned=True, holder=holder),
        lambda: node.flush(soon),
        lambda: peers.open_blocks(keys).__enter__(),
        lambda: peers.receive_region(infos_of(more), "b", True, soon).__enter__(),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailableError):
            call()
    assert node.release(offer.lease.lease_id, holder) is False
    node.abort(room.reservation_id, holder)
    node.doubt(keys[0])
    node.leave(holder)
    peers.joined("b", 1, 1.0)
    peers.announced("b", 1, words_of(keys), [])
    peers.left("b")
    assert node.gauges()["slots"] == 12


def test_a_node_lost_while_this_one_closes_changes_nothing_any_more(opened: Open) -> None:
    node, keys = opened(), chain("orphans", 2)
    peers = NodePeers(node)
    peers.joined("b", 1, 1.0)
    assert received(peers, keys, is_owned=False) == 2
    peers.announced("b", 1, words_of(keys), [])
    node.close()
    peers.left("b")
    assert node.state.counters["blocks_taken_over"] == 0


def test_close_waits_for_calls_that_run_and_they_end_well(opened: Open) -> None:
    node, keys = opened(dram_bytes=32 * BLOCK), chain("busy", 1)
    begun, gate = threading.Event(), threading.Event()
    results: list[int] = []

    def fetch(wanted: Any, deadline: Deadline) -> Any:
        begun.set()
        gate.wait(5)
        return _fetched(wanted, deadline)

    node.join(fetch, lambda *args: 0, lambda added, removed: None)
    peers = NodePeers(node)
    peers.joined("b", 1, 1.0)
    peers.announced("b", 1, words_of(keys), [])

    def load() -> None:
        offer = node.load(keys, holder=1, deadline=Deadline.after(10))
        results.append(len(offer.rooms))

    threads = [threading.Thread(target=load), threading.Thread(target=node.close)]
    threads[0].start()
    assert begun.wait(5)
    threads[1].start()
    with pytest.raises(StoreUnavailableError):
        for _ in range(500):
            node.lookup(keys)
            time.sleep(0.01)
    gate.set()
    for thread in threads:
        thread.join(10)
    assert results == [1]


def test_threads_racing_with_close_see_nothing_but_an_unavailable_store(opened: Open) -> None:
    for _ in range(3):
        node = opened(dram_bytes=32 * BLOCK, ssd_bytes=2 << 20)
        with ThreadPoolExecutor(3) as threads:
            done = [threads.submit(work_until_closed, node, number) for number in range(3)]
            time.sleep(0.05)
            node.close()
            for one in done:
                assert isinstance(one.exception(20), StoreUnavailableError)


def work_until_closed(node: StoreNode, number: int) -> None:
    holder, soon = node.new_holder(), Deadline.after(5)
    for turn in range(100_000):
        keys = chain(f"{number}-{turn}", 1)
        if number % 2:
            node.load(keys, holder=holder, deadline=soon)
            node.leave(holder)
        else:
            room = node.reserve(keys, [BLOCK], first=0, tenant=b"", holder=holder)
            node.commit(room.reservation_id, [1], holder=holder, deadline=soon)
