"""Servers and clients that die, come back, or leave in the middle of a sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.store import messages, socket_link
from runtime.store.arena import SharedArena, arena_path
from runtime.store.config import StoreConfig
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.node import StoreNode
from runtime.store.offline import opened_ssd
from runtime.store.store import PrefixStore, connect, open_store
from runtime.store.unix_server import UnixServer
from runtime.store.wire import recv_frame, send_frame
from tests.runtime.store.conftest import BLOCK, blocks, chain
from tests.runtime.store.faults.accounts import counter, right, settled

SOON = 10.0


class Served:
    """A node and its socket in this process; ``die`` leaves the memory as a kill would."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.changes = folder, changes
        self.start()

    def start(self, **changes: Any) -> None:
        given: dict[str, Any] = {
            "folder": self.folder,
            "dram_bytes": 16 * BLOCK,
            "block_bytes": BLOCK,
            "eviction": "lru",
            "is_arena_kept": True,
        }
        self.node = StoreNode(StoreConfig(**(given | self.changes | changes)))
        self.server = UnixServer(self.node, self.folder / "s")
        self.server.start()

    def die(self) -> None:
        self.server.stop(Deadline.after(SOON))
        self.node.close(Deadline.after(SOON))

    def client(self) -> PrefixStore:
        return connect(self.folder / "s")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    monkeypatch.setattr(socket_link, "RETRY_S", 0.0)
    made: list[Served] = []

    def make(**changes: Any) -> Served:
        made.append(Served(tmp_path / "n", **changes))
        return made[-1]

    yield make
    for one in made:
        one.die()
        arena_path(one.folder).unlink(missing_ok=True)


def test_leases_and_reservations_of_an_earlier_server_are_void(
    served: Callable[..., Served],
) -> None:
    """Rows 10, 14: numbers start anew with a server, and must not hit those of others."""
    one = served()
    client, old, mine = one.client(), chain("old", 2), chain("mine", 3)
    client.put(old, blocks(old))
    stale = client.load(old)
    with client.reserve(chain("never", 2), [BLOCK] * 2) as stale_room:
        one.die()
        one.start()
        assert client.put(mine, blocks(mine)).stored == 3
        held = client.load(mine)
        with client.reserve(chain("next", 2), [BLOCK] * 2) as room:
            assert len(room.buffers) == 2
            stale.close()  # gives up a lease of the dead server
            assert stale_room.commit([0, 0]) == 0
            assert client.lookup(chain("next", 2)) == 0
            for buffer, data in zip(room.buffers, blocks(chain("next", 2)), strict=True):
                buffer[:] = data
            assert room.commit() == 2
    for number in range(20):
        more = chain(f"m{number}", 4)
        client.put(more, blocks(more))
    assert held.still_valid() == 3
    assert [bytes(view) for view in held.views] == blocks(mine)
    held.close()
    settled(client)
    client.close()


def test_room_is_written_in_the_memory_of_the_server_that_gave_it(
    served: Callable[..., Served],
) -> None:
    """Row 3: a new server may have other memory at the same path."""
    one = served()
    client, other = one.client(), one.client()
    keys = chain("a", 4)
    with client.reserve(chain("b", 3), [BLOCK] * 3) as room:
        one.die()
        one.start(dram_bytes=32 * BLOCK)
        assert client.put(keys, blocks(keys)).stored == 4  # the client knows the new memory now
        for buffer in room.buffers:
            buffer[:] = b"\xee" * BLOCK
        assert room.commit() == 0
        assert right(client, keys) == 4
    assert right(other, keys) == 4
    client.close()
    other.close()


def test_a_client_leaks_no_descriptor_over_many_servers(served: Callable[..., Served]) -> None:
    """Row 16."""
    one = served()
    client, keys = one.client(), chain("a", 2)

    def restart() -> int:
        one.die()
        one.start()
        client.put(keys, blocks(keys))
        assert right(client, keys) == 2
        return len(list(Path("/proc/self/fd").iterdir()))

    before = [restart() for _ in range(3)][-1]
    assert [restart() for _ in range(6)][-1] <= before + 1
    client.close()


