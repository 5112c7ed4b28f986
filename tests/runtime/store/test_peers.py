"""Between nodes: equal bytes or a miss, in bounded time, whatever the other end does."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError, StoreSetupError
from runtime.store.peer_announcer import Announcer
from runtime.store.peer_client import Peers
from runtime.store.peer_counters import PeerCounters
from runtime.store.peer_faults import Seldom
from runtime.store.peer_identity import (
    Incarnations,
    NodeIdentity,
    RefusedError,
    new_incarnation,
)
from runtime.store.peer_messages import (
    MAX_BLOCKS,
    Announce,
    Blocks,
    Fetch,
    Hello,
    Page,
    Ping,
    Removal,
)
from runtime.store.peer_server import PeerServer, ServerLimits
from runtime.store.peer_suspects import Suspects
from runtime.store.peer_sync import DirectorySync
from runtime.store.wire import recv_frame, send_frame
from tests.runtime.store.peer_nodes import (
    WAIT_S,
    BusyError,
    InMemoryNode,
    Proxy,
    announcement,
    content,
    info,
    key,
    soon,
    wait_until,
)


@dataclass
class Bench:
    """Servers, clients and proxies of one test, all closed at its end."""

    closers: list[Callable[[], object]] = field(default_factory=list)

    def server(
        self, handler: Any, name: str = "b", incarnation: int = 7, port: int = 0, **more: Any
    ) -> PeerServer:
        identity = NodeIdentity(
            name, incarnation, more.pop("cluster", "c"), more.pop("secret", b"s")
        )
        server = PeerServer("127.0.0.1", port, handler, identity, **more)
        server.start()
        self.closers.append(server.stop)
        return server

    def peers(
        self, ports: dict[str, int], name: str = "a", incarnation: int = 3, **more: Any
    ) -> Peers:
        identity = NodeIdentity(
            name, incarnation, more.pop("cluster", "c"), more.pop("secret", b"s")
        )
        peers = Peers(identity, **more)
        for node, port in ports.items():
            peers.add(node, "127.0.0.1", port)
        self.closers.append(peers.close)
        return peers

    def proxy(self, port: int) -> Proxy:
        proxy = Proxy(port)
        self.closers.append(proxy.close)
        return proxy


@pytest.fixture
def bench() -> Iterator[Bench]:
    before = set(threading.enumerate())
    bench = Bench()
    yield bench
    for close in reversed(bench.closers):
        assert close() is not False
    left = [t for t in threading.enumerate() if t not in before and t.is_alive()]
    assert left == []


def rooms(count: int, length: int) -> list[memoryview]:
    return [memoryview(bytearray(length)) for _ in range(count)]


def check(keys: list[bytes], got: list[BlockInfo | None], views: list[memoryview]) -> None:
    for one, found, view in zip(keys, got, views, strict=True):
        if found is not None:
            assert found.key == one
            assert bytes(view[: found.length]) == content(one, found.length)


def test_fetched_blocks_equal_the_stored_ones_and_misses_are_in_their_places(bench: Bench) -> None:
    node = InMemoryNode()
    held = node.hold(*range(5), length=700_001)
    keys = [held[0], key("absent"), held[1], held[4], key("also absent")]
    views = rooms(5, 800_000)
    peers = bench.peers({"b": bench.server(node).port})
    got = peers.fetch("b", keys, views, soon())
    assert got == [None if one not in held else node.blocks[one][0] for one in keys]
    check(keys, got, views)
    wait_until(lambda: node.leases == 0)


def test_a_block_larger_than_its_destination_is_a_miss_and_the_rest_arrives(bench: Bench) -> None:
    node = InMemoryNode()
    keys = node.hold("x", "y", "z", length=1000)
    views = [*rooms(1, 1000), *rooms(1, 999), *rooms(1, 1000)]
    peers = bench.peers({"b": bench.server(node).port})
    got = peers.fetch("b", keys, views, soon())
    assert [found is not None for found in got] == [True, False, True]
    check(keys, got, views)


def test_more_keys_than_one_request_may_have_are_fetched_in_parts(bench: Bench) -> None:
    node = InMemoryNode()
    keys = node.hold(*range(MAX_BLOCKS + 10), length=3)
    views = rooms(len(keys), 3)
    server = bench.server(node)
    got = bench.peers({"b": server.port}).fetch("b", keys, views, soon())
    assert None not in got
    check(keys, got, views)
    wait_until(lambda: server.counters.snapshot()["requests_fetch"] == 2)


def test_several_owners_are_asked_at_the_same_time(bench: Bench) -> None:
    # Each answers only once all three were asked: in turn, none would ever answer.
    all_asked = threading.Barrier(3)
    nodes = {name: InMemoryNode(before_open=lambda: all_asked.wait(WAIT_S)) for name in "bcd"}
    wanted = {}
    for name, node in nodes.items():
        keys = node.hold(f"{name}1", f"{name}2", length=50_000)
        wanted[name] = (keys, rooms(2, 50_000))
    ports = {name: bench.server(node, name).port for name, node in nodes.items()}
    got = bench.peers(ports).fetch_many(wanted, soon())
    for name, (keys, views) in wanted.items():
        assert None not in got[name]
        check(keys, got[name], views)


def test_connections_are_kept_and_shared_by_threads(bench: Bench) -> None:
    node = InMemoryNode()
    keys = node.hold(*range(20), length=5000)
    server = bench.server(node)
    peers = bench.peers({"b": server.port})
    wrong: list[object] = []

    def fetch_often() -> None:
        for _ in range(20):
            views = rooms(20, 5000)
            got = peers.fetch("b", keys, views, soon())
            if None in got or [bytes(view) for view in views] != [content(k, 5000) for k in keys]:
                wrong.append(got)

    threads = [threading.Thread(target=fetch_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert wrong == []
    wait_until(lambda: server.counters.snapshot()["requests_fetch"] == 160)
    assert len(server._open) <= 4


@pytest.mark.parametrize("is_owned", [True, False])
def test_a_put_region_is_stored_as_it_was_sent(bench: Bench, is_owned: bool) -> None:
    node = InMemoryNode()
    keys = [key(f"put{i}") for i in range(6)]
    infos = [info(one, 300_000, index, keys[0]) for index, one in enumerate(keys)]
    buffers = [memoryview(content(one, 300_000)) for one in keys]
    peers = bench.peers({"b": bench.server(node).port})
    assert peers.put("b", infos, buffers, is_owned, soon()) == 6
    assert [node.blocks[one][0] for one in keys] == infos
    assert [bytes(node.blocks[one][1]) for one in keys] == [bytes(b) for b in buffers]
    wait_until(lambda: node.leases == 0)


def test_of_a_put_only_the_leading_blocks_that_find_room_are_sent(bench: Bench) -> None:
    node = InMemoryNode(room_blocks=2)
    infos = [info(key(i), 1000, i) for i in range(5)]
    peers = bench.peers({"b": bench.server(node).port})
    for round_index, room in enumerate([2, 0, 5]):
        node.room_blocks, node.blocks = room, {}
        buffers = [content(one.key, 1000) for one in infos]
        assert peers.put("b", infos, buffers, True, soon()) == room, round_index
        assert list(node.blocks) == [one.key for one in infos[:room]]


def test_a_put_whose_bytes_are_not_those_of_its_checksums_stores_nothing(bench: Bench) -> None:
    node = InMemoryNode()
    server = bench.server(node)
    peers = bench.peers({"b": server.port})
    infos = [info(key(i), 1000, i) for i in range(3)]
    damaged = bytearray(content(infos[1].key, 1000))
    damaged[500] ^= 1
    buffers = [content(infos[0].key, 1000), bytes(damaged), content(infos[2].key, 1000)]
    assert peers.put("b", infos, buffers, True, soon()) == 0
    assert node.blocks == {}
    assert server.counters.snapshot()["corrupt_blocks"] == 1
    assert not peers.suspects.is_suspect("b")
    right = [content(one.key, 1000) for one in infos]
    assert peers.put("b", infos, right, True, soon()) == 3


def test_a_node_that_is_busy_is_no_suspect(bench: Bench) -> None:
    node = InMemoryNode(error=BusyError("busy"))
    keys = node.hold("k")
    peers = bench.peers({"b": bench.server(node).port})
    assert peers.fetch("b", keys, rooms(1, 1000), soon()) == [None]
    assert peers.put("b", [info(key(1), 10)], [content(key(1), 10)], True, soon()) == 0
    assert not peers.suspects.is_suspect("b")
    node.error = None
    assert None not in peers.fetch("b", keys, rooms(1, 1000), soon())


def test_an_error_of_the_node_behind_the_server_is_a_miss_and_no_content_is_logged(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    node = InMemoryNode(error=KeyError("token-contents"))
    server = bench.server(node)
    peers = bench.peers({"b": server.port})
    assert peers.fetch("b", node.hold("k"), rooms(1, 1000), soon()) == [None]
    wait_until(lambda: server.counters.snapshot().get("handler_errors") == 1)
    said = "".join(capsys.readouterr())
    assert "KeyError" in said
    assert "token-contents" not in said


@pytest.mark.parametrize("block", [0, 1, 3])
def test_a_bit_flipped_on_the_way_makes_that_block_a_miss(bench: Bench, block: int) -> None:
    node = InMemoryNode()
    keys = node.hold(*range(4), length=200_000)
    proxy = bench.proxy(bench.server(node).port)
    peers = bench.peers({"b": proxy.port})
    views = rooms(4, 200_000)
    assert None not in peers.fetch("b", keys, views, soon())  # handshake is over
    proxy.flip_after = proxy.passed + 2000 + block * 200_000
    got = peers.fetch("b", keys, views, soon())
    assert [found is None for found in got] == [index == block for index in range(4)]
    check(keys, got, views)
    assert peers.counters.snapshot()["corrupt_blocks"] == 1
    assert None not in peers.fetch("b", keys, views, soon())


def test_bits_flipped_anywhere_never_give_wrong_bytes(bench: Bench) -> None:
    node = InMemoryNode()
    keys = node.hold(*range(3), length=400)
    proxy = bench.proxy(bench.server(node).port)
    rng = np.random.default_rng(3)
    num_missed = 0
    for _ in range(60):
        peers = bench.peers({"b": proxy.port})
        proxy.flip_after = proxy.passed + int(rng.integers(0, 1800))
        views = rooms(3, 400)
        got = peers.fetch("b", keys, views, Deadline.after(0.3))
        check(keys, got, views)
        num_missed += None in got
        peers.close()
    assert num_missed > 30


def test_a_node_that_stalls_costs_the_deadline_once_and_is_a_suspect_then(bench: Bench) -> None:
    node = InMemoryNode()
    keys = node.hold("k", "l", length=100_000)
    proxy = bench.proxy(bench.server(node).port)
    peers = bench.peers({"b": proxy.port}, suspects=Suspects(first_s=3600))
    assert None not in peers.fetch("b", keys, rooms(2, 100_000), soon())
    proxy.is_stopped = True
    began_s = time.monotonic()
    assert peers.fetch("b", keys, rooms(2, 100_000), Deadline.after(0.3)) == [None, None]
    assert 0.25 < time.monotonic() - began_s < 10
    assert peers.suspects.names() == ("b",)
    proxy.is_stopped = False
    # Left alone for an hour: no connection is tried.
    assert peers.fetch("b", keys, rooms(2, 100_000), soon()) == [None, None]
    assert peers.counters.snapshot()["suspects_skipped"] == 1


def test_a_suspect_is_asked_again_after_its_pause_and_then_trusted(bench: Bench) -> None:
    node = InMemoryNode()
    keys = node.hold("k")
    server = bench.server(node)
    proxy = bench.proxy(server.port)
    peers = bench.peers({"b": proxy.port}, suspects=Suspects(first_s=0.05))
    proxy.part()
    assert peers.fetch("b", keys, rooms(1, 1000), soon()) == [None]
    assert peers.suspects.is_suspect("b")
    proxy.heal()
    wait_until(lambda: None not in peers.fetch("b", keys, rooms(1, 1000), soon()))
    assert not peers.suspects.is_suspect("b")


def test_pauses_of_a_suspect_double_up_to_the_longest() -> None:
    suspects, now, pauses = Suspects(first_s=1, most_s=5), 100.0, []
    for _ in range(5):
        suspects.failed("x", now=now)
        assert not suspects.may_try("x", now=now)
        pause = next(p for p in range(1, 10) if suspects._suspicions["x"].until_s == now + p)
        pauses.append(pause)
        now += pause
        assert suspects.may_try("x", now=now)
        assert not suspects.may_try("x", now=now), "one caller alone may try"
        now += 100
    assert pauses == [1, 2, 4, 5, 5]
    assert suspects.may_try("y", now=now)
    suspects.clear("x")
    assert suspects.may_try("x", now=now)


def test_what_arrived_before_the_other_end_died_counts_and_the_rest_is_a_miss(
    bench: Bench,
) -> None:
    node = InMemoryNode()
    keys = node.hold(*range(10), length=500_000)
    proxy = bench.proxy(bench.server(node).port)
    peers = bench.peers({"b": proxy.port})
    proxy.cut_after = 2_600_000
    views = rooms(10, 500_000)
    got = peers.fetch("b", keys, views, soon())
    check(keys, got, views)
    num_found = sum(found is not None for found in got)
    assert 3 <= num_found <= 5
    assert got[num_found:] == [None] * (10 - num_found)
    wait_until(lambda: node.leases == 0)


def _serve_until_killed(ports: Any) -> None:
    node = InMemoryNode()
    node.hold(*range(64), length=1 << 20)
    server = PeerServer("127.0.0.1", 0, node, NodeIdentity("b", new_incarnation(), "c", b"s"))
    server.start()
    ports.put(server.port)
    time.sleep(120)


def test_a_node_killed_in_the_middle_of_a_transfer_is_a_miss_at_once(bench: Bench) -> None:
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    process = context.Process(target=_serve_until_killed, args=(ports,), daemon=True)
    process.start()
    proxy = bench.proxy(ports.get(timeout=60))
    peers = bench.peers({"b": proxy.port})
    keys = [key(i) for i in range(64)]
    views = rooms(64, 1 << 20)
    assert peers.ping("b", soon()) > 0
    got: list[Any] = []
    start = proxy.passed
    fetching = threading.Thread(
        target=lambda: got.extend(peers.fetch("b", keys, views, Deadline.after(60)))
    )
    # Half way through, the proxy holds still until the process is dead.
    watcher = threading.Thread(target=fetching.start)
    watcher.start()
    wait_until(lambda: proxy.passed - start > 4 << 20)
    proxy.is_stopped = True
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)
    proxy.is_stopped = False
    fetching.join(WAIT_S)
    assert not fetching.is_alive()
    assert len(got) == 64
    assert None in got
    check(keys, got, views)


def test_a_restarted_node_is_noticed_and_its_old_connections_are_not_used(bench: Bench) -> None:
    old, new = InMemoryNode(), InMemoryNode()
    keys = old.hold("k")
    server = bench.server(old, incarnation=7)
    seen: list[tuple[str, int]] = []
    incarnations = Incarnations()
    incarnations.when_newer(lambda *start: seen.append(start))
    peers = bench.peers({"b": server.port}, incarnations=incarnations)
    assert None not in peers.fetch("b", keys, rooms(1, 1000), soon())
    port = server.port
    server.stop()
    bench.server(new, incarnation=8, port=port)
    assert peers.fetch("b", keys, rooms(1, 1000), soon()) == [None]
    assert not peers.suspects.is_suspect("b")
    assert seen == [("b", 7), ("b", 8)]


def test_an_older_incarnation_is_refused_on_both_sides(bench: Bench) -> None:
    node = InMemoryNode()
    keys = node.hold("k")
    server = bench.server(node, incarnation=7)
    newer = bench.peers({"b": server.port}, incarnation=5)
    older = bench.peers({"b": server.port}, incarnation=4)
    assert older.ping("b", soon()) == 7
    assert newer.ping("b", soon()) == 7
    # The connection the older one had open is of no use any more, and no new one is had.
    assert older.fetch("b", keys, rooms(1, 1000), soon()) == [None]
    with pytest.raises(RefusedError, match="older incarnation"):
        older.ping("b", soon())
    assert None not in newer.fetch("b", keys, rooms(1, 1000), soon())
    known = Incarnations()
    known.see("b", 8)
    late = bench.peers({"b": server.port}, "z", incarnations=known)
    assert late.fetch("b", keys, rooms(1, 1000), soon()) == [None]


def test_a_new_start_clears_the_suspicion_against_the_old(bench: Bench) -> None:
    node = InMemoryNode()
    keys = node.hold("k")
    server = bench.server(node, incarnation=7)
    peers = bench.peers({"b": server.port}, suspects=Suspects(first_s=3600))
    peers.ping("b", soon())
    port = server.port
    server.stop()
    assert peers.fetch("b", keys, rooms(1, 1000), soon()) == [None]
    assert peers.suspects.is_suspect("b")
    bench.server(node, incarnation=8, port=port)
    assert peers.ping("b", soon()) == 8
    assert None not in peers.fetch("b", keys, rooms(1, 1000), soon())


@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        ({"cluster": "other"}, "another cluster"),
        ({"secret": b"wrong"}, "secret"),
        ({"secret": b""}, "secret"),
        ({"name": "b"}, "name of this node"),
    ],
)
def test_strangers_are_refused(bench: Bench, difference: dict[str, Any], reason: str) -> None:
    node = InMemoryNode()
    server = bench.server(node)
    stranger = bench.peers({"b": server.port}, **difference)
    with pytest.raises(RefusedError, match=reason):
        stranger.ping("b", soon())
    assert stranger.fetch("b", node.hold("k"), rooms(1, 1000), soon()) == [None]


def test_whoever_does_not_know_the_secret_is_refused_whatever_it_sends_back(bench: Bench) -> None:
    server = bench.server(InMemoryNode())
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        hello = Hello(1, "c", "a", 3, "fetch", b"n" * 16)
        send_frame(sock, hello, soon())
        challenge = recv_frame(sock, Any, soon())  # type: ignore[arg-type]
        # The server's own proof sent back, as if it were the opener's.
        send_frame(sock, ["Proof", challenge[4]], soon())
        assert recv_frame(sock, Any, soon())[:2] == ["Refused", "another secret"]  # type: ignore
    assert server._incarnations.newest("a") == 0


def test_a_server_that_does_not_know_the_secret_is_told_nothing(bench: Bench) -> None:
    impostor = bench.server(InMemoryNode(), secret=b"guess")
    peers = bench.peers({"b": impostor.port})
    with pytest.raises(RefusedError, match="does not know"):
        peers.ping("b", soon())


def test_another_node_at_the_address_is_not_taken_for_the_one_wanted(bench: Bench) -> None:
    server = bench.server(InMemoryNode(), "c")
    with pytest.raises(RefusedError, match="'c' answers at the address of 'b'"):
        bench.peers({"b": server.port}).ping("b", soon())


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge": struct.pack("!I", 0xFFFFFFFF) + b"x" * 100,
    "large hello": struct.pack("!I", 4096) + b"x" * 4096,
    "nothing": struct.pack("!I", 0),
    "other message": struct.pack("!I", 7) + msgspec.msgpack.encode(["Ping", 0]),
    "random": np.random.default_rng(0).bytes(3000),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_port_closes_that_connection_alone(bench: Bench, name: str) -> None:
    node = InMemoryNode()
    keys = node.hold("k")
    server = bench.server(node)
    peers = bench.peers({"b": server.port})
    assert None not in peers.fetch("b", keys, rooms(1, 1000), soon())
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as sock:
        sock.sendall(GARBAGE[name])
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert None not in peers.fetch("b", keys, rooms(1, 1000), soon())
    assert server.counters.snapshot()["bad_frames"] == 1


def test_silent_strangers_are_hung_up_on_and_do_not_use_up_the_server(bench: Bench) -> None:
    node = InMemoryNode()
    keys = node.hold("k")
    server = bench.server(node, limits=ServerLimits(handshakes=3, handshake_s=0.3))
    silent = [socket.create_connection(("127.0.0.1", server.port), WAIT_S) for _ in range(10)]
    for sock in silent:
        assert sock.recv(1) == b""
        sock.close()
    peers = bench.peers({"b": server.port})
    assert None not in peers.fetch("b", keys, rooms(1, 1000), soon())
    counts = server.counters.snapshot()
    assert counts["connections_turned_away"] >= 1
    assert counts["connections_turned_away"] + counts["connections_timed_out"] == 10


def _hostile(answers: Callable[[socket.socket], None]) -> Any:
    """A node that knows the secret and then misbehaves."""

    class Misbehaving(PeerServer):
        def _answer_all(self, sock: socket.socket, node: str, incarnation: int) -> None:
            recv_frame(sock, Any, soon())  # type: ignore[arg-type]
            answers(sock)
            time.sleep(0.2)

    return Misbehaving


BAD_ANSWERS: dict[str, Any] = {
    "too few": lambda: Blocks([]),
    "another block": lambda: Blocks([info(key("other"), 10), None]),
    "longer than its room": lambda: Blocks([info(key("k"), 2000), None]),
    "of no length": lambda: Blocks([msgspec.structs.replace(info(key("k"), 10), length=0), None]),
    "negative length": lambda: Blocks(
        [msgspec.structs.replace(info(key("k"), 10), length=-5), None]
    ),
    "not blocks": lambda: Ping(0),
    "not a message": lambda: {"a": [1, 2, 3]},
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_peer_that_answers_nonsense_gets_nothing_written(bench: Bench, name: str) -> None:
    kind = _hostile(lambda sock: send_frame(sock, BAD_ANSWERS[name](), soon()))
    server = kind("127.0.0.1", 0, InMemoryNode(), NodeIdentity("b", 7, "c", b"s"))
    server.start()
    bench.closers.append(server.stop)
    peers = bench.peers({"b": server.port})
    views = rooms(2, 1000)
    assert peers.fetch("b", [key("k"), key("l")], views, soon()) == [None, None]
    assert [bytes(view) for view in views] == [bytes(1000)] * 2
    assert peers.suspects.is_suspect("b")


def test_a_request_beyond_the_bounds_ends_its_connection(bench: Bench) -> None:
    node = InMemoryNode()
    server = bench.server(node)
    peers = bench.peers({"b": server.port}, suspects=Suspects(first_s=0))
    bad = [
        Fetch([key(1)] * (MAX_BLOCKS + 1), [1] * (MAX_BLOCKS + 1), 1.0),
        Fetch([b"short"], [1], 1.0),
        Fetch([key(1)], [1, 2], 1.0),
        Fetch([key(1)], [1], float("nan")),
        Fetch([key(1)], [1], float("inf")),
        Fetch([key(1)], [1], -1.0),
        Announce(1, 1, [], [Removal(b"x", "memory")]),
    ]
    for request in bad:
        with pytest.raises(StoreError):
            peers.ask("b", "control", request, Blocks, soon())
    wait_until(lambda: server.counters.snapshot().get("bad_frames") == len(bad))
    assert peers.ping("b", soon()) == 7


def test_a_put_of_impossible_blocks_is_refused_before_room_is_asked_for(bench: Bench) -> None:
    asked = []

    class Watching(InMemoryNode):
        def receive_region(self, *what: Any) -> Any:
            asked.append(what)
            return super().receive_region(*what)

    peers = bench.peers({"b": bench.server(Watching()).port}, suspects=Suspects(first_s=0))
    good = info(key(1), 10)
    for change in (
        {"key": b"short"},
        {"parent": b"x"},
        {"index": -1},
        {"depth": 2**40},
        {"tenant": b"t"},
        {"crc": -1},
    ):
        bad = msgspec.structs.replace(good, **change)
        assert peers.put("b", [bad], [content(good.key, 10)], True, soon()) == 0
    assert asked == []
    assert peers.put("b", [good], [content(good.key, 10)], True, soon()) == 1


def test_a_closing_node_ends_requests_under_way(bench: Bench) -> None:
    gate = threading.Event()
    node = InMemoryNode(before_open=lambda: gate.wait(WAIT_S))
    keys = node.hold("k")
    peers = bench.peers({"b": bench.server(node).port})
    got: list[Any] = []
    fetching = threading.Thread(
        target=lambda: got.append(peers.fetch("b", keys, rooms(1, 1000), Deadline.after(300)))
    )
    fetching.start()
    wait_until(lambda: any(lane.busy for lane in peers.connections._lanes.values()))
    peers.close()
    fetching.join(WAIT_S)
    assert got == [[None]]
    gate.set()
    assert peers.fetch("b", keys, rooms(1, 1000), soon()) == [None]


def test_all_connections_taken_is_a_miss_and_no_suspicion(bench: Bench) -> None:
    gate = threading.Event()
    node = InMemoryNode(before_open=lambda: gate.wait(WAIT_S))
    keys = node.hold("k")
    peers = bench.peers({"b": bench.server(node).port})
    threads = [
        threading.Thread(target=peers.fetch, args=("b", keys, rooms(1, 1000), soon()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(len(lane.busy) for lane in peers.connections._lanes.values()) == 4)
    assert peers.fetch("b", keys, rooms(1, 1000), Deadline.after(0.05)) == [None]
    assert not peers.suspects.is_suspect("b")
    assert peers.counters.snapshot()["connections_taken"] == 1
    gate.set()
    for thread in threads:
        thread.join(WAIT_S)


def test_a_dropped_node_does_not_break_a_transfer_under_way(bench: Bench) -> None:
    peers: Peers
    node = InMemoryNode(before_open=lambda: peers.drop("b"))
    keys = node.hold("k", length=300_000)
    peers = bench.peers({"b": bench.server(node).port})
    views = rooms(1, 300_000)
    got = peers.fetch("b", keys, views, soon())
    assert None not in got
    check(keys, got, views)
    assert peers.fetch("b", keys, views, soon()) == [None]


def test_an_incarnation_grows_even_if_the_clock_was_set_back() -> None:
    first = new_incarnation()
    assert new_incarnation(first) > first
    assert new_incarnation(first + 10**18) == first + 10**18 + 1


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "ä", "a\n"])
def test_a_bad_node_name_is_a_clear_error(name: str) -> None:
    with pytest.raises(StoreSetupError, match="node name"):
        NodeIdentity(name, 1)


def test_a_secret_is_not_shown() -> None:
    assert "hush" not in repr(NodeIdentity("a", 1, secret=b"hush"))


def test_a_taken_port_is_a_clear_error(bench: Bench) -> None:
    server = bench.server(InMemoryNode())
    second = PeerServer("127.0.0.1", server.port, InMemoryNode(), NodeIdentity("d", 1))
    with pytest.raises(StoreSetupError, match="cannot listen"):
        second.start()


# Announcements


@dataclass
class Channel:
    """Announcements straight from an announcer to a directory, with losses on demand."""

    sender: InMemoryNode = field(default_factory=InMemoryNode)
    receiver: InMemoryNode = field(default_factory=InMemoryNode)
    is_down: bool = False
    incarnation: int = 1
    counters: PeerCounters = field(default_factory=PeerCounters)

    def __post_init__(self) -> None:
        self.sync = DirectorySync(self.receiver, self._page, self.counters)
        self.announcer = Announcer(self._send, self.counters, most_waiting=50)
        self.sync.start()

    def _send(self, node: str, announce: Announce, deadline: Deadline) -> None:
        if self.is_down:
            raise StoreError("down")
        self.sync.receive("s", self.incarnation, announce)

    def _page(self, node: str, after: bytes, limit: int, deadline: Deadline) -> tuple[int, Page]:
        if self.is_down:
            raise StoreError("down")
        last = self.announcer.last
        return self.incarnation, Page(self.sender.directory_page(after, 7), last)

    def change(self, add: list[bytes], remove: list[bytes]) -> None:
        added = [announcement(one) for one in add]
        for one in added:
            self.sender.holdings[one.key, one.tier] = one
        for gone in remove:
            self.sender.holdings.pop((gone, "memory"), None)
        self.announcer.announce(added, [Removal(gone, "memory") for gone in remove])

    def is_equal(self) -> bool:
        return self.receiver.told.get("s", {}) == self.sender.holdings

    def close(self) -> bool:
        return self.announcer.close(soon()) and self.sync.close(soon())


@pytest.fixture
def channel(bench: Bench) -> Channel:
    channel = Channel()
    bench.closers.append(channel.close)
    return channel


def test_a_node_that_joins_late_reads_all_holdings_page_by_page(channel: Channel) -> None:
    channel.change([key(i) for i in range(100)], [])
    channel.announcer.add_node("r")
    channel.sync.joined("s", 1)
    wait_until(channel.is_equal)
    channel.change([key("new")], [key(i) for i in range(50)])
    wait_until(channel.is_equal)
    assert channel.counters.snapshot() == {"directories_read": 1}


def test_announcements_lost_by_a_full_queue_lead_to_one_reading(channel: Channel) -> None:
    channel.announcer.add_node("r")
    channel.sync.joined("s", 1)
    wait_until(lambda: channel.sync.is_in_step("s"))
    channel.change([key(i) for i in range(20)], [])
    wait_until(channel.is_equal)
    channel.is_down = True
    for i in range(100):
        channel.change([key(f"more{i}")], [key(i)])
    assert channel.counters.snapshot()["announcements_dropped"] > 0
    channel.is_down = False
    wait_until(channel.is_equal)
    wait_until(lambda: channel.sync.is_in_step("s"))
    counts = channel.counters.snapshot()
    assert counts["announcement_gaps"] == 1
    assert counts["directories_read"] == 2


def test_changes_during_a_reading_are_not_undone_by_older_pages(channel: Channel) -> None:
    keys = sorted(key(i) for i in range(40))
    channel.change(keys, [])
    channel.announcer.add_node("r")
    num_pages = 0

    def change_meanwhile(after: bytes) -> None:
        nonlocal num_pages
        num_pages += 1
        if num_pages == 3:
            # Of what was read already, what is about to be read, and new on both sides.
            channel.change([bytes(32), b"\xff" * 32], [keys[0], keys[39]])
            channel.change([keys[0]], [keys[1]])
            wait_until(lambda: (b"\xff" * 32, "memory") in channel.receiver.told["s"])

    channel.sender.before_page = change_meanwhile
    channel.sync.joined("s", 1)
    wait_until(lambda: channel.counters.snapshot().get("directories_read") == 1)
    assert channel.is_equal()
    assert num_pages == 7


def test_what_was_known_stays_known_during_a_reading(channel: Channel) -> None:
    keys = [key(i) for i in range(40)]
    channel.change(keys, [])
    channel.announcer.add_node("r")
    channel.sync.joined("s", 1)
    wait_until(lambda: channel.sync.is_in_step("s"))
    sizes = []
    channel.sender.before_page = lambda after: sizes.append(len(channel.receiver.told["s"]))
    channel.sync.joined("s", 1)
    wait_until(lambda: channel.counters.snapshot()["directories_read"] == 2)
    assert set(sizes) == {40}


def test_stale_copies_are_void_after_a_reading(channel: Channel) -> None:
    channel.receiver.told["s"] = {(key("stale"), "memory"): announcement(key("stale"))}
    channel.change([key("right")], [])
    channel.sync.joined("s", 1)
    wait_until(channel.is_equal)


def test_heartbeats_alone_show_that_the_last_announcement_was_lost(channel: Channel) -> None:
    channel.sync.joined("s", 1)
    wait_until(lambda: channel.sync.is_in_step("s"))
    channel.change([key(1)], [])  # nobody was added: it is lost
    channel.sync.heard("s", 1, channel.announcer.last)
    assert channel.sync.is_in_step("s")  # may be under way
    channel.sync.heard("s", 1, channel.announcer.last)
    wait_until(channel.is_equal)


def test_frames_of_an_older_incarnation_change_nothing(channel: Channel) -> None:
    channel.incarnation = 2
    channel.sync.joined("s", 2)
    wait_until(lambda: channel.sync.is_in_step("s"))
    channel.sync.receive("s", 1, Announce(1, 1, [announcement(key("old"))], []))
    assert channel.receiver.told["s"] == {}


def test_a_reading_that_breaks_off_is_begun_again(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.store.peer_sync.RETRY_S", 0.05)
    channel.change([key(i) for i in range(30)], [])

    def break_off(after: bytes) -> None:
        if after:
            channel.sender.before_page = lambda after: None
            raise StoreError("broken off")

    channel.sender.before_page = break_off
    channel.sync.joined("s", 1)
    wait_until(channel.is_equal)
    assert channel.counters.snapshot()["directory_readings_broken"] == 1


def test_random_changes_losses_and_restarts_end_in_equal_directories(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.store.peer_sync.RETRY_S", 0.02)
    monkeypatch.setattr("runtime.store.peer_announcer.RETRY_S", 0.02)
    rng = np.random.default_rng(11)
    channel.announcer.add_node("r")
    channel.sync.joined("s", 1)
    for step in range(300):
        add, remove = rng.integers(0, 60, 3), rng.integers(0, 60, 3)
        gone = [key(i) for i in remove]
        channel.change([key(i) for i in add if i not in remove], gone)
        if step % 20 == 0:
            channel.is_down = bool(rng.integers(0, 2))
        if step % 90 == 0:
            channel.announcer.drop_node("r")
            channel.announcer.add_node("r")
        if step % 50 == 0:
            time.sleep(0.02)
    channel.is_down = False
    channel.change([key("last")], [])
    wait_until(channel.is_equal)


def test_a_slow_node_does_not_hold_up_whoever_announces() -> None:
    gate = threading.Event()

    def send(node: str, announce: Announce, deadline: Deadline) -> None:
        gate.wait(WAIT_S)

    announcer = Announcer(send, PeerCounters())
    announcer.add_node("slow")
    for i in range(100):
        announcer.announce([announcement(key(i))])
    assert announcer.last == 100
    gate.set()
    assert announcer.close(soon())


def test_a_fault_that_repeats_is_logged_once_a_minute() -> None:
    seldom = Seldom(60.0)
    assert [seldom.may_say("a", now=now) for now in (0.0, 1.0, 59.0, 60.0, 61.0)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert seldom.may_say("b", now=61.0)


def test_a_stranger_that_keeps_trying_does_not_fill_the_log(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    server = bench.server(InMemoryNode())
    stranger = bench.peers({"b": server.port}, secret=b"wrong", cluster="other")
    for _ in range(30):
        with pytest.raises(RefusedError):
            stranger.ping("b", soon())
    wait_until(lambda: server.counters.snapshot()["handshakes_refused"] == 30)
    assert "".join(capsys.readouterr()).count("peer refused") == 1


def test_identity_fields_are_checked() -> None:
    good = NodeIdentity("a", 1)
    with pytest.raises(StoreSetupError, match="incarnation"):
        dataclasses.replace(good, incarnation=0)
