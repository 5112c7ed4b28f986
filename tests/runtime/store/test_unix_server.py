"""A server and its clients, in processes of their own; any of them may die at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.store.store import connect
from tests.runtime.store.conftest import BLOCK, ServerProcess, block, blocks, chain

Server = Callable[..., ServerProcess]
DRAM = ("--dram", str(64 * BLOCK))


def test_engines_of_a_node_share_blocks_without_a_copy(server: Server) -> None:
    first = server(*DRAM).start()
    keys = chain("a", 10)
    assert first.put(keys, blocks(keys)).stored == 10
    with connect(first._link.path) as second, second.load(keys) as found:  # type: ignore[attr-defined]
        assert [bytes(view) for view in found.views] == blocks(keys)
    first.close()


def test_pins_and_room_of_a_killed_client_are_freed_at_once(server: Server) -> None:
    one = server(*DRAM)
    store, keys = one.start(), chain("a", 6)
    store.put(keys, blocks(keys))
    pid = os.fork()
    if pid == 0:
        other = connect(one.socket)
        other.load(keys)
        with other.reserve(chain("b", 4), [BLOCK] * 4):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    for _ in range(100):
        gauges = store.stats()["gauges"]
        if gauges["leases"] == gauges["reservations"] == 0:
            break
        time.sleep(0.02)
    assert (gauges["leases"], gauges["pinned_blocks"], gauges["reservations"]) == (0, 0, 0)
    counters = store.stats()["counters"]
    assert counters["leases_left_behind"] == counters["reservations_left_behind"] == 1
    assert store.lookup(chain("b", 4)) == 0
    assert store.put(chain("b", 4), blocks(chain("b", 4))).stored == 4
    store.close()


def test_a_killed_server_is_a_miss_at_once_and_its_blocks_come_back(server: Server) -> None:
    one = server(*DRAM)
    store, keys = one.start(), chain("a", 8)
    assert store.put(keys, blocks(keys)).stored == 8
    held = store.load(keys)
    with store.reserve(chain("b", 3), [BLOCK] * 3) as room:
        one.kill()
        start = time.monotonic()
        assert store.lookup(keys) == 0
        assert store.load(keys).leading == 0
        assert store.put(chain("c", 1), blocks(chain("c", 1))).reason == "unavailable"
        assert room.commit() == 0
        assert time.monotonic() - start < 5
    assert [bytes(view) for view in held.views] == blocks(keys)  # the memory outlives the server
    fresh = one.start()
    with fresh.load(keys) as found:
        assert [bytes(view) for view in found.views] == blocks(keys)
    assert fresh.lookup(chain("b", 3)) == 0
    time.sleep(1.1)  # an engine tries again once a second
    with store.load(keys) as found:
        assert [bytes(view) for view in found.views] == blocks(keys)
    assert store.stats()["client"]["unavailable"] >= 3
    held.close()
    fresh.close()
    store.close()


def test_durable_blocks_survive_server_and_memory(server: Server) -> None:
    one = server(*DRAM, "--ssd", "4MiB")
    store, keys = one.start(), chain("a", 8)
    assert store.put(keys, blocks(keys), durable=True, deadline_s=5).stored == 8
    arena = store._link.arena.path
    one.kill()
    arena.unlink()  # the machine was restarted
    with one.start() as fresh, fresh.load(keys, deadline_s=5) as found:
        assert [bytes(view) for view in found.views] == blocks(keys)
        assert fresh.stats()["counters"]["blocks_recovered_on_ssd"] == 8


def test_a_server_killed_at_random_moments_serves_no_wrong_byte(server: Server) -> None:
    one = server("--dram", str(48 * BLOCK), "--ssd", "64MiB")
    committed: list[str] = []
    for life in range(4):
        store = one.start()
        is_over = threading.Event()

        def write(life: int = life, store: object = store, over: threading.Event = is_over) -> None:
            number = 0
            while not over.is_set():
                name = f"{life}-{number}"
                keys = chain(name, 3)
                put = store.put(keys, blocks(keys), durable=True, deadline_s=5)  # type: ignore[attr-defined]
                if put.stored == 3:
                    committed.append(name)
                number += 1

        thread = threading.Thread(target=write)
        thread.start()
        time.sleep(0.15 + 0.1 * life)
        one.kill()
        is_over.set()
        thread.join(20)
        store.close()
    assert len(committed) >= 8
    with one.start() as store:
        for name in committed:
            keys = chain(name, 3)
            with store.load(keys, deadline_s=5) as found:
                assert [bytes(view) for view in found.views] == blocks(keys), name


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, b"\0\0\0\1\xc1", b"GET / HTTP/1.0\r\n\r\n", b""],
    ids=["length", "message", "http", "nothing"],
)
def test_garbage_on_the_socket_ends_that_connection_only(server: Server, garbage: bytes) -> None:
    one = server(*DRAM)
    store = one.start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(one.socket))
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    keys = chain("a", 2)
    assert store.put(keys, blocks(keys)).stored == 2
    store.close()


def test_many_threads_of_one_engine_share_a_link(server: Server) -> None:
    store = server("--dram", str(512 * BLOCK)).start()
    wrong: list[str] = []

    def work(name: str) -> None:
        for number in range(15):
            keys = chain(f"{name}-{number}", 4)
            store.put(keys, blocks(keys))
            with store.load(keys) as found:
                if [bytes(view) for view in found.views] != blocks(keys[: found.leading]):
                    wrong.append(name)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    gauges = store.stats()["gauges"]
    assert (gauges["leases"], gauges["pinned_blocks"]) == (0, 0)
    store.close()


def test_sigterm_ends_the_server_cleanly_and_its_log_replays(
    server: Server, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl.gz"
    one = server(*DRAM, "--ssd", "4MiB", "--decision-log", str(log), "--eviction", "gdsf")
    store = one.start()
    for i in range(40):
        keys = chain(f"{i % 13}", 5)
        with store.load(keys):
            pass
        store.put(keys, blocks(keys))
    arena = store._link.arena.path
    assert one.kill(signal.SIGTERM) == 0
    assert not one.socket.exists()
    assert not arena.exists()
    done = subprocess.run(
        [sys.executable, "-m", "twin", "replay", str(log)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "no difference" in done.stdout
    assert int(done.stdout.split()[0].replace(",", "")) > 100
    store.close()


def test_metrics_and_logs_name_no_keys(server: Server, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    one = server(*DRAM, "--metrics-port", str(port), "--node", "n1", "--log-level", "debug")
    store, keys = one.start(), chain("a", 3)
    store.put(keys, blocks(keys))
    store.load(keys).close()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'prefix_store_blocks_hit_total{node="n1",tier="memory"} 3.0' in text
    assert 'prefix_store_memory_blocks{node="n1"} 3.0' in text
    store.close()
    one.kill(signal.SIGTERM)
    lines = (one.folder / "log").read_text().splitlines()
    assert next(json.loads(line)["event"] for line in lines if line) == "serving"
    for key in keys:
        assert key.hex()[:8] not in text + "".join(lines)


def test_stats_are_shown_and_a_missing_server_is_named(server: Server, tmp_path: Path) -> None:
    one = server(*DRAM)
    store = one.start()
    runtime = (sys.executable, "-m", "runtime", "store", "stats")
    done = subprocess.run([*runtime, str(one.folder), "--json"], capture_output=True, text=True)
    assert json.loads(done.stdout)["gauges"]["slots"] == 64
    table = subprocess.run([*runtime, str(one.folder)], capture_output=True, text=True)
    assert "memory used bytes" in table.stdout
    gone = subprocess.run([*runtime, str(tmp_path / "no")], capture_output=True, text=True)
    assert gone.returncode == 2
    assert "runtime store serve" in gone.stderr
    assert gone.stderr.count("\n") == 1
    store.close()


def test_a_second_server_of_a_folder_is_refused(server: Server) -> None:
    one = server(*DRAM)
    store = one.start()
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "store", "serve", str(one.folder), "--dram", "4MiB"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "another process serves this store" in done.stderr
    keys = chain("a", 1)
    assert store.put(keys, [block(keys[0])]).stored == 1
    store.close()
