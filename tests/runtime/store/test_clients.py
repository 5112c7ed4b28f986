"""Clients that fork, close early, err, or meet a server that errs: misses, never wrong bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.store import messages
from runtime.store.arena import SharedArena
from runtime.store.async_store import AsyncStore
from runtime.store.blocks import BlockInfo, checksum
from runtime.store.config import StoreConfig
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreUnavailableError
from runtime.store.link import Offered, SlotOfBlock
from runtime.store.local_link import LocalLink
from runtime.store.node import StoreNode
from runtime.store.store import PrefixStore, connect, open_store
from runtime.store.unix_server import UnixServer
from tests.runtime.store.conftest import BLOCK, block, blocks, chain

SOON = 10.0
Open = Callable[..., PrefixStore]


class Served:
    """A node with a server in this process."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        given: dict[str, Any] = {
            "folder": folder,
            "dram_bytes": 64 * BLOCK,
            "block_bytes": BLOCK,
            "eviction": "lru",
        }
        self.node = StoreNode(StoreConfig(**(given | changes)))
        self.path = folder / "store.sock"
        self.server = UnixServer(self.node, self.path)
        self.server.start()

    def stop(self) -> None:
        self.server.stop(Deadline.after(5))
        self.node.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def serve(**changes: Any) -> Served:
        started.append(Served(tmp_path / f"s{len(started)}", **changes))
        return started[-1]

    yield serve
    for one in started:
        one.stop()


