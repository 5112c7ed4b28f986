"""How blocks get to a reader: pinned in memory, or brought there first; checked before reported.

A load answers how many leading blocks are valid and holds them under a lease. The first block that
is late, lost or broken ends the prefix: what lies behind it is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, replace

import structlog

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.deadline import Deadline
from runtime.store.leases import Holder, Lease
from runtime.store.node_memory import Room
from runtime.store.node_sources import Source, choose_sources
from runtime.store.node_state import NodeState

_log = structlog.get_logger("store")
FetchMany = Callable[
    [Mapping[str, tuple[Sequence[bytes], Sequence[memoryview]]], Deadline],
    Mapping[str, Sequence[BlockInfo | None]],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Valid leading blocks, held for a reader.

    Attributes:
        lease: Ends when the reader is done; None if there are no blocks.
        rooms: Of the blocks, root first.
    """

    lease: Lease | None
    rooms: tuple[Room, ...]


class Loader:
    """Loads of one node."""

    def __init__(
        self,
        state: NodeState,
        executor: Executor,
        fetch: FetchMany | None,
        flush: Callable[[Sequence[bytes]], None],
    ) -> None:
        """Set the loader up.

        Args:
            state: Of the node.
            executor: Runs fetches beside SSD reads and checks.
            fetch: Brings blocks from other nodes into memory, checked; None: there are none.
            flush: Queues blocks to be written to SSD.
        """
        self._state, self._executor = state, executor
        self._fetch, self._flush = fetch, flush

    def load(
        self,
        keys: Sequence[bytes],
        *,
        holder: Holder,
        deadline: Deadline,
        category: int = 0,
        is_checked: bool = True,
        tenant: bytes = b"",
    ) -> Offer:
        """Hold the valid leading blocks of a chain for a reader.

        Args:
            keys: The whole chain.
            holder: Who reads.
            deadline: When to make do with what is there.
            category: Kind of request.
            is_checked: Whether to check blocks that are in memory; else the reader does so while
                it copies them. Blocks from elsewhere are always checked on arrival.
            tenant: Whose quota blocks count against that are brought into memory.
        """
        state, is_told = self._state, False
        pinned: list[bytes] = []
        sources: list[Source] = []
        brought: dict[int, Room] = {}
        arrived: dict[int, Room] = {}
        try:
            with state.lock:
                state.leases.expire(state.now())
                to_flush = state.policy.read(
                    keys, now=state.now(), category=category, tenant=tenant or None
                ).flush
                sources = choose_sources(state, keys, tenant)
                state.counters.add("lookups")
                state.counters.add("blocks_asked", len(keys))
                # Also those on their way are pinned: they may not go again.
                pinned = [source.info.key for source in sources]
                state.leases.pin(pinned)
                self._make_room(sources, brought, keys)
            if to_flush:
                self._flush([key for key in to_flush if isinstance(key, bytes)])
            self._bring(sources, brought, arrived, deadline, is_checked)
            self._settle(brought, arrived)  # before waiting: others may wait for these
            self._await_others(sources, arrived, deadline)
            is_told = True
        finally:
            with state.lock:
                try:
                    offer = self._offer(sources, brought, arrived, holder)
                    if not is_told and offer.lease is not None:  # nobody will ever close it
                        state.leases.close(offer.lease.lease_id, holder)
                finally:
                    state.leases.unpin(pinned)
                    state.tell()
        return offer

    def _make_room(
        self, sources: Sequence[Source], brought: dict[int, Room], keys: Sequence[bytes]
    ) -> None:
        """Slots for the blocks that are elsewhere, root first, as far as there is room."""
        state = self._state
        position, pinned = 0, state.pin_chain(keys)
        while position < len(sources):
            if sources[position].place not in ("ssd", "remote"):
                position += 1
                continue
            end, place = position, sources[position].place
            while end < len(sources) and sources[end].place == place:
                end += 1
            found, _ = state.memory.reserve(
                [sources[i].info for i in range(position, end)],
                is_owned=place == "ssd",
                pinned=pinned,
                may_pass=True,
                now=state.now(),
            )
            brought.update(enumerate(found, position))
            if position + len(found) < end:
                state.counters.add("loads_without_room")
                break
            position = end

    def _bring(
        self,
        sources: Sequence[Source],
        brought: Mapping[int, Room],
        arrived: dict[int, Room],
        deadline: Deadline,
        is_checked: bool,
    ) -> None:
        """Enter blocks that are in place and right; nothing writes to slots afterwards."""
        fetch = self._start_fetch(sources, brought, deadline)
        try:
            self._bring_local(sources, brought, arrived, deadline, is_checked)
        finally:
            if fetch is not None:
                wait([fetch], timeout=deadline.left_s())
                if not fetch.cancel():  # it runs, and ends by the deadline itself
                    wait([fetch])
        if fetch is not None:
            arrived |= self._fetched(fetch, sources, brought)

    def _bring_local(
        self,
        sources: Sequence[Source],
        brought: Mapping[int, Room],
        arrived: dict[int, Room],
        deadline: Deadline,
        is_checked: bool,
    ) -> None:
        for i, source in enumerate(sources):
            if (room := source.room) is not None:
                if deadline.is_over:
                    break
                if not is_checked or checksum(self._state.memory.view(room)) == room.info.crc:
                    arrived[i] = room
                else:
                    with self._state.lock:
                        self._state.forget_broken(room)
        for i, room in brought.items():
            if sources[i].place == "ssd" and not deadline.is_over:
                read = self._read_ssd(room, deadline)
                if read is not None:
                    arrived[i] = read

    def _read_ssd(self, room: Room, deadline: Deadline) -> Room | None:
        state = self._state
        assert state.ssd is not None
        info = state.ssd.read_into(room.info.key, state.memory.view(room), deadline)
        if info is None or info.length != room.info.length:
            state.counters.add("blocks_missed_on_ssd")
            with state.lock:
                if room.info.key not in state.ssd:
                    state.policy.lost(room.info.key, "ssd", now=state.now())
                    state.gone(room.info.key, "ssd")
            return None
        state.counters.add("bytes_read_from_ssd", info.length)
        return replace(room, info=info)

    def _start_fetch(
        self, sources: Sequence[Source], brought: Mapping[int, Room], deadline: Deadline
    ) -> Future[Mapping[str, Sequence[BlockInfo | None]]] | None:
        requests: dict[str, tuple[list[bytes], list[memoryview]]] = {}
        for i, room in brought.items():
            if sources[i].place == "remote":
                keys, views = requests.setdefault(sources[i].node, ([], []))
                keys.append(room.info.key)
                views.append(self._state.memory.view(room))
        if not requests or self._fetch is None:
            return None
        return self._executor.submit(self._fetch, requests, deadline)

    def _fetched(
        self,
        fetch: Future[Mapping[str, Sequence[BlockInfo | None]]],
        sources: Sequence[Source],
        brought: Mapping[int, Room],
    ) -> dict[int, Room]:
        """Rooms that a fetch has filled, if it ended well."""
        state = self._state
        if fetch.cancelled():
            state.counters.add("fetches_not_started")
            return {}
        if (error := fetch.exception()) is not None:
            state.counters.add("fetches_failed")
            _log.error("fetch failed", error=type(error).__name__)
            return {}
        answers = {node: iter(infos) for node, infos in fetch.result().items()}
        right: dict[int, Room] = {}
        for i, room in brought.items():
            if sources[i].place != "remote":
                continue
            info = next(answers[sources[i].node], None) if sources[i].node in answers else None
            if info is None or info.key != room.info.key or info.length != room.info.length:
                state.counters.add("blocks_missed_remote")
                continue
            state.counters.add("bytes_fetched", info.length)
            right[i] = replace(room, info=info)
        return right

    def _await_others(
        self, sources: Sequence[Source], arrived: dict[int, Room], deadline: Deadline
    ) -> None:
        """Enter blocks that other loads were bringing."""
        state = self._state
        for i, source in enumerate(sources):
            if source.place != "coming":
                continue
            key = source.info.key
            with state.lock:
                while state.policy.is_reserved(key) and not deadline.is_over:
                    state.changed.wait(deadline.left_s())
                room = state.memory.get(key)
            if room is None:
                break
            if checksum(state.memory.view(room)) == room.info.crc:
                arrived[i] = room

    def _settle(self, brought: dict[int, Room], arrived: Mapping[int, Room]) -> None:
        """Blocks that were brought and are to stay are there for everybody."""
        state = self._state
        with state.lock:
            kept = [i for i in sorted(arrived) if i in brought and arrived[i].is_kept]
            for is_owned in (True, False):
                part = [arrived[i] for i in kept if arrived[i].is_owned == is_owned]
                if part:
                    state.memory.commit(part, now=state.now())
                    state.hold([room.info for room in part], "memory", is_owned=is_owned)
            for i in kept:
                del brought[i]
            if kept:
                state.changed.notify_all()

    def _offer(
        self,
        sources: Sequence[Source],
        brought: dict[int, Room],
        arrived: Mapping[int, Room],
        holder: Holder,
    ) -> Offer:
        """Hold the valid leading blocks; nothing else stays reserved. Under the lock."""
        state = self._state
        now = state.now()
        self._settle(brought, arrived)
        leading = 0
        while leading < len(sources) and self._is_valid(arrived.get(leading)):
            leading += 1
        valid = [arrived[i] for i in range(leading)]
        passing = [room for room in valid if not room.is_kept]
        unused = [
            room
            for i, room in brought.items()
            if i not in arrived or (i >= leading and not room.is_kept)
        ]
        state.memory.cancel(unused, now=now)
        self._count(sources, leading)
        state.changed.notify_all()
        if not valid:
            return Offer(lease=None, rooms=())
        lease = state.leases.open(
            holder,
            [room.info.key for room in valid if room.is_kept],
            passing,
            now + state.config.lease_s,
        )
        return Offer(lease=lease, rooms=tuple(valid))

    def _is_valid(self, room: Room | None) -> bool:
        """Whether the slot still holds the block that was checked."""
        return (
            room is not None
            and self._state.memory.arena.table.generation(room.slot) == room.generation
        )

    def _count(self, sources: Sequence[Source], leading: int) -> None:
        names = {"memory": "memory", "coming": "memory", "ssd": "ssd", "remote": "remote"}
        hits = Counter(
            "replica"
            if source.room is not None and not source.room.is_owned
            else names[source.place]
            for source in sources[:leading]
        )
        for name, count in hits.items():
            self._state.counters.add(f"blocks_hit_{name}", count)
        self._state.counters.add("blocks_hit", leading)
