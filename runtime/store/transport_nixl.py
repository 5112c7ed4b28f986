"""Fetches blocks by one-sided reads through NIXL, where the network can do that.

The owner registers its arena once. To read, a node asks over an ordinary connection of the peers
that some blocks be kept where they are, learns their addresses, reads them in batches and lets them
go:

    reader --Open(keys)-->            owner: leases the blocks
           <--Opened(addresses)--
           ==READ==READ==READ==       batch i+1 travels while batch i is checked and copied
           --Close-->                 owner: the lease ends (or with the connection, or in time)

NIXL has no deadlines; they are kept here. A read that is late is cancelled and the connection to
that agent dropped; what it might still write to is kept back (transport_landing.py). Checksums are
verified after the read, so memory that was reused in spite of the lease is a miss. Blocks that are
not in readable memory, and nodes without NIXL, are served over TCP.

This module is imported only if asked for; NIXL itself only by ``NixlTransport``.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreError, StoreSetupError, StoreUnavailableError
from runtime.store.peer_client import Peers
from runtime.store.peer_connections import Connection
from runtime.store.peer_identity import NodeIdentity
from runtime.store.peer_messages import (
    MAX_BLOCKS,
    MAX_REQUEST_S,
    Close,
    Describe,
    Described,
    Done,
    Failed,
    Open,
    Opened,
    check_info,
)
from runtime.store.peer_requests import FailedError, first_reply
from runtime.store.transport_landing import LandingMemory, Span, address_of
from runtime.store.wire import FrameError, recv_frame, send_frame

_log = structlog.get_logger(__name__)
DEFAULT_LANDING_BYTES: Final = 256 << 20
# The owner's lease outlives the reader's patience by this much.
LEASE_GRACE_S: Final = 1.0
_MODULES: Final = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")


@dataclass(frozen=True, slots=True)
class _Wanted:
    index: int
    info: BlockInfo
    address: int


@dataclass(slots=True)
class _Read:
    blocks: list[_Wanted]
    span: Span
    handle: Any


class NixlTransport:
    """A NIXL agent, the arena that others may read, and reads from others.

    It is the readable memory of a PeerServer and has the fetch of Peers.

    Args:
        identity: Who this node is.
        peers: The other nodes; also used for whatever cannot be read one-sided.
        arena: The memory that holds this node's blocks; registered once. None: reads only.
        backends: NIXL's plug-ins, such as UCX or LIBFABRIC; they take the network from their own
            environment (UCX_TLS, UCX_NET_DEVICES).
        landing_bytes: Memory that reads land in.

    Raises:
        StoreSetupError: If NIXL is not installed, or cannot start or register memory here.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        peers: Peers,
        arena: memoryview | None = None,
        *,
        backends: Sequence[str] = ("UCX",),
        landing_bytes: int = DEFAULT_LANDING_BYTES,
    ) -> None:
        self._peers = peers
        self._lock = threading.Lock()
        self._remote: dict[str, tuple[int, str]] = {}  # incarnation and agent by node
        self._landing = LandingMemory(landing_bytes)
        self._arena = (0, 0)
        self._agent = _start_agent(f"{identity.name}/{identity.incarnation}", list(backends))
        regions = [(self._landing.address, landing_bytes, 0, "landing")]
        if arena is not None:
            self._arena = (address_of(arena), arena.nbytes)
            regions.append((*self._arena, 0, "arena"))
        try:
            self._registered = self._agent.register_memory(regions, "DRAM")
            # What others get to know is the arena alone.
            self._blob = self._describe_arena() if arena is not None else b""
        except Exception as error:
            raise StoreSetupError(f"NIXL cannot register memory: {error}") from error

    @property
    def stuck_bytes(self) -> int:
        """Landing memory kept back because reads into it could not be ended."""
        return self._landing.stuck_bytes

    def describe(self) -> bytes:
        """What the other side's NIXL has to know to read the arena."""
        return self._blob

    def address_of(self, view: memoryview) -> int:
        """Address of a view; 0 if it is not in the arena."""
        address = address_of(view) if view.nbytes else 0
        start, size = self._arena
        return address if start <= address and address + view.nbytes <= start + size else 0

    def fetch(
        self,
        node: str,
        keys: Sequence[bytes],
        destinations: Sequence[memoryview],
        deadline: Deadline,
    ) -> list[BlockInfo | None]:
        """Fetches blocks of one node, as Peers.fetch does.

        Args:
            node: Whom to read from.
            keys: Of the blocks.
            destinations: Writable, one per key, each at least as long as its block.
            deadline: When to give up; what was verified by then counts.

        Returns:
            Per key what was received and verified, or None: a miss, whose buffer holds anything.
        """
        views = [destination.cast("B") for destination in destinations]
        got: list[BlockInfo | None] = [None] * len(keys)
        over_tcp: list[int] = []
        for start in range(0, len(keys), MAX_BLOCKS):
            indices = range(start, min(start + MAX_BLOCKS, len(keys)))

            def work(indices: Sequence[int] = indices) -> None:
                self._peers.exchange(
                    node,
                    "fetch",
                    deadline,
                    lambda link: self._fetch(link, keys, views, indices, got, over_tcp, deadline),
                )

            if not self._peers.try_node(node, deadline, work):
                break
        if over_tcp:
            rest = self._peers.fetch(
                node, [keys[i] for i in over_tcp], [views[i] for i in over_tcp], deadline
            )
            for index, info in zip(over_tcp, rest, strict=True):
                got[index] = info
        self._peers.counters.add(
            "read_blocks", sum(info is not None for info in got) - len(over_tcp)
        )
        return got

    def close(self) -> None:
        """Lets go of the other agents and of the registered memory."""
        with self._lock:
            for _, agent in self._remote.values():
                _quietly(self._agent.remove_remote_agent, agent)
            self._remote.clear()
            _quietly(self._agent.deregister_memory, self._registered)

    def _fetch(
        self,
        link: Connection,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        indices: Sequence[int],
        got: list[BlockInfo | None],
        over_tcp: list[int],
        deadline: Deadline,
    ) -> None:
        agent = self._agent_of(link, deadline)
        if agent is None:
            over_tcp += indices
            return
        left_s = min(deadline.require("reading") + LEASE_GRACE_S, MAX_REQUEST_S)
        request = Open([keys[index] for index in indices], left_s)
        opened: Opened | Failed = first_reply(link, request, Opened, deadline)
        if isinstance(opened, Failed):
            raise FailedError(f"node {link.node!r}: {opened.reason}")
        if len(opened.blocks) != len(indices):
            raise FrameError(f"{len(opened.blocks)} answers to {len(indices)} keys")
        wanted: list[_Wanted] = []
        for index, block in zip(indices, opened.blocks, strict=True):
            if block is None:
                continue
            check_info(block[0])
            if block[0].key != keys[index]:
                raise FrameError("a block that was not asked for")
            if block[0].length > views[index].nbytes:
                continue
            if block[1] == 0 or block[0].length > self._landing.size_bytes // 2:
                over_tcp.append(index)
            else:
                wanted.append(_Wanted(index, *block))
        self._read_all(link, agent, wanted, views, got, deadline)
        send_frame(link.sock, Close(), deadline)
        recv_frame(link.sock, Done, deadline)

    def _read_all(
        self,
        link: Connection,
        agent: str,
        wanted: Sequence[_Wanted],
        views: Sequence[memoryview],
        got: list[BlockInfo | None],
        deadline: Deadline,
    ) -> None:
        before: _Read | None = None
        try:
            for batch in self._batches(wanted):
                read = self._begin(agent, batch, deadline)
                if before is not None:
                    previous, before = before, read
                    self._finish(previous, views, got, deadline)
                before = read
            if before is not None:
                last, before = before, None
                self._finish(last, views, got, deadline)
        except StoreError:
            if before is not None:
                self._abandon(before)
            self._forget_agent(link.node)
            raise

    def _batches(self, wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
        # Two reads of this fetch and those of another one find room at the same time.
        most, batch, size = self._landing.size_bytes // 4, list[_Wanted](), 0
        for one in wanted:
            if batch and size + one.info.length > most:
                yield batch
                batch, size = [], 0
            batch.append(one)
            size += one.info.length
        if batch:
            yield batch

    def _begin(self, agent: str, blocks: list[_Wanted], deadline: Deadline) -> _Read:
        span = self._landing.take(sum(one.info.length for one in blocks), deadline)
        if span is None:
            raise DeadlineError("no landing memory for a read")
        here, there = [], []
        address = self._landing.address + span.start
        for one in blocks:
            here.append((address, one.info.length, 0))
            there.append((one.address, one.info.length, 0))
            address += one.info.length
        try:
            with self._lock:
                handle = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(here, "DRAM"),
                    self._agent.get_xfer_descs(there, "DRAM"),
                    agent,
                )
        except Exception as error:
            self._landing.give_back(span)
            raise StoreUnavailableError(f"NIXL does not read: {type(error).__name__}") from None
        read = _Read(blocks, span, handle)
        try:
            with self._lock:
                state = self._agent.transfer(handle)
        except Exception as error:
            self._abandon(read)
            raise StoreUnavailableError(f"NIXL does not read: {type(error).__name__}") from None
        if state == "ERR":
            self._abandon(read)
            raise StoreUnavailableError("NIXL does not read")
        return read

    def _finish(
        self,
        read: _Read,
        views: Sequence[memoryview],
        got: list[BlockInfo | None],
        deadline: Deadline,
    ) -> None:
        pause_s = 20e-6
        while (state := self._state(read.handle)) == "PROC":
            if deadline.is_over:
                self._abandon(read)
                raise DeadlineError("out of time while reading")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
        if state != "DONE":
            self._abandon(read)
            raise StoreUnavailableError("a read ended with an error")
        landed = self._landing.view(read.span)
        start = 0
        for one in read.blocks:
            piece = landed[start : start + one.info.length]
            start += one.info.length
            if checksum(piece) == one.info.crc:
                views[one.index][: one.info.length] = piece
                got[one.index] = one.info
            else:
                self._peers.counters.add("corrupt_blocks")
        with self._lock:
            _quietly(self._agent.release_xfer_handle, read.handle)
        self._landing.give_back(read.span)

    def _state(self, handle: Any) -> str:
        try:
            with self._lock:
                return str(self._agent.check_xfer_state(handle))
        except Exception:  # NIXL raises for what went wrong at the other end
            return "ERR"

    def _abandon(self, read: _Read) -> None:
        """Cancels a read; its span is free once NIXL has let go of it."""

        def has_ended() -> bool:
            with self._lock:
                return _quietly(self._agent.release_xfer_handle, read.handle)

        if has_ended():
            self._landing.give_back(read.span)
        else:
            self._peers.counters.add("reads_not_ended")
            self._landing.keep_back(read.span, has_ended)

    def _agent_of(self, link: Connection, deadline: Deadline) -> str | None:
        """The agent at the other end, introduced if it is new; None if it has none."""
        known = self._remote.get(link.node)
        if known is not None and known[0] == link.incarnation:
            return known[1]
        described: Described | Failed = first_reply(link, Describe(), Described, deadline)
        if isinstance(described, Failed) or not described.blob:
            return None
        with self._lock:
            if known is not None:
                _quietly(self._agent.remove_remote_agent, known[1])
                self._remote.pop(link.node, None)
            try:
                added = self._agent.add_remote_agent(described.blob)
            except Exception as error:
                raise FrameError(
                    f"node {link.node!r}: no description of memory ({type(error).__name__})"
                ) from None
            name = added.decode() if isinstance(added, bytes) else str(added)
            if name != f"{link.node}/{link.incarnation}":
                _quietly(self._agent.remove_remote_agent, name)
                raise FrameError(f"node {link.node!r} describes the memory of another")
            self._remote[link.node] = (link.incarnation, name)
        return name

    def _forget_agent(self, node: str) -> None:
        with self._lock:
            known = self._remote.pop(node, None)
            if known is not None:
                _quietly(self._agent.remove_remote_agent, known[1])

    def _describe_arena(self) -> bytes:
        arena = self._agent.get_reg_descs([(*self._arena, 0, "arena")], "DRAM")
        blob: bytes = self._agent.get_partial_agent_metadata(arena, inc_conn_info=True)
        return blob


def _start_agent(name: str, backends: list[str]) -> Any:
    for module in _MODULES:
        try:
            api = importlib.import_module(module)
            break
        except ImportError:
            continue
    else:
        raise StoreSetupError("NIXL is not installed (package nixl)")
    try:
        config = api.nixl_agent_config(
            backends=backends, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        agent = api.nixl_agent(name, config)
    except Exception as error:
        raise StoreSetupError(f"NIXL cannot start with {', '.join(backends)}: {error}") from error
    missing = [backend for backend in backends if backend not in agent.backends]
    if missing:
        raise StoreSetupError(f"NIXL has no plug-in {', '.join(missing)} here")
    return agent


def _quietly(call: Any, argument: Any) -> bool:
    """Calls NIXL for something that may fail; whether it did not."""
    try:
        call(argument)
    except Exception as error:
        _log.debug("NIXL", kind=type(error).__name__)
        return False
    return True