@pytest.fixture(params=["library", "socket"])
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, served: Callable[..., Served]
) -> Iterator[Open]:
    """Stores of either kind."""
    stores: list[PrefixStore] = []

    def open_one(**changes: Any) -> PrefixStore:
        if request.param == "socket":
            stores.append(connect(served(**changes).path))
        else:
            config = StoreConfig(
                folder=tmp_path / f"l{len(stores)}",
                **({"dram_bytes": 64 * BLOCK, "block_bytes": BLOCK, "eviction": "lru"} | changes),
            )
            stores.append(PrefixStore(LocalLink(StoreNode(config), is_owner=True)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


class Child:
    """A forked child that runs a function and tells its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(30)
            try:
                said = json.dumps(work())
            except BaseException:
                said = json.dumps({"raised": traceback.format_exc()})
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        self._reading = reading

    def result(self) -> Any:
        with os.fdopen(self._reading, "rb") as file:
            said = file.read()
        _, status = os.waitpid(self.pid, 0)
        assert status == 0
        return json.loads(said)


class Gate:
    """What a parent opens for its child."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def open(self) -> None:
        os.write(self._writing, b"x")

    def wait(self) -> None:
        os.read(self._reading, 1)


def wrong_blocks(store: PrefixStore, keys: list[bytes], rounds: int) -> int:
    """Loads of both kinds; blocks that were missing or had other bytes."""
    wrong = 0
    targets = [bytearray(BLOCK) for _ in keys]
    for _ in range(rounds):
        with store.load(keys, deadline_s=SOON) as found:
            got = [bytes(view) for view in found.views]
        wrong += sum(a != b for a, b in zip(got, blocks(keys), strict=False))
        wrong += len(keys) - len(got)
        count = store.load_into(keys, targets, deadline_s=SOON)
        wrong += sum(bytes(targets[i]) != block(keys[i]) for i in range(count))
        wrong += len(keys) - count
    return wrong


# --- forks -------------------------------------------------------------------------------------


def test_parent_and_forked_child_each_get_their_own_answers(
    served: Callable[..., Served],
) -> None:
    one = served()
    store, mine, its = connect(one.path), chain("a", 4), chain("b", 4)
    for keys in (mine, its):
        assert store.put(keys, blocks(keys)).stored == 4
    start = Gate()

    def work() -> Any:
        start.wait()
        wrong = wrong_blocks(store, its, 150)
        new = chain("c", 2)
        put = store.put(new, blocks(new))
        return [wrong, put.stored, dict(store.counters.all())]

    child = Child(work)
    start.open()
    assert wrong_blocks(store, mine, 150) == 0
    assert child.result() == [0, 2, {}]
    assert store.lookup(chain("c", 2)) == 2
    assert dict(store.counters.all()) == {}
    store.close()


def test_a_fork_in_the_middle_of_a_call_of_another_thread_blocks_nobody(opened: Open) -> None:
    store, keys = opened(), chain("a", 2)
    store.put(keys, blocks(keys))
    lock = getattr(store._link, "_lock", None) or store._link._calls._changed  # type: ignore[attr-defined]
    with lock, store.counters._lock:  # as if others held them
        child = Child(lambda: [store.lookup(keys), store.stats()["client"], store.close()])
    found = child.result()
    assert found in ([2, {}, None], [0, {"unavailable": 2}, None])
    assert wrong_blocks(store, keys, 1) == 0


def test_what_a_parent_holds_ends_with_it_though_its_child_lives(
    served: Callable[..., Served],
) -> None:
    one = served()
    store, keys, end = connect(one.path), chain("a", 3), Gate()
    store.put(keys, blocks(keys))
    held = store.load(keys)
    child = Child(end.wait)  # never uses the store
    # As if the parent were killed: its descriptors go, without a word.
    for sock in list(store._link._sockets):  # type: ignore[attr-defined]
        sock.close()
    deadline = time.monotonic() + SOON
    while one.node.gauges()["leases"] or one.server.num_sessions:
        assert time.monotonic() < deadline, "the child keeps its parent's session alive"
        time.sleep(0.01)
    end.open()
    child.result()
    held.close()
    store.close()


def test_a_child_that_ends_its_inheritance_ends_nothing_of_its_parents(
    served: Callable[..., Served],
) -> None:
    one = served()
    store, keys = connect(one.path), chain("a", 3)
    store.put(keys, blocks(keys))
    held = store.load(keys)
    with store.reserve(chain("b", 2), [BLOCK] * 2) as room:

        def work() -> Any:
            stored = room.commit()
            room.close()
            held.close()
            store.close()
            return [stored, store.lookup(keys), store.put(keys, blocks(keys)).reason]

        assert Child(work).result() == [0, 0, "unavailable"]
        gauges = one.node.gauges()
        assert (gauges["leases"], gauges["reservations"]) == (1, 1)
        assert room.commit() == 2
    assert [bytes(view) for view in held.views] == blocks(keys)
    held.close()
    assert store.lookup(chain("b", 2)) == 2
    store.close()


def test_a_fork_leaves_a_store_in_this_process_to_the_parent(tmp_path: Path) -> None:
    keys, settings = chain("a", 3), {"dram": 16 * BLOCK, "block_bytes": BLOCK, "ssd": "4MiB"}
    store = open_store(tmp_path / "s", **settings)  # type: ignore[arg-type]
    assert store.put(keys, blocks(keys)).stored == 3
    held, end = store.load(keys), Gate()
    ready_reading, ready_writing = os.pipe()

    def work() -> Any:
        got: list[Any] = [store.lookup(keys), store.load(keys).leading]
        got += [store.load_into(keys, [bytearray(BLOCK) for _ in keys])]
        got += [store.put(chain("b", 1), blocks(chain("b", 1))).reason]
        got += [store.flush(), store.stats()["client"]["unavailable"]]
        with store.reserve(chain("b", 1), [BLOCK]) as room:
            got += [len(room.buffers), room.commit()]
        held.close()
        start = time.monotonic()
        store.close()
        got += [time.monotonic() - start < 5]
        os.write(ready_writing, b"x")
        end.wait()  # the parent closes and opens the folder again meanwhile
        return got

    child = Child(work)
    os.read(ready_reading, 1)
    assert store._link.arena.path.exists()
    gauges = store.stats()["gauges"]
    assert (gauges["leases"], gauges["reservations"]) == (1, 0)
    held.close()
    assert store.lookup(keys) == 3
    assert store.put(chain("c", 1), blocks(chain("c", 1)), durable=True).stored == 1
    store.close()
    with open_store(tmp_path / "s", **settings) as again:  # type: ignore[arg-type]
        assert wrong_blocks(again, keys, 1) == 0
        assert again.lookup(chain("c", 1)) == 1
    end.open()
    assert child.result() == [0, 0, 0, "unavailable", False, 6, 0, 0, True]


def test_a_child_keeps_no_lock_of_a_parent_that_was_killed(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def work() -> None:
        store = open_store(tmp_path / "s", dram=16 * BLOCK, block_bytes=BLOCK, ssd="4MiB")
        store.put(chain("a", 2), blocks(chain("a", 2)))
        if os.fork() == 0:
            signal.alarm(30)
            os.write(writing, str(os.getpid()).encode())
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        work()
    os.waitpid(pid, 0)
    grandchild = int(os.read(reading, 100))
    try:
        with open_store(tmp_path / "s", dram=16 * BLOCK, block_bytes=BLOCK, ssd="4MiB") as store:
            assert wrong_blocks(store, chain("a", 2), 1) == 0
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_forked_server_takes_nothing_from_its_parent(served: Callable[..., Served]) -> None:
    one = served()
    store, keys = connect(one.path), chain("a", 2)
    store.put(keys, blocks(keys))
    assert Child(lambda: one.server.stop(Deadline.after(1))).result() is None
    assert wrong_blocks(store, keys, 1) == 0
    with connect(one.path) as other:
        assert other.lookup(keys) == 2
    store.close()


def test_an_async_store_has_threads_in_a_forked_child_too(served: Callable[..., Served]) -> None:
    keys = chain("a", 2)

    async def put_and_look_up(store: AsyncStore) -> int:
        await store.put(keys, blocks(keys))
        return await store.lookup(keys)

    store = AsyncStore(connect(served().path))
    assert asyncio.run(put_and_look_up(store)) == 2
    assert Child(lambda: asyncio.run(put_and_look_up(store))).result() == 2
    asyncio.run(store.close())


# --- answers that are none ---------------------------------------------------------------------


class _Offers:
    """A link to a memory of which it offers what it is told to."""

    def __init__(self, folder: Path, held: Sequence[bytes]) -> None:
        folder.mkdir()
        self.arena = SharedArena.create(
            folder / "arena", slot_bytes=BLOCK, num_slots=8, folder=folder
        )
        self.offered = []
        self.released: list[int] = []
        for slot, key in enumerate(held):
            self.arena.slot(slot)[:] = block(key)
            info = BlockInfo(key, b"", held[0], slot, slot, BLOCK, checksum(block(key)))
            generation = self.arena.table.generation(slot)
            self.offered.append(SlotOfBlock(slot, generation, info))

    def load(self, *_: Any) -> Offered:
        return Offered(7, self.offered, self.arena)

    def release(self, lease_id: int) -> None:
        self.released.append(lease_id)


def test_a_block_that_was_not_asked_for_ends_the_prefix(tmp_path: Path) -> None:
    mine, others = chain("a", 4), chain("b", 4)
    link = _Offers(tmp_path / "s", [*mine[:2], *others[2:]])
    store = PrefixStore(link)  # type: ignore[arg-type]
    with store.load(mine) as found:
        assert [bytes(view) for view in found.views] == blocks(mine[:2])
    assert store.load_into(mine, [bytearray(BLOCK) for _ in mine]) == 2
    with store.load(mine[:1]) as found:
        assert found.leading == 1  # more than were asked for
    with store.load(others) as found:
        assert found.leading == 0
    assert link.released == [7] * 4
    link.arena.close()


def framed(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(body)) + body


INFO = BlockInfo(bytes(32), b"", bytes(32), 0, 0, 10, 0)
WRONG_ANSWERS = {
    "length": struct.pack("!I", 0xFFFFFFFF) + b"zzz",
    "empty": struct.pack("!I", 0),
    "message": struct.pack("!I", 3) + b"\xc1\xc1\xc1",
    "nobody": b"",
    "half": struct.pack("!I", 100) + b"x",
    "text": framed(messages.Text("not json")),
    "list": framed(messages.Text("[1]")),
    "slot": framed(messages.Offer(1, [(999_999, 0, INFO)])),
    "below": framed(messages.Offer(1, [(-1, 0, INFO)])),
    "long": framed(messages.Offer(1, [(0, 0, msgspec.structs.replace(INFO, length=BLOCK + 1))])),
    "negative": framed(messages.Offer(1, [(0, 0, msgspec.structs.replace(INFO, length=-1))])),
    "unleased": framed(messages.Offer(0, [(0, 0, INFO)])),
    "many": framed(messages.Offer(1, [(0, 0, INFO), (1, 0, INFO)])),
    "room": framed(messages.Room(1, 0, [4], "")),
    "room below": framed(messages.Room(1, 0, [-1], "")),
    "rooms": framed(messages.Room(1, 0, [0, 1], "")),
    "start": framed(messages.Room(1, 5, [], "")),
    "count": framed(messages.Count(1_000)),
    "welcome": framed(messages.Welcome("/dev/null", "x", 1)),
}


class WrongServer:
    """Greets well and then answers every request with the same bytes."""

    def __init__(self, folder: Path, answer: bytes) -> None:
        folder.mkdir()
        self.path, self.connections = folder / "s.sock", 0
        self._answer = answer
        self._arena = SharedArena.create(
            folder / "arena", slot_bytes=BLOCK, num_slots=4, folder=folder
        )
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(self.path))
        self._listener.listen(20)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):
            answer = framed(messages.Welcome(os.fspath(self._arena.path), "x", 1))
            while head := sock.recv(4, socket.MSG_WAITALL):
                sock.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL)
                sock.sendall(answer)
                if not self._answer:
                    return
                answer = self._answer

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._arena.close(is_removed=True)


