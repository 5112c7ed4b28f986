"""A node that lives in a dictionary, and a TCP proxy that can damage, stop and part."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError
from runtime.store.peer_messages import Announcement, Removal

WAIT_S = 20.0


def key(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def content(block_key: bytes, length: int) -> bytes:
    return hashlib.shake_128(block_key).digest(length)


def info(block_key: bytes, length: int, index: int = 0, region: bytes = b"") -> BlockInfo:
    data = content(block_key, length)
    return BlockInfo(
        block_key, b"", region or block_key, index, index, length, checksum(data), b"t" * 16
    )


def announcement(block_key: bytes, tier: Any = "memory") -> Announcement:
    return Announcement(block_key, block_key, 0, 0, 10, tier, True)


def soon() -> Deadline:
    return Deadline.after(WAIT_S)


def wait_until(is_so: Callable[[], object], what: str = "it") -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, f"{what} did not come about in {WAIT_S} s"
        time.sleep(0.005)


class InMemoryRoom:
    def __init__(self, node: InMemoryNode, infos: Sequence[BlockInfo]) -> None:
        self.infos = infos
        self.buffers = [memoryview(bytearray(one.length)) for one in infos]
        self.node = node

    def commit(self) -> int:
        for one, buffer in zip(self.infos, self.buffers, strict=True):
            self.node.blocks[one.key] = (one, buffer)
        return len(self.infos)


@dataclass
class InMemoryNode:
    """A handler of peers; what it is told of others is kept as a plain directory."""

    blocks: dict[bytes, tuple[BlockInfo, memoryview]] = field(default_factory=dict)
    holdings: dict[tuple[bytes, str], Announcement] = field(default_factory=dict)
    told: dict[str, dict[tuple[bytes, str], Announcement]] = field(default_factory=dict)
    leases: int = 0
    room_blocks: int = 10**6
    error: Exception | None = None
    before_open: Callable[[], object] = lambda: None
    before_page: Callable[[bytes], object] = lambda after: None

    def hold(self, *names: object, length: int = 1000) -> list[bytes]:
        keys = [key(name) for name in names]
        for index, one in enumerate(keys):
            data = memoryview(content(one, length))
            self.blocks[one] = (info(one, length, index, keys[0]), data)
        return keys

    @contextmanager
    def open_blocks(
        self, keys: Sequence[bytes]
    ) -> Iterator[list[tuple[BlockInfo, memoryview] | None]]:
        self.before_open()
        if self.error is not None:
            raise self.error
        self.leases += 1
        try:
            yield [self.blocks.get(one) for one in keys]
        finally:
            self.leases -= 1

    @contextmanager
    def receive_region(
        self, infos: Sequence[BlockInfo], writer: str, is_owned: bool, deadline: Deadline
    ) -> Iterator[InMemoryRoom]:
        if self.error is not None:
            raise self.error
        self.leases += 1
        try:
            yield InMemoryRoom(self, infos[: self.room_blocks])
        finally:
            self.leases -= 1

    def announced(
        self,
        node: str,
        incarnation: int,
        added: Sequence[Announcement],
        removed: Sequence[Removal],
    ) -> None:
        held = self.told.setdefault(node, {})
        held.update({(one.key, one.tier): one for one in added})
        for gone in removed:
            held.pop((gone.key, gone.tier), None)

    def retained(self, node: str, incarnation: int, kept: Collection[tuple[bytes, str]]) -> None:
        held = self.told.setdefault(node, {})
        for gone in [one for one in held if one not in kept]:
            del held[gone]

    def directory_page(self, after: bytes, limit: int) -> list[Announcement]:
        self.before_page(after)
        ordered = sorted(one for one in self.holdings.copy() if one[0] > after)
        return [self.holdings[one] for one in ordered[:limit] if one in self.holdings]


class Proxy:
    """Passes TCP on to a port, unless told to damage, stop or part it."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.is_parted = False
        self.is_stopped = False
        self.flip_after: int | None = None  # flips one bit of that byte of what comes back
        self.cut_after: int | None = None  # closes after so many bytes of what comes back
        self.passed = 0
        self._pairs: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def part(self) -> None:
        """Cuts all connections and lets none be made."""
        self.is_parted = True
        self._cut()

    def heal(self) -> None:
        self.is_parted = False

    def close(self) -> None:
        self.is_stopped = False
        self.is_parted = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _cut(self) -> None:
        with self._lock:
            for sock in self._pairs:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
            self._pairs.clear()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target), WAIT_S)
            except OSError:
                near.close()
                continue
            with self._lock:
                if self.is_parted:
                    near.close()
                    far.close()
                    continue
                self._pairs += [near, far]
            self._start(self._pump, near, far, False)
            self._start(self._pump, far, near, True)

    def _pump(self, source: socket.socket, sink: socket.socket, is_back: bool) -> None:
        source.settimeout(None)
        try:
            while data := bytearray(source.recv(65536)):
                while self.is_stopped:
                    time.sleep(0.005)
                if is_back:
                    data = self._damage(data)
                sink.sendall(data)
        except OSError:
            pass
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _damage(self, data: bytearray) -> bytearray:
        start, self.passed = self.passed, self.passed + len(data)
        if self.flip_after is not None and start <= self.flip_after < self.passed:
            data[self.flip_after - start] ^= 0x10
        if self.cut_after is not None and self.passed >= self.cut_after:
            raise OSError("cut")
        return data


class BusyError(StoreError):
    pass