def test_slots_that_clients_of_a_killed_server_write_to_serve_nobody_for_a_while(
    tmp_path: Path,
) -> None:
    """Rows 3, 10: the writer outlives its server, and does not know yet."""
    given: dict[str, Any] = {"dram": 16 * BLOCK, "block_bytes": BLOCK, "eviction": "lru"}
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = open_store(tmp_path / "s", **given)
        with store.reserve(chain("never", 4), [BLOCK] * 4):
            slots = store._link._node._writer._open  # type: ignore[attr-defined]
            os.write(writing, bytes(r.slot for one in slots.values() for r in one.rooms))
            os.kill(os.getpid(), signal.SIGKILL)
    slots = list(os.read(reading, 4))
    os.waitpid(pid, 0)
    writer = SharedArena(arena_path(tmp_path / "s"), is_writable=True)  # as the client has it
    with open_store(tmp_path / "s", **given, reservation_s=1.0) as store:
        assert store.stats()["gauges"]["overdue_slots"] == len(slots) == 4
        chains = [chain(f"c{i}", 3) for i in range(4)]
        for keys in chains:
            store.put(keys, blocks(keys))
        held = [store.load(keys) for keys in chains]
        for slot in slots:
            writer.slot(slot)[:] = b"\xee" * BLOCK
        for keys, found in zip(chains, held, strict=True):
            assert [bytes(view) for view in found.views] == blocks(keys)[: found.leading]
            found.close()
        assert counter(store, "blocks_broken_in_memory") == 0
        end = time.monotonic() + SOON
        while store.stats()["gauges"]["overdue_slots"]:  # after reservation_s they serve again
            assert time.monotonic() < end
            time.sleep(0.05)
        settled(store)
    writer.close()


@pytest.mark.parametrize("request_name", ["load", "reserve"])
def test_an_answer_that_nobody_read_gives_its_blocks_back_at_once(
    served: Callable[..., Served], request_name: str
) -> None:
    """Row 6: a client that gives up waiting, without dying."""
    one = served()
    client, keys = one.client(), chain("a", 4)
    client.put(keys, blocks(keys))
    session = os.urandom(16)
    stays = _greeted(one, session)  # the client lives on: its leases would, too
    leaves = _greeted(one, session)
    deadline = Deadline.after(SOON)
    if request_name == "load":
        send_frame(leaves, messages.Load(messages.joined(keys), 5.0, 0, True, b""), deadline)
    else:
        new = messages.joined(chain("b", 2))
        send_frame(leaves, messages.Reserve(new, [BLOCK] * 2, 0, b"", False), deadline)
    gauge = "leases" if request_name == "load" else "reservations"
    end = time.monotonic() + SOON
    while not client.stats()["gauges"][gauge]:
        assert time.monotonic() < end
        time.sleep(0.005)
    leaves.close()
    settled(client)
    assert counter(client, "answers_unread") == 1
    stays.close()
    client.close()