@pytest.mark.parametrize("answer", WRONG_ANSWERS)
def test_an_answer_that_is_none_makes_the_server_unavailable(tmp_path: Path, answer: str) -> None:
    server = WrongServer(tmp_path / "s", WRONG_ANSWERS[answer])
    store, key, wait = connect(server.path), bytes(32), 0.05
    verbs: dict[str, Callable[[], Any]] = {
        "lookup": lambda: store.lookup([key], deadline_s=wait),
        "load": lambda: store.load([key], deadline_s=wait).leading,
        "load_into": lambda: store.load_into([key], [bytearray(BLOCK)], deadline_s=wait),
        "put": lambda: store.put([key], [bytes(BLOCK)], deadline_s=wait).stored,
        "flush": lambda: store.flush(deadline_s=wait),
        "stats": lambda: len(store.stats(deadline_s=wait)) - 1,
    }
    for name, verb in verbs.items():
        before, connected = sum(store.counters.all().values()), server.connections
        assert verb() == 0, name
        assert sum(store.counters.all().values()) == before + 1, name
        assert len(store._link._idle) == 0, "a connection out of step is kept"  # type: ignore[attr-defined]
        assert server.connections <= connected + 2
    store.close()
    server.close()


# --- wrong arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s, k: s.load(k, category=-1), "category: must be from 0 to 2147483647, found -1"),
        (lambda s, k: s.load(k, category=2**31), "category: must be from 0 to 2147483647"),
        (lambda s, k: s.load(k, category=0.5), "category: must be a whole number, found float"),
        (lambda s, k: s.load(k, tenant=b"x" * 17), "tenant: must have 0 or 16 bytes, found 17"),
        (lambda s, k: s.load(k, tenant=b"x"), "tenant: must have 0 or 16 bytes, found 1"),
        (lambda s, k: s.load(k, tenant="x" * 16), "tenant: must be bytes, found str"),
        (lambda s, k: s.put(k, blocks(k), tenant=b"x"), "tenant: must have 0 or 16 bytes"),
        (lambda s, k: s.put(k, blocks(k), tenant=None), "tenant: must be bytes, found NoneType"),
        (lambda s, k: s.load_into(k, [bytearray(BLOCK)] * 2, tenant=b"x"), "tenant: must have"),
        (lambda s, k: s.lookup([k[0]] * 65_537), "keys: a chain has at most 65,536 blocks"),
        (lambda s, k: s.load([k[0]] * 70_000), "keys: a chain has at most 65,536 .* 70,000"),
        (lambda s, k: s.lookup(["x" * 32]), "keys: every key must be bytes, found str"),
        (lambda s, k: s.load([bytearray(k[0])]), "keys: every key must be bytes, found bytearray"),
        (lambda s, k: s.lookup(k[0]), "keys: every key must be bytes, found int"),
        (lambda s, k: s.lookup([k[0][:31]]), "keys: every key must have 32 bytes, found one of 31"),
        (lambda s, k: s.put([k[0], "x" * 32], blocks(k)), "keys: every key must be bytes"),
        (lambda s, k: s.put(k, blocks(k), first=-1), "first: must be from 0 to 2, found -1"),
        (lambda s, k: s.put(k, blocks(k), first=3), "first: must be from 0 to 2, found 3"),
        (lambda s, k: s.put(k, blocks(k), first=1), "2 keys from 1 on need 1 blocks, found 2"),
        (lambda s, k: s.put(k, blocks(k)[:1]), "2 keys from 0 on need 2 blocks, found 1"),
        (lambda s, k: s.put(k, [b"", b"x"]), "size of a block: must be from 1 to .* found 0"),
        (lambda s, k: s.reserve(k, [BLOCK, -1]).__enter__(), "size of a block: must be from 1"),
        (lambda s, k: s.reserve(k, [1.5, 1]).__enter__(), "size of a block: must be a whole"),
        (lambda s, k: s.put([k[0]] * 2, blocks(k)), "a chain has every block once"),
        (lambda s, k: s.load_into(k, [bytes(BLOCK)] * 2), "destinations: .* writable"),
    ],
)
def test_wrong_arguments_are_named_alike_in_library_and_socket_mode(
    opened: Open, call: Callable[[PrefixStore, list[bytes]], Any], said: str
) -> None:
    store, keys = opened(), chain("a", 2)
    with pytest.raises(ValueError, match=said) as error:
        call(store, keys)
    assert not re.search(keys[0].hex()[:9], str(error.value))
    assert store.put(keys, blocks(keys)).stored == 2  # nothing is left behind
    assert wrong_blocks(store, keys, 1) == 0
    assert dict(store.counters.all()) == {}


