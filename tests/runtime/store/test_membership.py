"""Who lives: by heartbeats alone, whatever the register does."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog

from runtime.store.errors import StoreError, StoreSetupError
from runtime.store.membership import Member, Register, StaticRegister, parse_members
from runtime.store.membership_etcd import EtcdPlace, EtcdRegister
from runtime.store.membership_view import MembershipView
from runtime.store.peer_identity import NodeIdentity
from runtime.store.peer_network import PeerNetwork
from tests.runtime.store.peer_nodes import (
    WAIT_S,
    InMemoryNode,
    Proxy,
    announcement,
    content,
    key,
    soon,
    wait_until,
)

BEAT_S = 0.1


def test_members_are_read_from_one_line() -> None:
    got = parse_members("a=10.0.0.1:7421, b=host.example:7422*2.5,c=[::1]:9*0.5,")
    assert got == (
        Member("a", "10.0.0.1", 7421, 1.0),
        Member("b", "host.example", 7422, 2.5),
        Member("c", "::1", 9, 0.5),
    )
    assert parse_members("") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "'a': name=host:port"),
        ("a=host", "name=host:port"),
        ("a=host:x", "numbers"),
        ("a=host:1*x", "numbers"),
        ("a=host:0", "port 0"),
        ("a=host:65536", "port 65536"),
        ("a=host:1*0", "weight 0"),
        ("a=host:1*nan", "weight nan"),
        ("a=host:1*-1", "weight -1"),
        ("a=:1", "no host"),
        ("=h:1", "node name"),
        ("a=h:1,a=h:2", "'a' comes twice"),
    ],
)
def test_a_wrong_member_is_named(text: str, said: str) -> None:
    with pytest.raises(StoreSetupError, match=said):
        parse_members(text)


def view(log: list[tuple[object, ...]]) -> MembershipView:
    return MembershipView(
        "me",
        1.0,
        9,
        most_missed=3,
        joined=lambda node, incarnation: log.append(("joined", node, incarnation)),
        left=lambda node: log.append(("left", node)),
    )


def test_a_node_is_dead_after_three_missed_in_a_row_and_not_after_two() -> None:
    log: list[tuple[object, ...]] = []
    members = view(log)
    members.set_weight("b", 2.0)
    members.missed("b")
    assert (log, dict(members.live())) == ([], {"me": 1.0})
    members.heard("b", 5)
    for _ in range(5):
        members.missed("b")
        members.missed("b")
        members.heard("b", 5)
    assert (log, dict(members.live())) == ([("joined", "b", 5)], {"b": 2.0, "me": 1.0})
    for _ in range(4):
        members.missed("b")
    assert (log[1:], dict(members.live())) == ([("left", "b")], {"me": 1.0})
    members.heard("b", 5)
    assert log[2:] == [("joined", "b", 5)]


def test_a_new_incarnation_leaves_and_joins_and_an_older_one_is_ignored() -> None:
    log: list[tuple[object, ...]] = []
    members = view(log)
    members.set_weight("b", 1.0)
    members.heard("b", 5)
    members.heard("b", 6)
    members.heard("b", 5)
    assert log == [("joined", "b", 5), ("left", "b"), ("joined", "b", 6)]
    assert members.incarnation("b") == 6
    assert members.incarnation("me") == 9


def test_signs_of_life_of_nodes_that_do_not_belong_mean_nothing() -> None:
    log: list[tuple[object, ...]] = []
    members = view(log)
    members.heard("stranger", 1)
    members.set_weight("b", 1.0)
    members.heard("b", 1)
    members.forget("b")
    members.heard("b", 1)
    assert log == [("joined", "b", 1), ("left", "b")]


def test_a_callback_may_ask_for_the_view() -> None:
    seen: list[dict[str, float]] = []
    members = MembershipView(
        "me",
        1.0,
        9,
        most_missed=1,
        joined=lambda *_: seen.append(dict(members.live())),
        left=lambda _: seen.append(dict(members.live())),
    )
    members.set_weight("b", 1.0)
    members.heard("b", 1)
    members.missed("b")
    assert seen == [{"me": 1.0, "b": 1.0}, {"me": 1.0}]


@dataclass
class Node:
    """A whole node on loopback, its network and what it was told."""

    network: PeerNetwork
    handler: InMemoryNode
    log: list[tuple[object, ...]]

    def sees(self, *names: str) -> Callable[[], bool]:
        return lambda: set(self.network.live()) == set(names)

    def holds(self, *names: object) -> None:
        added = [announcement(key(name)) for name in names]
        self.handler.holdings.update({(one.key, one.tier): one for one in added})
        self.network.announce(added)

    def knows(self, other: Node, name: str) -> Callable[[], bool]:
        return lambda: self.handler.told.get(name, {}) == other.handler.holdings


@dataclass
class Pool:
    closers: list[Callable[[], object]] = field(default_factory=list)

    def node(
        self,
        name: str,
        register: Register,
        port: int = 0,
        incarnation: int = 1,
        secret: bytes = b"s",
        **more: object,
    ) -> Node:
        handler, log = InMemoryNode(), []  # type: ignore[var-annotated]
        network = PeerNetwork(
            NodeIdentity(name, incarnation, "c", secret),
            handler,
            register,
            listen=("127.0.0.1", port),
            joined=lambda node, number: log.append(("joined", node, number)),
            left=lambda node: log.append(("left", node)),
            **{"interval_s": BEAT_S} | more,  # type: ignore[arg-type]
        )
        network.start()
        self.closers.append(network.stop)
        return Node(network, handler, log)

    def proxy(self, port: int = 0) -> Proxy:
        proxy = Proxy(port)
        self.closers.append(proxy.close)
        return proxy


@pytest.fixture
def pool() -> Iterator[Pool]:
    before = set(threading.enumerate())
    pool = Pool()
    yield pool
    for close in reversed(pool.closers):
        assert close() is not False
    left = [t for t in threading.enumerate() if t not in before and t.is_alive()]
    assert left == []


def test_nodes_with_different_secrets_say_so_and_count_it_on_both_sides(pool: Pool) -> None:
    ports = [free_port(), free_port()]
    with structlog.testing.capture_logs() as said:
        nodes = [
            pool.node(
                name,
                StaticRegister((Member(other, "127.0.0.1", ports[1 - i]),)),
                ports[i],
                secret=secret,
            )
            for i, (name, other, secret) in enumerate((("a", "b", b"one"), ("b", "a", b"two")))
        ]
        counts = [node.network.counters for node in nodes]
        for count in counts:
            wait_until(lambda count=count: count().get("peer_handshakes_refused", 0) >= 2)  # type: ignore[misc]
            wait_until(lambda count=count: count().get("served_handshakes_refused", 0) >= 2)  # type: ignore[misc]
    assert nodes[0].sees("a")() and nodes[1].sees("b")()
    warnings = [entry for entry in said if entry["log_level"] == "warning"]
    asked = [entry for entry in warnings if entry["event"] == "peer refuses or is refused"]
    # However often it happened: each says it once a minute.
    assert sorted((e["node"], e["address"]) for e in asked) == [
        ("a", f"127.0.0.1:{ports[0]}"),
        ("b", f"127.0.0.1:{ports[1]}"),
    ]
    assert all("secret" in entry["reason"] for entry in asked)
    served = [entry for entry in warnings if entry["event"] == "peer refused"]
    assert sorted(entry["reason"].split(":")[0] for entry in served) == ["node 'a'", "node 'b'"]
    assert all("secret" in e["reason"] and e["address"] == "127.0.0.1" for e in served)


def pair(pool: Pool, **more: object) -> tuple[Node, Node, Proxy, Proxy]:
    """Two nodes that reach each other by proxies only."""
    to_a, to_b = pool.proxy(), pool.proxy()
    a = pool.node("a", StaticRegister((Member("b", "127.0.0.1", to_b.port, 2.0),)), **more)
    to_a.target = a.network.server.port
    b = pool.node("b", StaticRegister((Member("a", "127.0.0.1", to_a.port),)), weight=2.0, **more)
    to_b.target = b.network.server.port
    wait_until(a.sees("a", "b"))
    wait_until(b.sees("a", "b"))
    # The view is there a moment before its callbacks have been told.
    wait_until(lambda: ("joined", "b", 1) in a.log and ("joined", "a", 1) in b.log)
    return a, b, to_a, to_b


def test_nodes_of_a_list_find_each_other_and_what_they_hold(pool: Pool) -> None:
    # No death is due here: heartbeats that a busy machine delays must not make one.
    a, b, _, _ = pair(pool, interval_s=1.0, most_missed=1000)
    assert dict(a.network.live()) == {"a": 1.0, "b": 2.0}
    assert a.log == [("joined", "b", 1)]
    a.holds("x", "y")
    wait_until(b.knows(a, "a"))
    keys = b.handler.hold("k", length=5000)
    views = [memoryview(bytearray(5000))]
    # A node that was slow a moment ago is left alone for a moment: a miss, but not for long.
    wait_until(lambda: None not in a.network.peers.fetch("b", keys, views, soon()))
    assert bytes(views[0]) == content(keys[0], 5000)


def test_a_node_that_does_not_answer_is_dead_and_the_other_goes_on(pool: Pool) -> None:
    a, b, _, to_b = pair(pool)
    to_b.is_stopped = True  # hangs: nothing is refused, nothing comes
    wait_until(a.sees("a"))
    assert a.log == [("joined", "b", 1), ("left", "b")]
    assert b.sees("a", "b")(), "the other direction is well"
    to_b.is_stopped = False


def test_a_partition_heals_and_both_know_again_what_the_other_holds(pool: Pool) -> None:
    a, b, to_a, to_b = pair(pool)
    a.holds("before")
    wait_until(b.knows(a, "a"))
    to_a.part()
    to_b.part()
    wait_until(a.sees("a"))
    wait_until(b.sees("b"))
    a.holds("during")
    b.holds("there too")
    to_a.heal()
    to_b.heal()
    wait_until(a.sees("a", "b"))
    wait_until(b.sees("a", "b"))
    wait_until(b.knows(a, "a"))
    wait_until(a.knows(b, "b"))
    wait_until(lambda: a.log[-1] == ("joined", "b", 1))
    # A machine busy for longer than three heartbeats may part them once more.
    times = len(a.log) // 2
    assert times >= 1
    assert a.log == [("joined", "b", 1), ("left", "b")] * times + [("joined", "b", 1)]


def test_a_partition_too_short_for_death_loses_no_announcement(pool: Pool) -> None:
    a, b, _, to_b = pair(pool)
    to_b.part()
    a.holds("during")
    to_b.heal()
    wait_until(b.knows(a, "a"))


def test_a_restart_is_a_death_and_a_birth_and_old_holdings_are_void(pool: Pool) -> None:
    a, b, to_a, to_b = pair(pool)
    b.holds("old", "older")
    wait_until(a.knows(b, "b"))
    register = StaticRegister((Member("a", "127.0.0.1", to_a.port),))
    assert b.network.stop()
    again = pool.node("b", register, incarnation=2)
    to_b.target = again.network.server.port
    wait_until(lambda: ("joined", "b", 2) in a.log)
    assert a.log == [("joined", "b", 1), ("left", "b"), ("joined", "b", 2)]
    again.holds("new")
    wait_until(a.knows(again, "b"))


def test_a_node_that_is_not_there_yet_joins_when_it_comes(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    a = pool.node("a", StaticRegister((Member("b", "127.0.0.1", port),)))
    time.sleep(3 * BEAT_S)
    assert a.sees("a")()
    assert a.log == []
    pool.node("b", StaticRegister(()), port)
    wait_until(a.sees("a", "b"))


class Shelf:
    """A register that a test fills."""

    def __init__(self, *members: Member) -> None:
        self.list: tuple[Member, ...] | None = members

    def start(self, me: Member) -> None: ...

    def members(self) -> dict[str, Member] | None:
        return None if self.list is None else {member.name: member for member in self.list}

    def stop(self) -> None: ...


def test_a_register_that_forgets_a_living_node_does_not_kill_it(pool: Pool) -> None:
    b = pool.node("b", Shelf())
    here = Member("b", "127.0.0.1", b.network.server.port)
    shelf = Shelf(here)
    a = pool.node("a", shelf)
    wait_until(a.sees("a", "b"))
    for forgetful in ((), None):
        shelf.list = forgetful
        time.sleep(5 * BEAT_S)
        assert a.sees("a", "b")()
    shelf.list = ()
    b.network.stop()
    wait_until(a.sees("a"))
    wait_until(lambda: a.network.peers.connections.nodes() == ())


def test_a_node_that_moves_to_another_address_is_found_there(pool: Pool) -> None:
    b = pool.node("b", Shelf())
    shelf = Shelf(Member("b", "127.0.0.1", b.network.server.port))
    a = pool.node("a", shelf)
    wait_until(a.sees("a", "b"))
    b.network.stop()
    moved = pool.node("b", Shelf(), incarnation=2)
    shelf.list = (Member("b", "localhost", moved.network.server.port, 3.0),)
    wait_until(lambda: dict(a.network.live()) == {"a": 1.0, "b": 3.0})
    assert a.network.peers.ping("b", soon()) == 2


# etcd


@dataclass
class Etcd:
    """A real etcd on loopback, to be killed and started again."""

    folder: Path
    port: int
    peer_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        peer = f"http://127.0.0.1:{self.peer_port}"
        with (self.folder.parent / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    "etcd",
                    *("--data-dir", str(self.folder)),
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"default={peer}"),
                ],
                stdout=log,
                stderr=log,
                env=os.environ | {"ETCD_UNSUPPORTED_ARCH": "arm64"},
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)
            self.process = None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    if shutil.which("etcd") is None:
        pytest.skip("no etcd on this machine (package etcd-server)")
    server = Etcd(tmp_path / "etcd", free_port(), free_port())
    server.start()
    yield server
    server.kill()


def register(etcd: Etcd, cluster: str = "c") -> EtcdRegister:
    return EtcdRegister(EtcdPlace((etcd.url,)), cluster, lease_s=2, poll_s=0.1)


def test_nodes_find_each_other_by_etcd_and_live_on_when_it_dies(pool: Pool, etcd: Etcd) -> None:
    a = pool.node("a", register(etcd))
    b = pool.node("b", register(etcd), weight=2.0)
    stranger = pool.node("z", register(etcd, "other cluster"))
    wait_until(a.sees("a", "b"))
    wait_until(b.sees("a", "b"))
    assert dict(a.network.live()) == {"a": 1.0, "b": 2.0}
    etcd.kill()
    shutil.rmtree(etcd.folder)
    time.sleep(2.5)  # longer than the leases
    assert a.sees("a", "b")()
    keys = b.handler.hold("k")
    assert None not in a.network.peers.fetch("b", keys, [memoryview(bytearray(1000))], soon())
    # Back and empty: all enter themselves again, and new nodes find them.
    etcd.start()
    c = pool.node("c", register(etcd))
    wait_until(c.sees("a", "b", "c"))
    wait_until(a.sees("a", "b", "c"))
    assert [entry for entry in a.log if entry[0] == "left"] == []
    assert stranger.sees("z")()


def test_a_node_that_stops_strikes_itself_out_and_one_that_dies_fades(
    pool: Pool, etcd: Etcd
) -> None:
    first, second = register(etcd), register(etcd)
    first.start(Member("first", "127.0.0.1", 1))
    second.start(Member("second", "::1", 2, 0.5))
    both = {
        "first": Member("first", "127.0.0.1", 1),
        "second": Member("second", "::1", 2, 0.5),
    }
    wait_until(lambda: first.members() == both)
    second.stop()
    wait_until(lambda: list(first.members() or ()) == ["first"])
    client = first._clients[0]
    client.put("/ptstore/c/dies", json.dumps({"host": "h", "port": 1, "weight": 1}),
               lease=client.lease(1))  # fmt: skip
    wait_until(lambda: "dies" in (first.members() or ()))
    wait_until(lambda: "dies" not in (first.members() or ()))
    first.stop()


def test_entries_in_etcd_that_make_no_sense_are_left_out(pool: Pool, etcd: Etcd) -> None:
    good = register(etcd)
    good.start(Member("good", "127.0.0.1", 1))
    wait_until(lambda: good.members() is not None)
    client = good._clients[0]
    for name, value in {
        "not-json": "{",
        "a-list": "[1]",
        "no-port": '{"host": "h", "weight": 1}',
        "port": '{"host": "h", "port": 99999, "weight": 1}',
        "na me": '{"host": "h", "port": 1, "weight": 1}',
        "weight": '{"host": "h", "port": 1, "weight": "NaN"}',
        "long": json.dumps({"host": "h" * 5000, "port": 1, "weight": 1}),
        "right": '{"host": "h", "port": 1, "weight": 1}',
    }.items():
        client.put(f"/ptstore/c/{name}", value)
    wait_until(lambda: list(good.members() or ()) == ["good", "right"])
    good.stop()


def test_of_several_etcd_urls_one_that_answers_is_enough(pool: Pool, etcd: Etcd) -> None:
    place = EtcdPlace((f"http://127.0.0.1:{free_port()}", etcd.url))
    one = EtcdRegister(place, "c", lease_s=2, poll_s=0.1)
    one.start(Member("one", "127.0.0.1", 1))
    wait_until(lambda: list(one.members() or ()) == ["one"])
    one.stop()


def test_without_etcd_a_node_stands_alone_and_stops(pool: Pool) -> None:
    nowhere = EtcdRegister(
        EtcdPlace((f"http://127.0.0.1:{free_port()}",)), "c", lease_s=1, poll_s=0.05
    )
    a = pool.node("a", nowhere)
    wait_until(lambda: not nowhere.is_reached)
    assert nowhere.members() is None
    assert a.sees("a")()


@pytest.mark.parametrize("url", ["", "etcd:2379", "ftp://h:1", "http://h", "http://h:x"])
def test_a_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(StoreSetupError, match="etcd"):
        EtcdPlace((url,))
    with pytest.raises(StoreError, match="lease"):
        EtcdRegister(EtcdPlace(("http://h:1",)), "c", lease_s=0)
