"""One-sided reads through NIXL over TCP on loopback, and the memory they land in."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.peer_client import Peers
from runtime.store.peer_identity import NodeIdentity, new_incarnation
from runtime.store.peer_server import PeerServer
from runtime.store.transport_landing import LandingMemory, Span
from tests.runtime.store.peer_nodes import WAIT_S, InMemoryNode, content, key, soon, wait_until

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 12


def has_nixl() -> bool:
    return any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13"))


needs_nixl = pytest.mark.skipif(not has_nixl(), reason="the package nixl is not installed")


def test_spans_do_not_overlap_and_are_given_out_again() -> None:
    landing = LandingMemory(100)
    first, second = landing.take(60, soon()), landing.take(40, soon())
    assert (first, second) == (Span(0, 60), Span(60, 40))
    assert landing.take(1, Deadline.after(0)) is None
    landing.give_back(Span(0, 60))
    assert landing.take(30, soon()) == Span(0, 30)
    assert landing.take(30, soon()) == Span(30, 30)
    assert landing.take(101, soon()) is None


def test_what_a_stuck_read_may_write_to_is_kept_until_it_has_ended() -> None:
    landing = LandingMemory(100)
    span = landing.take(100, soon())
    assert span is not None
    is_over = threading.Event()
    landing.keep_back(span, is_over.is_set)
    assert landing.stuck_bytes == 100
    assert landing.take(1, Deadline.after(0.1)) is None
    is_over.set()
    assert landing.take(100, soon()) == span
    assert landing.stuck_bytes == 0


def test_a_waiting_read_gets_the_span_that_is_given_back() -> None:
    landing = LandingMemory(100)
    span = landing.take(100, soon())
    assert span is not None
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(landing.take(50, soon())))
    waiting.start()
    landing.give_back(span)
    waiting.join(WAIT_S)
    assert got == [Span(0, 50)]


@pytest.mark.skipif(has_nixl(), reason="the package nixl is installed")
def test_without_the_package_the_reason_is_given() -> None:
    from runtime.store.transport_nixl import NixlTransport

    identity = NodeIdentity("a", 1)
    with pytest.raises(StoreSetupError, match="NIXL is not installed"):
        NixlTransport(identity, Peers(identity))


def use_loopback() -> None:
    os.environ.update(UCX_TLS="tcp,self", UCX_NET_DEVICES="lo")


def _own(port: int, incarnation: int, ports: Any, orders: Any, answers: Any) -> None:
    """A node whose blocks lie in a registered arena, but for one that lies elsewhere."""
    use_loopback()
    from runtime.store.transport_nixl import NixlTransport

    identity = NodeIdentity("owner", incarnation, "c", b"s")
    node = InMemoryNode()
    arena = memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES))
    for index in range(NUM_BLOCKS):
        block_key = key(index)
        data = content(block_key, BLOCK_BYTES)
        view = arena[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        view[:] = data
        if index == 5:
            view = memoryview(data)
        node.blocks[block_key] = (
            BlockInfo(block_key, b"", key(0), index, index, BLOCK_BYTES, checksum(data)),
            view,
        )
    transport = NixlTransport(identity, Peers(identity), arena)
    server = PeerServer("127.0.0.1", port, node, identity, memory=transport)
    server.start()
    ports.put(server.port)
    while True:
        order = orders.get(timeout=300)
        if order == "damage" or order == "mend":
            arena[2 * BLOCK_BYTES + 77] ^= 1
        answers.put((node.leases, server.counters.snapshot()))


class Owner:
    def __init__(self, port: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        ports, self.orders, self.answers = context.Queue(), context.Queue(), context.Queue()
        self.process = context.Process(
            target=_own, args=(port, new_incarnation(), ports, self.orders, self.answers),
            daemon=True,
        )  # fmt: skip
        self.process.start()
        self.port: int = ports.get(timeout=120)

    def ask(self, order: str) -> tuple[int, dict[str, int]]:
        self.orders.put(order)
        answer: tuple[int, dict[str, int]] = self.answers.get(timeout=60)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


@pytest.fixture
def reader(owner: Owner) -> Iterator[tuple[Peers, Any]]:
    use_loopback()
    from runtime.store.transport_nixl import NixlTransport

    identity = NodeIdentity("reader", new_incarnation(), "c", b"s")
    peers = Peers(identity)
    peers.add("owner", "127.0.0.1", owner.port)
    # Smaller than what is read, so that several batches are under way.
    transport = NixlTransport(identity, peers, landing_bytes=10 * BLOCK_BYTES)
    yield peers, transport
    transport.close()
    peers.close()


def rooms(count: int) -> list[memoryview]:
    return [memoryview(bytearray(BLOCK_BYTES)) for _ in range(count)]


@needs_nixl
def test_blocks_read_one_sided_equal_the_stored_ones(
    owner: Owner, reader: tuple[Peers, Any]
) -> None:
    peers, transport = reader
    keys = [*(key(index) for index in range(NUM_BLOCKS)), key("absent")]
    views = rooms(NUM_BLOCKS + 1)
    for _ in range(3):
        got = transport.fetch("owner", keys, views, Deadline.after(60))
        assert [found is not None for found in got] == [True] * NUM_BLOCKS + [False]
        for one, view in zip(keys[:-1], views, strict=False):
            assert bytes(view) == content(one, BLOCK_BYTES)
        for view in views:
            view[:] = bytes(BLOCK_BYTES)
    # The one that is not in the arena came over TCP, the others did not; no lease is left.
    wait_until(lambda: (owner.ask("count")[0], owner.ask("count")[1]["sent_blocks"]) == (0, 3))
    assert peers.counters.snapshot()["read_blocks"] == 3 * (NUM_BLOCKS - 1)


@needs_nixl
def test_a_byte_that_changed_under_the_lease_is_a_miss(
    owner: Owner, reader: tuple[Peers, Any]
) -> None:
    _, transport = reader
    keys = [key(index) for index in range(4)]
    owner.ask("damage")
    got = transport.fetch("owner", keys, rooms(4), Deadline.after(60))
    assert [found is not None for found in got] == [True, True, False, True]
    owner.ask("mend")
    assert None not in transport.fetch("owner", keys, rooms(4), Deadline.after(60))


@needs_nixl
def test_an_owner_that_stops_ends_the_read_by_its_deadline(
    owner: Owner, reader: tuple[Peers, Any]
) -> None:
    import signal

    peers, transport = reader
    keys = [key(index) for index in range(NUM_BLOCKS) if index != 5]
    assert None not in transport.fetch("owner", keys, rooms(len(keys)), Deadline.after(60))
    assert owner.process.pid is not None
    stopped = threading.Event()
    finish: Callable[..., None] = transport._finish

    def stop_first(*what: Any) -> None:
        if not stopped.is_set():
            stopped.set()
            os.kill(owner.process.pid or 0, signal.SIGSTOP)
        finish(*what)

    transport._finish = stop_first
    try:
        began_s = time.monotonic()
        got = transport.fetch("owner", keys, rooms(len(keys)), Deadline.after(1.0))
        assert time.monotonic() - began_s < 30
        assert None in got
        assert peers.suspects.is_suspect("owner")
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)


@needs_nixl
def test_a_restarted_owner_is_read_at_its_new_addresses(
    owner: Owner, reader: tuple[Peers, Any]
) -> None:
    _, transport = reader
    keys = [key(index) for index in range(4)]
    assert None not in transport.fetch("owner", keys, rooms(4), Deadline.after(60))
    owner.close()
    again = Owner(owner.port)
    try:
        deadline = Deadline.after(60)
        views = rooms(4)
        while None in transport.fetch("owner", keys, views, Deadline.after(20)):
            assert not deadline.is_over
            time.sleep(0.1)
        assert [bytes(view) for view in views] == [content(one, BLOCK_BYTES) for one in keys]
    finally:
        again.close()


@needs_nixl
def test_an_owner_without_readable_memory_is_read_over_tcp() -> None:
    use_loopback()
    from runtime.store.transport_nixl import NixlTransport

    node = InMemoryNode()
    keys = node.hold("x", "y", length=BLOCK_BYTES)
    server = PeerServer("127.0.0.1", 0, node, NodeIdentity("plain", 1, "c", b"s"))
    server.start()
    identity = NodeIdentity("reader", new_incarnation(), "c", b"s")
    peers = Peers(identity)
    peers.add("plain", "127.0.0.1", server.port)
    transport = NixlTransport(identity, peers, landing_bytes=8 * BLOCK_BYTES)
    views = rooms(2)
    try:
        assert None not in transport.fetch("plain", keys, views, soon())
        assert [bytes(view) for view in views] == [content(one, BLOCK_BYTES) for one in keys]
    finally:
        transport.close()
        peers.close()
        server.stop()


@needs_nixl
def test_a_plug_in_that_is_not_there_is_named() -> None:
    from runtime.store.transport_nixl import NixlTransport

    identity = NodeIdentity("a", 1)
    with pytest.raises(StoreSetupError, match="NO_SUCH"):
        NixlTransport(identity, Peers(identity), backends=["NO_SUCH"])