def test_arguments_at_their_limits_are_taken_in_both_modes(opened: Open) -> None:
    store, keys = opened(), chain("a", 2)
    tenant = b"t" * 16
    assert store.put(keys, blocks(keys), tenant=tenant).stored == 2
    with store.load(keys, category=2**31 - 1, tenant=tenant) as found:
        assert found.leading == 2
    assert store.lookup([*keys, *chain("b", 65_534)]) == 2
    assert store.lookup([]) == 0
    assert store.put([], []).stored == 0


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        ([-1, 0], "checksums: must be from 0 to 4294967295, found -1"),
        ([0, 2**32], "checksums: must be from 0 to 4294967295"),
        ([0, "x"], "checksums: must be a whole number, found str"),
        ([0, 0, 0], "checksums: at most 2 were reserved, found 3"),
    ],
)
def test_a_commit_that_is_refused_gives_its_room_back(
    opened: Open, sums: list[Any], said: str
) -> None:
    store, keys = opened(), chain("a", 2)
    free = store.stats()["gauges"]["free_slots"]
    with pytest.raises(ValueError, match=said), store.reserve(keys, [BLOCK] * 2) as room:
        try:
            room.commit(sums)
        finally:
            gauges = store.stats()["gauges"]
            assert (gauges["reservations"], gauges["free_slots"]) == (0, free)
    assert room.commit() == 0
    assert store.put(keys, blocks(keys)).stored == 2
    assert wrong_blocks(store, keys, 1) == 0


