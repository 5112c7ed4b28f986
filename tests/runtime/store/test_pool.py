"""Several nodes on loopback: blocks are found from everywhere, and a node may go at any time."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from policies.prefix.owners import rendezvous_order
from runtime.store.config import StoreConfig
from runtime.store.deadline import Deadline
from runtime.store.local_link import LocalLink
from runtime.store.node import StoreNode
from runtime.store.pool import Pool
from runtime.store.pool_config import PoolConfig
from runtime.store.store import PrefixStore
from tests.runtime.store.conftest import BLOCK, blocks, chain


class Member:
    """A node of a pool and its store."""

    def __init__(
        self, folder: Path, name: str, peers: str, transport: Any = "tcp", **settings: Any
    ) -> None:
        given: dict[str, Any] = {
            "folder": folder / name,
            "dram_bytes": 64 * BLOCK,
            "block_bytes": BLOCK,
            "eviction": "lru",
            "node": name,
            "is_pooled": True,
        }
        self.name = name
        self.node = StoreNode(StoreConfig(**(given | settings)))
        config = PoolConfig(
            node=name, peers=peers, transport=transport, heartbeat_s=0.1, most_missed=3
        )
        self.pool = Pool(self.node, config)
        self.pool.start()
        self.store = PrefixStore(LocalLink(self.node, is_owner=False))

    def stop(self) -> None:
        self.pool.stop(Deadline.after(5))
        self.store.close()
        self.node.close(Deadline.after(5))

    @property
    def counters(self) -> Any:
        return self.node.state.counters


Make = Callable[..., list[Member]]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def all_see(members: Sequence[Member], keys: Sequence[bytes], count: int) -> Callable[[], bool]:
    return lambda: all(m.store.lookup(keys) == count for m in members)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Make]:
    made: list[Member] = []

    def make(count: int = 3, **settings: Any) -> list[Member]:
        names = [f"n{i}" for i in range(count)]
        ports = free_ports(count)
        peers = ",".join(f"{n}=127.0.0.1:{p}" for n, p in zip(names, ports, strict=True))
        members = [Member(tmp_path, name, peers, **settings) for name in names]
        made.extend(members)
        wait_until(
            lambda: all(len(m.node.state.weights) == count for m in members), "all nodes live"
        )
        return members

    yield make
    for member in made:
        with contextlib.suppress(Exception):
            member.stop()


def owned_by(name: str, members: Sequence[Member], length: int = 4, tag: str = "") -> list[bytes]:
    """A chain whose region that node owns."""
    weights = {m.name: 1.0 for m in members}
    for number in range(1000):
        keys = chain(f"of-{name}-{tag}-{number}", length)
        if rendezvous_order(keys[0], weights)[0] == name:
            return keys
    raise AssertionError("no such chain")


def test_what_one_node_puts_every_node_finds(pool: Make) -> None:
    members = pool()
    for writer in members:
        keys = chain(f"by {writer.name}", 6)
        assert writer.store.put(keys, blocks(keys)).stored == 6
        wait_until(all_see(members, keys, 6), "the directory on every node")
        for reader in members:
            with reader.store.load(keys, deadline_s=5) as found:
                assert [bytes(view) for view in found.views] == blocks(keys), reader.name


def test_the_owner_gets_the_region_and_the_writer_keeps_a_replica(pool: Make) -> None:
    members = pool()
    keys = owned_by("n1", members)
    members[0].store.put(keys, blocks(keys))
    assert members[0].store.flush()
    assert members[1].node.state.policy.in_memory(keys[0]) == "owned"
    assert members[0].node.state.policy.in_memory(keys[0]) == "replica"
    copies = members[2].node.state.directory.copies
    wait_until(lambda: len(copies(keys[3])) == 2, "both copies in the third directory")
    assert [(c.node, c.is_owned) for c in copies(keys[3])] == [("n1", True), ("n0", False)]


def test_without_replicas_only_the_owner_keeps_blocks(pool: Make) -> None:
    members = pool(replicas="none")
    keys = owned_by("n1", members)
    members[0].store.put(keys, blocks(keys))
    assert members[0].store.flush()
    wait_until(all_see(members, keys, 4), "the directory on every node")
    for reader in members:
        with reader.store.load(keys, deadline_s=5) as found:
            assert [bytes(view) for view in found.views] == blocks(keys)
    assert members[0].node.state.policy.in_memory(keys[0]) is None
    assert members[2].node.state.policy.in_memory(keys[0]) is None
    assert members[0].node.gauges()["free_slots"] == 64


def test_replicas_are_promoted_when_their_owner_dies(pool: Make) -> None:
    members = pool()
    mine, lost = owned_by("n1", members), owned_by("n1", members, 3, "lost")
    members[0].store.put(mine, blocks(mine))
    members[1].store.put(lost, blocks(lost))
    members[0].store.flush()
    wait_until(all_see(members, mine, 4), "the directory on every node")
    members[1].stop()
    rest = [members[0], members[2]]
    wait_until(lambda: all(len(m.node.state.weights) == 2 for m in rest), "the loss is noticed")
    wait_until(
        lambda: members[0].node.state.policy.in_memory(mine[0]) == "owned",
        "the replica's promotion",
    )
    for reader in rest:
        with reader.store.load(mine, deadline_s=5) as found:
            assert [bytes(view) for view in found.views] == blocks(mine)
        with reader.store.load(lost, deadline_s=5) as found:
            assert found.leading == 0
    keys = chain("after", 3)
    assert members[0].store.put(keys, blocks(keys)).stored == 3
    wait_until(all_see(rest, keys, 3), "new blocks go to nodes that live")


def test_a_node_that_returns_is_asked_again_and_old_addresses_are_not(
    pool: Make, tmp_path: Path
) -> None:
    members = pool()
    keys = owned_by("n1", members)
    members[1].store.put(keys, blocks(keys))
    wait_until(all_see(members, keys, 4), "the directory on every node")
    text = ",".join(f"{m.name}=127.0.0.1:{m.pool.port}" for m in members)
    old = members[1].node.state.incarnation
    members[1].stop()  # its memory goes with it
    again = Member(tmp_path, "n1", text)
    try:
        others = [members[0], members[2]]
        wait_until(
            lambda: (
                all(
                    m.node.state.directory.incarnation("n1") in (None, old)
                    or m.store.lookup(keys) == 0
                    for m in others
                )
                and all("n1" in m.node.state.weights for m in [*others, again])
            ),
            "the new start is known",
        )
        for reader in others:
            with reader.store.load(keys, deadline_s=2) as found:
                assert found.leading == 0
        assert again.store.put(keys, blocks(keys)).stored == 4
        wait_until(all_see([*others, again], keys, 4), "announced by the new start")
        with members[0].store.load(keys, deadline_s=5) as found:
            assert [bytes(view) for view in found.views] == blocks(keys)
    finally:
        again.stop()


def test_an_owner_that_evicts_tells_the_others(pool: Make) -> None:
    members = pool(2, dram_bytes=12 * BLOCK)
    first = owned_by("n1", members)
    members[1].store.put(first, blocks(first))
    wait_until(all_see(members, first, 4), "announced")
    for number in range(6):
        keys = chain(f"more-{number}", 4)
        members[1].store.put(keys, blocks(keys))
        members[1].store.flush()
    wait_until(lambda: members[0].store.lookup(first) == 0, "the eviction is announced")


def test_a_full_owner_leaves_the_blocks_to_their_writer(pool: Make) -> None:
    members = pool(2, dram_bytes=20 * BLOCK)
    big = owned_by("n1", members, 19, "big")
    members[1].store.put(big, blocks(big))
    with members[1].store.load(big) as found:  # all its memory is pinned
        assert found.leading == 19
        keys = owned_by("n1", members)
        assert members[0].store.put(keys, blocks(keys)).stored == 4
        members[0].store.flush()
        counters = members[0].counters
        wait_until(lambda: counters["blocks_taken_over"] >= 3, "taken over")
    assert members[0].node.state.policy.in_memory(keys[3]) == "owned"
    wait_until(all_see(members, keys, 4), "announced")


def test_blocks_on_the_ssd_of_another_node_are_found(pool: Make) -> None:
    members = pool(2, ssd_bytes=4 << 20, dram_bytes=16 * BLOCK)
    keys = owned_by("n1", members)
    members[1].store.put(keys, blocks(keys), durable=True, deadline_s=5)
    for number in range(8):
        more = chain(f"x{number}", 4)
        members[1].store.put(more, blocks(more), durable=True, deadline_s=5)
    wait_until(
        lambda: members[1].node.state.policy.in_memory(keys[3]) is None, "evicted from memory"
    )
    wait_until(all_see(members, keys, 4), "announced")
    with members[0].store.load(keys, deadline_s=5) as found:
        assert [bytes(view) for view in found.views] == blocks(keys)


def test_every_pin_and_slot_is_given_back_after_mixed_work(pool: Make) -> None:
    members = pool(3, ssd_bytes=4 << 20, dram_bytes=24 * BLOCK)
    for number in range(60):
        member = members[number % 3]
        keys = chain(f"p{number % 11}", 2 + number % 5)
        with member.store.load(keys, deadline_s=5) as found:
            assert [bytes(view) for view in found.views] == blocks(keys[: found.leading])
            member.store.put(keys, blocks(keys))
    for member in members:
        assert member.store.flush(deadline_s=10)
    for member in members:
        wait_until(
            lambda m=member: m.node.gauges()["pinned_blocks"] == 0,  # type: ignore[misc]
            "no pins",
        )
        gauges = member.node.gauges()
        assert gauges["leases"] == gauges["reservations"] == 0
        assert gauges["free_slots"] + gauges["memory_blocks"] == gauges["slots"]
        member.node.state.directory.check()
    assert sum(m.counters["blocks_hit"] for m in members) > 0
    assert sum(m.counters["blocks_sent_to_owner"] for m in members) > 0


def test_blocks_are_read_one_sided_where_nixl_is_installed(
    pool: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")):
        pytest.skip("nixl is not installed")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    members = pool(2, transport="nixl", replicas="none")
    keys = owned_by("n1", members, 6)
    assert members[0].store.put(keys, blocks(keys)).stored == 6
    assert members[0].store.flush()
    wait_until(all_see(members, keys, 6), "announced")
    for _ in range(3):
        with members[0].store.load(keys, deadline_s=20) as found:
            assert [bytes(view) for view in found.views] == blocks(keys)
    assert members[0].pool.network.counters()["peer_read_blocks"] == 18
