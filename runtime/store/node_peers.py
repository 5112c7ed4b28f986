"""A node as other nodes see it: gives blocks, takes regions, hears what the others hold."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from policies.prefix.directory import Held
from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.node import StoreNode
from runtime.store.node_memory import Room
from runtime.store.node_put import Reservation
from runtime.store.owner_sender import take_over
from runtime.store.peer_messages import Announcement, Removal

SSD_READ_S = 5.0  # of all blocks of one request


class NodePeers:
    """Handles the requests of other nodes; called from several threads."""

    def __init__(self, node: StoreNode) -> None:
        self._node, self._state = node, node.state
        self._holder = node.new_holder()
        self._reading: list[bytes] = []

    # --- blocks ----------------------------------------------------------------------------

    @contextmanager
    def open_blocks(
        self, keys: Sequence[bytes]
    ) -> Iterator[Sequence[tuple[BlockInfo, memoryview] | None]]:
        """The blocks that are here, pinned while open; those on SSD are read first."""
        with self._node.calls.running():
            yield from self._opened(keys)

    def _opened(
        self, keys: Sequence[bytes]
    ) -> Iterator[Sequence[tuple[BlockInfo, memoryview] | None]]:
        state = self._state
        with state.lock:
            to_flush = state.policy.read(keys, now=state.now()).flush
            found: list[Room | None] = [state.memory.get(key) for key in keys]
            state.leases.pin(keys)
        passing: list[Room] = []
        deadline = Deadline.after(SSD_READ_S)
        try:
            if to_flush:
                self._node.queue_flush([key for key in to_flush if isinstance(key, bytes)])
            for i, room in enumerate(found):
                if room is None and state.policy.on_ssd(keys[i]):
                    found[i] = self._read_from_ssd(keys[i], passing, deadline)
            yield [None if r is None else (r.info, state.memory.view(r)) for r in found]
        finally:
            with state.lock:
                state.leases.unpin(keys)
                state.memory.cancel(passing, now=state.now())
                state.tell()
            sent = [room.info.length for room in found if room is not None]
            state.counters.add("blocks_given", len(sent))
            state.counters.add("bytes_given", sum(sent))

    def _read_from_ssd(self, key: bytes, passing: list[Room], deadline: Deadline) -> Room | None:
        """The block, brought into memory; passing rooms are given back by the caller.

        The caller has pinned the blocks of the request.
        """
        state = self._state
        with state.lock:
            if (arrived := state.memory.get(key)) is not None:  # brought by a load meanwhile
                return arrived
            info = None if state.ssd is None else state.ssd.info(key)
            if info is None or state.policy.is_reserved(key) or state.ssd is None:
                return None
            rooms, _ = state.memory.reserve(
                [info], is_owned=True, pinned=state.leases, may_pass=True, now=state.now()
            )
            state.tell()
        if not rooms:
            return None
        room = rooms[0]
        read = None
        try:
            read = state.ssd.read_into(key, state.memory.view(room), deadline)
        finally:
            with state.lock:
                if read is None or read.length != room.info.length:
                    state.memory.cancel([room], now=state.now())
                    if key not in state.ssd:
                        state.policy.lost(key, "ssd", now=state.now())
                        state.gone(key, "ssd")
                elif room.is_kept:
                    state.memory.commit([replace(room, info=read)], now=state.now())
                    state.hold([read], "memory", is_owned=True)
                else:
                    passing.append(room)
                state.changed.notify_all()
        return replace(room, info=read) if read is not None and read.length == info.length else None

    @contextmanager
    def receive_region(
        self, infos: Sequence[BlockInfo], writer: str, is_owned: bool, deadline: Deadline
    ) -> Iterator[_Incoming]:
        """Room for a region of a writer; what is here already is taken and thrown away."""
        with self._node.calls.running():
            yield from self._received(infos, is_owned, deadline)

    def _received(
        self, infos: Sequence[BlockInfo], is_owned: bool, deadline: Deadline
    ) -> Iterator[_Incoming]:
        state = self._state
        with state.lock:
            here = 0
            while here < len(infos) and state.memory.get(infos[here].key) is not None:
                here += 1
            known = [info.key for info in infos[:here]]
            state.leases.pin(known)  # first: the rest must not push them out
            try:
                reservation = self._node.receive(
                    infos[here:], is_owned=is_owned, holder=self._holder
                )
            except BaseException:
                state.leases.unpin(known)
                raise
        try:
            yield _Incoming(self._node, self._holder, infos, here, reservation, is_owned, deadline)
        finally:
            self._node.abort(reservation.reservation_id, self._holder)
            with state.lock:
                state.leases.unpin(known)
                state.tell()

    # --- directory -------------------------------------------------------------------------

    def announced(
        self,
        node: str,
        incarnation: int,
        added: Sequence[Announcement],
        removed: Sequence[Removal],
    ) -> None:
        """Enter what another node has come to hold and gave up."""
        state = self._state
        with state.lock:
            now = state.now()
            is_live = node in state.weights
            for change in added:
                held = Held(change.region, change.index, change.depth, change.length)
                is_entered = state.directory.add(
                    node,
                    incarnation,
                    change.key,
                    held,
                    tier=change.tier,
                    is_owned=change.is_owned,
                )
                if is_entered and is_live and change.tier == "memory":
                    state.policy.set_elsewhere(change.key, True, now=now)
            for gone in removed:
                if state.directory.discard(node, incarnation, gone.key, tier=gone.tier):
                    state.reprice(gone.key)

    def retained(self, node: str, incarnation: int, kept: Collection[tuple[bytes, str]]) -> None:
        """Another node has said all that it holds: forget the rest."""
        state = self._state
        with state.lock:
            for holding in state.directory.holdings(node):
                key = holding.key
                if (
                    isinstance(key, bytes)
                    and (key, holding.tier) not in kept
                    and state.directory.discard(node, incarnation, key, tier=holding.tier)
                ):
                    state.reprice(key)

    def directory_page(self, after: bytes, limit: int) -> Sequence[Announcement]:
        """What this node holds, by ascending key.

        The order of keys is made once a reading, at its first page; blocks that came since then are
        announced anyway.
        """
        state = self._state
        if not after or not self._reading:
            with state.lock:
                held = state.directory.holdings(state.config.node)
                keys = {holding.key: None for holding in held if isinstance(holding.key, bytes)}
            self._reading = sorted(keys)
        reading = self._reading
        start = bisect.bisect_right(reading, after) if after else 0
        page: list[Announcement] = []
        with state.lock:
            for at in range(start, len(reading)):
                if limit <= 0:
                    break
                copies = self._own_copies(reading[at])
                page += copies
                limit -= bool(copies)
        if not page:
            self._reading = []
        return page

    def _own_copies(self, key: bytes) -> list[Announcement]:
        here, directory = self._state.config.node, self._state.directory
        found = []
        for copy in directory.copies(key):
            held = directory.held_at(key, here, copy.tier) if copy.node == here else None
            if held is not None:
                found.append(
                    Announcement(
                        key=key,
                        region=_region(held, key),
                        index=held.index,
                        depth=held.depth,
                        length=held.length,
                        tier=copy.tier,
                        is_owned=copy.is_owned,
                    )
                )
        return found

    # --- members ---------------------------------------------------------------------------

    def joined(self, node: str, incarnation: int, weight: float) -> None:
        """A node is there, or there again: it may be asked and may own."""
        state = self._state
        with state.lock:
            state.weights[node] = weight
            for holding in state.directory.holdings(node):  # said before it was known to live
                state.reprice(holding.key)

    def left(self, node: str) -> None:
        """A node is gone: copies of its blocks are promoted, its own are forgotten."""
        state = self._state
        flush: list[bytes] = []
        with self._node.calls.ending() as is_there, state.lock:
            if not is_there:
                return
            state.weights.pop(node, None)
            promoted = state.directory.promotions(node, state.weights)
            orphans = [h.key for h in state.directory.holdings(node) if isinstance(h.key, bytes)]
            state.directory.forget_node(node)
            for key in orphans:
                state.reprice(key)
            mine = promoted.get(state.config.node, ())
            flush = take_over(state, [key for key in mine if isinstance(key, bytes)])
            state.counters.add("nodes_lost")
            state.tell()
        if flush:
            self._node.queue_flush(flush)


class _Incoming:
    """Room for the leading blocks of an incoming region."""

    def __init__(
        self,
        node: StoreNode,
        holder: int,
        infos: Sequence[BlockInfo],
        here: int,
        reservation: Reservation,
        is_owned: bool,
        deadline: Deadline,
    ) -> None:
        self._node, self._holder, self._reservation = node, holder, reservation
        self._infos, self._here, self._is_owned = infos, here, is_owned
        self._deadline = deadline
        memory = node.state.memory
        # What is here already is received all the same, one block over the other.
        scratch = memoryview(bytearray(max((info.length for info in infos[:here]), default=0)))
        thrown = [scratch[: info.length] for info in infos[:here]]
        self.buffers: Sequence[memoryview] = thrown + [
            memory.view(room) for room in reservation.rooms
        ]

    def commit(self) -> int:
        """Make the blocks visible: their checksums were found right."""
        state = self._node.state
        new = self._infos[self._here : len(self.buffers)]
        stored = self._here
        if new:
            stored += self._node.commit(
                self._reservation.reservation_id,
                [info.crc for info in new],
                holder=self._holder,
                deadline=self._deadline,
            )
        if self._is_owned and self._here:
            with state.lock:
                flush = take_over(state, [info.key for info in self._infos[: self._here]])
            if flush:
                self._node.queue_flush(flush)
        return stored


def _region(held: Held, key: bytes) -> bytes:
    return held.region if isinstance(held.region, bytes) else key