def test_a_commit_that_fails_otherwise_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys = open_store(tmp_path / "s", dram=16 * BLOCK, block_bytes=BLOCK), chain("a", 2)

    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    room = store.reserve(keys, [BLOCK] * 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), room as reserved:
        patch.setattr(store._link, "commit", interrupted)
        reserved.commit()
    assert store.stats()["gauges"]["reservations"] == 0
    assert store.put(keys, blocks(keys)).stored == 2
    store.close()


def test_a_server_refuses_tenants_that_are_none(served: Callable[..., Served]) -> None:
    store, keys = connect(served().path), chain("a", 2)
    with pytest.raises(StoreUnavailableError, match="a tenant's tag has 0 or 16 bytes"):
        store._link.load(keys, Deadline.after(5), 0, True, b"x")
    with pytest.raises(StoreUnavailableError, match="a tenant's tag has 0 or 16 bytes"):
        store._link.reserve(keys, [1, 1], 0, b"x", False, Deadline.after(5))
    store.close()


def test_blocks_that_cannot_be_durable_are_not_written_at_all(opened: Open) -> None:
    store, keys = opened(), chain("a", 2)
    put = store.put(keys, blocks(keys), durable=True)
    assert (put.stored, put.reason) == (0, "no_ssd")
    with store.reserve(keys, [BLOCK] * 2, durable=True) as room:
        assert (len(room.buffers), room.reason, room.commit()) == (0, "no_ssd", 0)
    assert store.lookup(keys) == 0
    assert store.put(keys, blocks(keys)).stored == 2
    with_ssd = opened(ssd_bytes=4 << 20)
    put = with_ssd.put(keys, blocks(keys), durable=True, deadline_s=SOON)
    assert (put.stored, put.reason) == (2, "")


# --- the end -----------------------------------------------------------------------------------


