"""How blocks come into a node: room first, then bytes, then visible."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import msgspec

from policies.prefix.put_plan import plan_put
from runtime.store.blocks import BlockInfo
from runtime.store.leases import Holder
from runtime.store.node_memory import Room
from runtime.store.node_state import NodeState

TENANT_BYTES = 16
PutReason = Literal[
    "", "exists", "busy", "full", "quota", "orphan", "size", "late", "rule", "unavailable", "no_ssd"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Room for the new end of a chain.

    Attributes:
        reservation_id: Number of the reservation.
        holder: Who is to write.
        start: Position in the chain of the first block with room.
        rooms: Of the blocks that have room.
        owner: Node that is to answer for the region.
        reason: Why not all blocks that were asked for have room; "" if they have.
        ends_s: When it expires, on the store's clock.
    """

    reservation_id: int
    holder: Holder
    start: int
    rooms: tuple[Room, ...]
    owner: str
    reason: PutReason
    ends_s: float


class Writer:
    """Reservations of one node."""

    def __init__(
        self,
        state: NodeState,
        flush: Callable[[Sequence[bytes]], None],
        send_to_owner: Callable[[str, Sequence[Room]], None],
    ) -> None:
        """Start with none.

        Args:
            state: Of the node.
            flush: Queues blocks to be written to SSD.
            send_to_owner: Queues blocks to be sent to their owner.
        """
        self._state, self._flush, self._send = state, flush, send_to_owner
        # All last equally long: in the order of their ends, too.
        self._open: OrderedDict[int, Reservation] = OrderedDict()
        self._overdue: dict[int, Reservation] = {}
        # A writer of an earlier start must not commit a reservation of this one.
        self._next_id = state.incarnation

    def reserve(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        *,
        first: int,
        tenant: bytes,
        holder: Holder,
        is_here: bool = False,
    ) -> Reservation:
        """Room for ``keys[first:]``, as far as they are new.

        Args:
            keys: The whole chain from its root.
            lengths: Bytes of the blocks of ``keys[first:]``.
            first: Position of the first block that the writer has.
            tenant: Tag of the tenant.
            holder: Who writes.
            is_here: Whether this node answers for them, whatever the owner rule says, and has to
                bring them to its SSD.

        Raises:
            ValueError: If no tenant has such a tag.
        """
        state = self._state
        require_tenant(tenant)
        with state.lock:
            self.expire()
            plan = plan_put(
                keys,
                state.directory,
                block_bytes=state.memory.arena.slot_bytes,
                rule=state.owner_rule,
                writer=state.config.node,
                weights=state.weights,
                live=state.weights,
            )
            start = max(first, plan.lcp)
            if is_here and state.ssd is None:
                return self._refused(holder, start, "no_ssd")
            if first > plan.lcp:
                return self._refused(holder, start, "orphan")
            if start >= len(keys):
                return self._refused(holder, start, "exists")
            end = start
            seen = dict.fromkeys(keys[:start])
            while end < len(keys) and self._is_new(keys[end]) and keys[end] not in seen:
                if lengths[end - first] > state.memory.arena.slot_bytes:
                    break
                seen[keys[end]] = None
                end += 1
            if end == start:
                is_large = lengths[start - first] > state.memory.arena.slot_bytes
                return self._refused(holder, start, "size" if is_large else "busy")
            region = keys[start]
            owner = state.config.node if is_here else plan.owner or state.config.node
            infos = [
                BlockInfo(
                    key=keys[i],
                    parent=keys[i - 1] if i else b"",
                    region=region,
                    index=i - start,
                    depth=i,
                    length=lengths[i - first],
                    crc=0,
                    tenant=tenant,
                )
                for i in range(start, end)
            ]
            is_owned = owner == state.config.node
            return self._place(infos, is_owned, owner, keys, start, holder)

    def receive(self, infos: Sequence[BlockInfo], *, is_owned: bool, holder: Holder) -> Reservation:
        """Room for a region that another node sends; its leading new blocks.

        Raises:
            ValueError: If no tenant has the tag of one.
        """
        state = self._state
        for info in infos:
            require_tenant(info.tenant)
        with state.lock:
            self.expire()
            end = 0
            seen: dict[bytes, None] = {}
            while end < len(infos) and self._is_absent(infos[end].key):
                if infos[end].length > state.memory.arena.slot_bytes or infos[end].key in seen:
                    break
                seen[infos[end].key] = None
                end += 1
            if end == 0:
                return self._refused(holder, 0, "exists")
            chain = [info.key for info in infos]
            return self._place(infos[:end], is_owned, state.config.node, chain, 0, holder)

    def _place(
        self,
        infos: Sequence[BlockInfo],
        is_owned: bool,
        owner: str,
        chain: Sequence[bytes],
        start: int,
        holder: Holder,
    ) -> Reservation:
        state = self._state
        now = state.now()
        rooms, reason = state.memory.reserve(
            infos,
            is_owned=is_owned,
            pinned=state.pin_chain(chain),
            may_pass=owner != state.config.node,
            now=now,
        )
        state.tell()
        if not rooms:
            state.counters.add(f"puts_refused_{reason or 'full'}")
            return self._refused(holder, start, _reason(reason))
        reservation = Reservation(
            reservation_id=self._next_id,
            holder=holder,
            start=start,
            rooms=tuple(rooms),
            owner=owner,
            reason=_reason(reason),
            ends_s=now + state.config.reservation_s,
        )
        state.memory.lend(rooms)
        self._next_id += 1
        self._open[reservation.reservation_id] = reservation
        return reservation

    def _is_new(self, key: bytes) -> bool:
        return not self._state.policy.is_reserved(key) and not self._state.is_stored(key)

    def _is_absent(self, key: bytes) -> bool:
        return not self._state.policy.is_reserved(key) and self._state.memory.get(key) is None

    def _refused(self, holder: Holder, start: int, reason: PutReason) -> Reservation:
        self._state.counters.add(f"puts_{reason}")
        return Reservation(
            reservation_id=0,
            holder=holder,
            start=start,
            rooms=(),
            owner="",
            reason=reason,
            ends_s=0.0,
        )

    def commit(
        self, reservation_id: int, checksums: Sequence[int], holder: Holder
    ) -> tuple[Room, ...]:
        """The leading blocks of a reservation are written; they become visible now.

        Args:
            reservation_id: Of ``reserve``.
            checksums: CRC32C of each block that was written, root first; others are given back.
            holder: Who wrote.

        Returns:
            Rooms of the blocks that are stored; none if the reservation had expired.

        Raises:
            ValueError: If one is no checksum; the reservation stays as it was.
        """
        state = self._state
        require_checksums(checksums)
        with state.lock:
            self.expire()
            reservation = self._open.get(reservation_id)
            if reservation is None or reservation.holder != holder:
                state.counters.add("puts_late")
                self._end_overdue(reservation_id, holder)
                return ()
            del self._open[reservation_id]
            now = state.now()
            written = [
                replace(room, info=msgspec.structs.replace(room.info, crc=crc))
                for room, crc in zip(reservation.rooms, checksums, strict=False)
            ]
            state.memory.cancel(reservation.rooms[len(written) :], now=now)
            kept = [room for room in written if room.is_kept]
            flush = state.memory.commit(kept, now=now)
            if kept:
                state.hold([r.info for r in kept], "memory", is_owned=kept[0].is_owned)
            state.counters.add("blocks_stored", len(written))
            state.counters.add("bytes_stored", sum(room.info.length for room in written))
            if reservation.owner != state.config.node and written:
                state.leases.pin(room.info.key for room in kept)
                self._send(reservation.owner, written)
            state.changed.notify_all()
        if flush:
            self._flush(flush)
        return tuple(written)

    def abort(self, reservation_id: int, holder: Holder) -> None:
        """Nothing will be written; a reservation that is gone already is no error."""
        with self._state.lock:
            reservation = self._open.get(reservation_id)
            if reservation is not None and reservation.holder == holder:
                self._cancel(reservation)
            self._end_overdue(reservation_id, holder)

    def abort_all(self, holder: Holder) -> int:
        """A writer went away; how many reservations it left."""
        with self._state.lock:
            left = [r for r in self._open.values() if r.holder == holder]
            for reservation in left:
                self._cancel(reservation)
            overdue = [r for r in self._overdue.values() if r.holder == holder]
            for reservation in overdue:
                self._end_overdue(reservation.reservation_id, holder)
            return len(left) + len(overdue)

    def expire(self) -> None:
        """Reservations that are over lose their claim, and leases end.

        A writer that is late may still be writing, so its slots serve nobody else until it commits
        (in vain), gives up or goes away; its blocks may be stored by others at once.
        """
        state = self._state
        with state.lock:
            now = state.now()
            over = list(takewhile(lambda r: r.ends_s <= now, self._open.values()))
            for reservation in over:
                del self._open[reservation.reservation_id]
                state.memory.withdraw(reservation.rooms, now=now)
                self._overdue[reservation.reservation_id] = reservation
            if over:
                state.changed.notify_all()
            state.counters.add("reservations_expired", len(over))
            state.counters.add("leases_expired", state.leases.expire(now))
            if state.memory.num_left_slots and now >= state.config.reservation_s:
                state.memory.give_back_left(now=now)

    def _cancel(self, reservation: Reservation) -> None:
        del self._open[reservation.reservation_id]
        self._state.memory.cancel(reservation.rooms, now=self._state.now())
        self._state.changed.notify_all()

    def _end_overdue(self, reservation_id: int, holder: Holder) -> None:
        reservation = self._overdue.get(reservation_id)
        if reservation is not None and reservation.holder == holder:
            del self._overdue[reservation_id]
            self._state.memory.give_back(reservation.rooms, now=self._state.now())

    @property
    def num_overdue_blocks(self) -> int:
        """Slots that late writers, or those of an earlier server, may still be writing to."""
        overdue = sum(len(reservation.rooms) for reservation in self._overdue.values())
        return overdue + self._state.memory.num_left_slots

    @property
    def num_open(self) -> int:
        """Reservations that are neither committed nor given back."""
        return len(self._open)


def require_checksums(checksums: Sequence[int]) -> None:
    """Refuse what cannot be the CRC32C of a block, before anything changes.

    Raises:
        ValueError: If one is no whole number of 32 bits.
    """
    for number, crc in enumerate(checksums):
        if not isinstance(crc, int) or not 0 <= crc < 2**32:
            raise ValueError(f"checksum {number} must be a whole number of 32 bits, found {crc!r}")


def require_tenant(tenant: bytes) -> None:
    """Refuse what cannot be the tag of a tenant.

    Raises:
        ValueError: If it is neither empty nor of the length of a tag.
    """
    if not isinstance(tenant, bytes) or len(tenant) not in (0, TENANT_BYTES):
        found = f"{len(tenant)} bytes" if isinstance(tenant, bytes) else type(tenant).__name__
        raise ValueError(f"tenant must be 0 or {TENANT_BYTES} bytes, found {found}")


def _reason(reason: str) -> PutReason:
    known: dict[str, PutReason] = {"": "", "full": "full", "quota": "quota", "rule": "rule"}
    return known.get(reason, "full")
