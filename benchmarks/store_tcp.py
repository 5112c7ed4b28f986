"""How much of a raw TCP connection the store's fetches and puts between nodes get.

    python benchmarks/store_tcp.py [ROUNDS]

Two server processes on loopback hold blocks in memory. Each round asks, in turn and on connections
that stay open, for 64 MiB: raw (``sendall`` against ``recv_into`` of the whole), a fetch with and
without checksums, a put with checksums; then for 64 MiB of each of both servers at once. Shown:
median and quartiles of GB/s over the rounds, the best round, and the median of the ratio to raw
within a round, CPU seconds of the client per GB, which other work on the machine hardly moves;
then how long a ping takes.
"""

import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.store import peer_client  # noqa: E402
from runtime.store.blocks import BlockInfo, checksum  # noqa: E402
from runtime.store.deadline import Deadline  # noqa: E402
from runtime.store.peer_client import Peers  # noqa: E402
from runtime.store.peer_identity import NodeIdentity, new_incarnation  # noqa: E402
from runtime.store.peer_server import PeerServer  # noqa: E402
from runtime.store.wire import recv_exactly  # noqa: E402

TOTAL_BYTES = 64 << 20
SERVERS = ("one", "two")
WAIT_S = 120


def key_of(index: int) -> bytes:
    return index.to_bytes(32, "big")