def test_threads_that_use_a_store_while_it_closes_get_misses(opened: Open) -> None:
    for _ in range(3):
        store, keys = opened(dram_bytes=128 * BLOCK), chain("a", 16)
        store.put(keys, blocks(keys))
        wrong: list[str] = []
        is_over, under_way = threading.Event(), threading.Barrier(5)

        def use(
            number: int,
            store: PrefixStore = store,
            keys: list[bytes] = keys,
            wrong: list[str] = wrong,
            is_over: threading.Event = is_over,
            under_way: threading.Barrier = under_way,
        ) -> None:
            targets = [bytearray(BLOCK) for _ in keys]
            under_way.wait(SOON)
            for turn in range(10_000):
                if is_over.is_set():
                    return
                try:
                    if number % 2:
                        new = chain(f"{number}-{turn}", 2)
                        store.put(new, blocks(new))
                    else:
                        count = store.load_into(keys, targets)
                        if [bytes(t) for t in targets[:count]] != blocks(keys[:count]):
                            wrong.append("bytes")
                    store.stats()
                    store.flush(deadline_s=0.1)
                except BaseException:
                    wrong.append(traceback.format_exc())
                    return

        threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        under_way.wait(SOON)
        time.sleep(0.05)
        store.close()
        time.sleep(0.02)
        is_over.set()
        for thread in threads:
            thread.join(SOON)
            assert not thread.is_alive()
        assert wrong == []


def test_what_is_held_of_a_store_that_closed_answers_with_nothing(opened: Open) -> None:
    store, keys = opened(), chain("a", 3)
    store.put(keys, blocks(keys))
    found = store.load(keys)
    with store.reserve(chain("b", 2), [BLOCK] * 2) as room:
        store.close()
        for buffer in room.buffers:
            buffer[:] = bytes(BLOCK)
        assert room.commit() == 0
        assert room.is_unavailable
    # The bytes themselves stay until nobody has a view any more.
    assert [bytes(view) for view in found.views] == blocks(keys)
    assert found.still_valid() == 0
    assert found.copy_into([bytearray(BLOCK) for _ in keys]) == 0
    found.close()
    assert store.load(keys).still_valid() == 0
    store.close()
    assert store.block_bytes == BLOCK


def test_memory_of_a_closed_store_goes_with_the_last_view(tmp_path: Path) -> None:
    store, keys = open_store(tmp_path / "s", dram=16 * BLOCK, block_bytes=BLOCK), chain("a", 3)
    store.put(keys, blocks(keys))
    name = store._link.arena.path.name

    def is_mapped() -> bool:
        return name in Path("/proc/self/maps").read_text()

    found = store.load(keys)
    view = found.views[2]
    store.close()
    found.close()
    del found
    assert is_mapped()
    assert bytes(view) == block(keys[2])
    del view
    assert not is_mapped()  # though the closed store is still there
    assert store.lookup(keys) == 0


def test_a_link_closes_after_the_calls_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys = open_store(tmp_path / "s", dram=16 * BLOCK, block_bytes=BLOCK), chain("a", 2)
    node = store._link._node  # type: ignore[attr-defined]
    within, go_on, order = threading.Event(), threading.Event(), []
    load = node.load

    def slow(*args: Any, **options: Any) -> Any:
        within.set()
        assert go_on.wait(SOON)
        order.append("load")
        return load(*args, **options)

    store.put(keys, blocks(keys))
    monkeypatch.setattr(node, "load", slow)
    close = node.close
    monkeypatch.setattr(node, "close", lambda: (order.append("close"), close()))
    reader = threading.Thread(target=lambda: store.load(keys).close())
    reader.start()
    assert within.wait(SOON)
    closer = threading.Thread(target=store.close)
    closer.start()
    go_on.set()
    for thread in (reader, closer):
        thread.join(SOON)
    assert order == ["load", "close"]


def test_an_async_store_that_closed_answers_with_misses(tmp_path: Path) -> None:
    keys = chain("a", 2)

    async def use() -> list[Any]:
        store = AsyncStore(open_store(tmp_path / "s", dram=16 * BLOCK, block_bytes=BLOCK))
        await store.put(keys, blocks(keys))
        async with store.load(keys) as found:
            await store.close()
        assert found.still_valid() == 0
        async with store.load(keys) as found:
            got: list[Any] = [found.leading]
        got += [await store.lookup(keys), (await store.put(keys, blocks(keys))).reason]
        got += [await store.flush()]
        await store.close()
        return got

    assert asyncio.run(use()) == [0, 0, "unavailable", False]