def _greeted(one: Served, session: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(os.fspath(one.folder / "s"))
    send_frame(sock, messages.Hello(messages.VERSION, session), Deadline.after(SOON))
    recv_frame(sock, messages.Reply, Deadline.after(SOON))
    return sock


def test_a_server_out_of_threads_refuses_one_connection_and_goes_on(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 26: a server that looks alive and takes nobody any more."""
    one = served()
    client, start = one.client(), threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "store-client":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(SOON)
            sock.connect(os.fspath(one.folder / "s"))
            assert sock.recv(1) == b""
    with one.client() as another:
        assert another.put(chain("a", 1), blocks(chain("a", 1))).stored == 1
        assert counter(another, "connections_refused") == 1
    client.close()


def test_a_server_out_of_descriptors_takes_clients_again_later(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 26."""
    one = served()
    client, accept, failures = one.client(), socket.socket.accept, [3]

    def fail(listener: socket.socket) -> Any:
        if failures[0] and listener.family == socket.AF_UNIX:
            failures[0] -= 1
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail)
    with one.client():  # accepted by the call that was waiting already
        pass
    with one.client() as another:
        assert counter(another, "accept_errors") == 3
    client.close()


def test_blocks_that_only_memory_held_are_on_ssd_after_the_next_start(tmp_path: Path) -> None:
    """Rows 8, 24: what was committed and not yet flushed when the server died."""
    given: dict[str, Any] = {
        "dram": 32 * BLOCK,
        "ssd": "4MiB",
        "block_bytes": BLOCK,
        "eviction": "lru",
    }
    keys = chain("a", 8)
    pid = os.fork()
    if pid == 0:
        store = open_store(tmp_path / "s", **given)
        store._link._node.queue_flush = lambda keys: None  # type: ignore[attr-defined]
        store._link._node._writer._flush = lambda keys: None  # type: ignore[attr-defined]
        store.put(keys, blocks(keys))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with open_store(tmp_path / "s", **given) as store:
        assert counter(store, "blocks_recovered_in_memory") == 8
        assert store.flush()
        assert counter(store, "blocks_flushed") == 8
    with open_store(tmp_path / "s", **given) as store:  # memory went with the clean close
        assert right(store, keys) == 8
        assert counter(store, "blocks_hit_ssd") == 8


def test_a_full_ssd_is_still_full_after_a_restart_and_evicts(tmp_path: Path) -> None:
    """Rows 8, 9: usage starts where it was, files are used and removed."""
    given: dict[str, Any] = {
        "dram": 32 * BLOCK,
        "ssd": "1MiB",
        "block_bytes": BLOCK,
        "eviction": "lru",
    }
    used = 0.0
    for life in range(3):
        with open_store(tmp_path / "s", **given) as store:
            if life:
                assert store.stats()["gauges"]["ssd_used_bytes"] >= 0.5 * used
                assert counter(store, "blocks_recovered_on_ssd") > 50
            for number in range(40):
                keys = chain(f"{life}-{number}", 4)
                assert store.put(keys, blocks(keys), durable=True, deadline_s=10).stored == 4
                used = store.stats()["gauges"]["ssd_used_bytes"]
                assert used <= 1 << 20
            if life:
                assert counter(store, "blocks_evicted_from_ssd") > 100
            assert right(store, chain(f"{life}-39", 4)) == 4
    with opened_ssd(tmp_path / "s") as ssd:
        report = ssd.verify()
    assert report.is_exact
    assert report.is_good
    on_disk = sum(p.stat().st_size for p in (tmp_path / "s" / "ssd").rglob("*") if p.is_file())
    assert on_disk < 4 << 20


def test_every_block_that_was_flushed_is_in_the_index(tmp_path: Path) -> None:
    """Row 24: offloaded but never entered."""
    with open_store(
        tmp_path / "s", dram=64 * BLOCK, ssd="16MiB", block_bytes=BLOCK, eviction="lru"
    ) as store:
        for number in range(60):
            keys = chain(f"n{number}", 5)
            store.put(keys, blocks(keys))
            if number % 10 == 9:
                assert store.flush()
        assert store.flush()
        flushed = counter(store, "blocks_flushed")
        assert flushed + counter(store, "blocks_evicted_last_copy") >= 300
    with opened_ssd(tmp_path / "s") as ssd:
        assert ssd.verify().blocks == len(ssd) == flushed


def test_a_call_in_a_hurry_does_not_keep_the_others_from_the_server(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 26, 28: only a server that is gone is left alone for a while."""
    one = served()
    client, keys = one.client(), chain("a", 2)
    client.put(keys, blocks(keys))
    monkeypatch.setattr(socket_link, "RETRY_S", 1000.0)
    client._link._drop_idle()  # type: ignore[attr-defined]
    assert client.lookup(keys, deadline_s=1e-9) == 0
    assert client.counters["late"] == 1
    assert right(client, keys) == 2
    client.close()


@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 1e6])
def test_an_endless_deadline_is_a_long_one(served: Callable[..., Served], seconds: float) -> None:
    """Row 28: no call waits without an end, and none fails for being patient."""
    one = served(ssd_bytes=4 << 20)
    client, keys = one.client(), chain("a", 2)
    assert client.put(keys, blocks(keys), durable=True, deadline_s=seconds).stored == 2
    assert client.lookup(keys, deadline_s=seconds) == 2
    assert right(client, keys, seconds) == 2
    assert client.flush(deadline_s=seconds)
    assert client.stats(deadline_s=seconds)["client"] == {}
    with pytest.raises(ValueError, match="found nan"):
        client.lookup(keys, deadline_s=float("nan"))
    assert client.put(chain("b", 1), blocks(chain("b", 1)), deadline_s=0.0).reason == "late"
    client.close()


def test_room_of_a_commit_that_ran_out_of_time_is_given_back_at_once(
    served: Callable[..., Served],
) -> None:
    """Rows 5, 6: a client that is late again and again, and lives on."""
    one = served(reservation_s=0.2)
    client, keys = one.client(), chain("a", 3)
    for _ in range(10):
        with client.reserve(keys, [BLOCK] * 3) as room:
            assert len(room.buffers) == 3
            assert room.commit(deadline_s=0.0) == 0
            assert not room.is_unavailable
    settled(client)
    assert counter(client, "reservations_expired") == 0
    client.close()


def test_what_a_client_could_not_say_is_said_before_its_next_request(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 6: an abort or a release that did not get through."""
    one = served()
    client, keys = one.client(), chain("a", 3)
    client.put(keys, blocks(keys))
    found = client.load(keys)
    with monkeypatch.context() as patch, client.reserve(chain("b", 2), [BLOCK] * 2):
        patch.setattr(socket_link, "TELL_S", -1.0)  # no time to say anything
        client._link._drop_idle()  # type: ignore[attr-defined]
        found.close()
    gauges = client.stats()["gauges"]
    end = time.monotonic() + SOON
    while gauges["leases"] or gauges["reservations"]:
        assert time.monotonic() < end
        gauges = client.stats()["gauges"]
    settled(client)
    assert counter(client, "leases_expired") == counter(client, "reservations_expired") == 0
    client.close()


def test_a_socket_of_a_server_that_hangs_is_not_taken_over(
    tmp_path: Path, served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 26, 28: the start does not wait for it either."""
    monkeypatch.setattr("runtime.store.unix_server.PROBE_S", 0.2)
    path = tmp_path / "busy"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(os.fspath(path))
        listener.listen(0)  # and nobody accepts
        for _ in range(4):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(os.fspath(path))
        with pytest.raises(StoreSetupError, match="another server listens there"):
            UnixServer(served().node, path)
        assert path.exists()


def test_room_whose_answer_came_too_late_is_given_back_at_once(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 6: the answer is sent just when the client gives up, and the client lives on."""
    one = served(reservation_s=0.5)
    client = one.client()
    reserve = one.node.reserve

    def slow(*args: Any, **options: Any) -> Any:
        found = reserve(*args, **options)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(one.node, "reserve", slow)
    for number in range(40):
        keys = chain(f"k{number}", 2)
        # Around the moment of the answer, so that it is missed by more and by less.
        client.put(keys, blocks(keys), deadline_s=0.045 + 0.0005 * (number % 20))
    settled(client)
    time.sleep(0.6)
    client.put(chain("z", 1), blocks(chain("z", 1)))
    assert client.stats()["gauges"]["overdue_slots"] == 0
    assert counter(client, "reservations_expired") == 0
    client.close()