class InMemory:
    """Serves and takes blocks of one size out of and into one buffer."""

    def __init__(self, block_bytes: int) -> None:
        data = np.random.default_rng(5).integers(0, 256, TOTAL_BYTES, dtype=np.uint8)
        self.data = memoryview(data).cast("B")
        self.room = memoryview(bytearray(TOTAL_BYTES))
        self.block_bytes = block_bytes
        self.blocks = {}
        for index in range(TOTAL_BYTES // block_bytes):
            view = self.data[index * block_bytes : (index + 1) * block_bytes]
            key = key_of(index)
            info = BlockInfo(key, b"", key_of(0), index, index, block_bytes, checksum(view))
            self.blocks[key] = (info, view)

    @contextmanager
    def open_blocks(self, keys: Sequence[bytes]) -> Iterator[list[Any]]:
        yield [self.blocks.get(key) for key in keys]

    @contextmanager
    def receive_region(
        self, infos: Sequence[BlockInfo], writer: str, is_owned: bool, deadline: Deadline
    ) -> Iterator[Any]:
        yield _Room([self.room[i.index * i.length : (i.index + 1) * i.length] for i in infos])

    def announced(self, *changes: Any) -> None: ...

    def retained(self, *kept: Any) -> None: ...

    def directory_page(self, after: bytes, limit: int) -> list[Any]:
        return []


class _Room:
    def __init__(self, buffers: list[memoryview]) -> None:
        self.buffers = buffers

    def commit(self) -> int:
        return len(self.buffers)


def serve(name: str, block_bytes: int, ports: Any, stop: Any) -> None:
    handler = InMemory(block_bytes)
    server = PeerServer("127.0.0.1", 0, handler, NodeIdentity(name, new_incarnation()))
    server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    ports.put((name, server.port, listener.getsockname()[1]))
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while sock.recv(1):
        sock.sendall(handler.data)
    sock.close()
    listener.close()
    stop.wait(WAIT_S)
    server.stop()


def seconds(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def raw(sock: socket.socket, view: memoryview) -> None:
    sock.sendall(b"x")
    start = 0
    while start < len(view):
        start += sock.recv_into(view[start:])


def together(*works: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def unchecked(infos: Sequence[BlockInfo]) -> Iterator[None]:
    """Fetches without checksums, for the comparison only."""
    right = peer_client.receive_block
    order = iter([info.crc for info in infos])

    def pretend(sock: socket.socket, view: memoryview, deadline: Deadline) -> int:
        recv_exactly(sock, view, deadline)
        return next(order)

    peer_client.receive_block = pretend
    try:
        yield
    finally:
        peer_client.receive_block = right


def measure(block_bytes: int, rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    ports, stop = context.Queue(), context.Event()
    servers = [
        context.Process(target=serve, args=(name, block_bytes, ports, stop), daemon=True)
        for name in SERVERS
    ]
    for server in servers:
        server.start()
    peers = Peers(NodeIdentity("client", new_incarnation()))
    raws = {}
    for _ in servers:
        name, port, raw_port = ports.get(timeout=WAIT_S)
        peers.add(name, "127.0.0.1", port)
        raws[name] = socket.create_connection(("127.0.0.1", raw_port))
    handler = InMemory(block_bytes)
    infos = [info for info, _ in handler.blocks.values()]
    keys = list(handler.blocks)
    rooms = {name: memoryview(bytearray(TOTAL_BYTES)) for name in SERVERS}
    starts = range(0, TOTAL_BYTES, block_bytes)
    wanted = {
        name: (keys, [room[start : start + block_bytes] for start in starts])
        for name, room in rooms.items()
    }

    def fetch() -> None:
        got = peers.fetch("one", *wanted["one"], Deadline.after(WAIT_S))
        assert got == infos

    def fetch_unchecked() -> None:
        with unchecked(infos):
            fetch()

    def put() -> None:
        views = [view for _, view in handler.blocks.values()]
        assert peers.put("one", infos, views, True, Deadline.after(WAIT_S)) == len(infos)

    def fetch_both() -> None:
        got = peers.fetch_many(wanted, Deadline.after(WAIT_S))
        assert got == dict.fromkeys(SERVERS, infos)

    def raw_both() -> None:
        together(*(lambda name=name: raw(raws[name], rooms[name]) for name in SERVERS))

    cases: dict[str, tuple[Callable[[], None], int]] = {
        "raw, one server": (lambda: raw(raws["one"], rooms["one"]), TOTAL_BYTES),
        "fetch": (fetch, TOTAL_BYTES),
        "fetch, no checksum": (fetch_unchecked, TOTAL_BYTES),
        "put": (put, TOTAL_BYTES),
        "raw, two servers": (raw_both, 2 * TOTAL_BYTES),
        "fetch, two servers": (fetch_both, 2 * TOTAL_BYTES),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    cpu_s_per_gb: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(rounds + 1):
        # Turned each round, so that none always runs behind the same other one.
        names = list(cases)
        turn = round_index % len(names)
        for name in names[turn:] + names[:turn]:
            work, num_bytes = cases[name]
            cpu_began_s = time.process_time()
            rate = num_bytes / seconds(work) / 1e9
            if round_index:
                rates[name].append(rate)
                cpu_s_per_gb[name].append((time.process_time() - cpu_began_s) / num_bytes * 1e9)
    print(
        f"\nblocks of {block_bytes >> 20} MiB, {TOTAL_BYTES >> 20} MiB a request, {rounds} rounds"
    )
    for name, values in rates.items():
        base = rates["raw, two servers" if "two" in name else "raw, one server"]
        low, middle, high = statistics.quantiles(values, n=4)
        share = statistics.median(a / b for a, b in zip(values, base, strict=True))
        print(
            f"  {name:20} {middle:6.2f} GB/s ({low:.2f} to {high:.2f}), best {max(values):.2f},"
            f" {share:.2f} of raw; {statistics.median(cpu_s_per_gb[name]):.2f} CPU s/GB here"
        )
    pings = [seconds(lambda: peers.ping("one", Deadline.after(WAIT_S))) for _ in range(500)]
    middle_us, high_us = sorted(pings)[250] * 1e6, sorted(pings)[495] * 1e6
    print(f"  one ping             p50 {middle_us:.0f} us, p99 {high_us:.0f} us")
    for sock in raws.values():
        sock.close()
    stop.set()
    peers.close()
    for server in servers:
        server.join(WAIT_S)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    for block_bytes in (2 << 20, 8 << 20):
        measure(block_bytes, rounds)


if __name__ == "__main__":
    main()
