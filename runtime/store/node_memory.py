"""The blocks in a node's shared memory: where the policy's orders become slots.

Not thread-safe: the node calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from policies.prefix.store_orders import NewBlock, Victim
from policies.prefix.store_policy import StorePolicy
from runtime.store.arena import SharedArena, SlotAllocator
from runtime.store.blocks import BlockInfo
from runtime.store.counters import Counters


@dataclass(frozen=True, slots=True)
class Room:
    """A slot that waits for its block, or holds it.

    Attributes:
        info: The block (its checksum is known once the bytes are there).
        slot: Index of the slot.
        generation: Of the slot; another number means other bytes.
        is_kept: Whether the policy knows of it; else the slot serves one load or put only.
        is_owned: Whether this node answers for the block.
    """

    info: BlockInfo
    slot: int
    generation: int
    is_kept: bool
    is_owned: bool


class NodeMemory:
    """Slots, by key, under the policy's orders."""

    def __init__(
        self,
        arena: SharedArena,
        policy: StorePolicy,
        counters: Counters,
        on_gone: Callable[[bytes], None],
    ) -> None:
        """Start with what the caller recovers.

        Args:
            arena: The shared memory.
            policy: Decides what stays.
            counters: Of the node.
            on_gone: Called with the key of every block that leaves memory.
        """
        self.arena, self._policy, self._counters = arena, policy, counters
        self._allocator = SlotAllocator(arena.num_slots)
        self._on_gone = on_gone
        self._rooms: dict[bytes, Room] = {}
        self._left_slots: list[int] = []
        self._num_withheld = 0

    def get(self, key: bytes) -> Room | None:
        """Where a committed block is; None if it is not in memory."""
        return self._rooms.get(key)

    def view(self, room: Room) -> memoryview:
        """The bytes of a block."""
        return self.arena.slot(room.slot, room.info.length)

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def num_free_slots(self) -> int:
        """Slots that hold nothing."""
        return self._allocator.num_free

    def rooms(self) -> Iterable[Room]:
        """All committed blocks."""
        return self._rooms.values()

    def reserve(
        self,
        infos: Sequence[BlockInfo],
        *,
        is_owned: bool,
        pinned: Collection[bytes],
        may_pass: bool,
        now: float,
    ) -> tuple[list[Room], str]:
        """Slots for new blocks of one chain, root first.

        Args:
            infos: The blocks; none is in memory.
            is_owned: Whether this node is to answer for them.
            pinned: Blocks that may not go.
            may_pass: Whether blocks that the policy does not keep get a slot for the time being.
            now: Seconds.

        Returns:
            Rooms of the leading blocks, and why there are not more: "" if there are.
        """
        size = self.arena.slot_bytes
        orders = self._policy.reserve(
            [_as_new_block(info, is_owned, size) for info in infos], pinned=pinned, now=now
        )
        self._give_up(orders.victims)
        kept = self._allocator.take(orders.admitted)
        rooms = self._rooms_of(infos, kept, is_kept=True, is_owned=is_owned)
        if len(kept) < orders.admitted:  # slots of passing blocks are short-lived, but count
            self._policy.cancel([i.key for i in infos[len(kept) : orders.admitted]], now=now)
            return rooms, "full"
        rest = infos[orders.admitted :]
        if rest and may_pass and orders.refusal != "quota":
            passing = self._allocator.take(len(rest))
            rooms += self._rooms_of(rest, passing, is_kept=False, is_owned=is_owned)
        return rooms, "" if len(rooms) == len(infos) else orders.refusal or "full"

    def _rooms_of(
        self, infos: Sequence[BlockInfo], slots: Sequence[int], *, is_kept: bool, is_owned: bool
    ) -> list[Room]:
        table = self.arena.table
        return [
            Room(info, slot, table.renew(slot), is_kept, is_owned)
            for info, slot in zip(infos, slots, strict=False)
        ]

    def _give_up(self, victims: Iterable[Victim]) -> None:
        for victim in victims:
            assert isinstance(victim.key, bytes)
            self._free(self._rooms.pop(victim.key))
            self._on_gone(victim.key)
            self._counters.add("blocks_evicted")
            if victim.is_lost:
                self._counters.add("blocks_evicted_last_copy")

    def commit(self, rooms: Sequence[Room], *, now: float) -> tuple[bytes, ...]:
        """Blocks of kept rooms (root first) are in place; the keys to be written to SSD."""
        for room in rooms:
            self.arena.table.write(room.slot, room.info, "owned" if room.is_owned else "replica")
            self._rooms[room.info.key] = room
        flush = self._policy.commit([room.info.key for room in rooms], now=now).flush
        return tuple(key for key in flush if isinstance(key, bytes))

    def cancel(self, rooms: Iterable[Room], *, now: float) -> None:
        """Rooms whose blocks will not come, or that have served their load."""
        rooms = list(rooms)
        self._policy.cancel([room.info.key for room in rooms if room.is_kept], now=now)
        for room in rooms:
            self._free(room)

    def withdraw(self, rooms: Sequence[Room], *, now: float) -> None:
        """Blocks will not come, but their slots may still be written to: see ``give_back``."""
        kept = [room.info.key for room in rooms if room.is_kept]
        self._policy.cancel(kept, now=now)
        self._withhold(len(kept), now)

    def lend(self, rooms: Iterable[Room]) -> None:
        """A client is to write to these slots; also the next server is to know."""
        for room in rooms:
            self.arena.table.lend(room.slot)

    @property
    def num_left_slots(self) -> int:
        """Slots that clients of an earlier server may still be writing to."""
        return len(self._left_slots)

    def give_back_left(self, *, now: float) -> None:
        """The clients of the earlier server are done by now."""
        slots, self._left_slots = self._left_slots, []
        self._withhold(-len(slots), now)
        for slot in slots:
            self.arena.table.renew(slot)
        self._allocator.give_back(slots)

    def give_back(self, rooms: Sequence[Room], *, now: float) -> None:
        """Nobody writes to these withdrawn slots any more."""
        self._withhold(-sum(room.is_kept for room in rooms), now)
        for room in rooms:
            self._free(room)

    def _withhold(self, more_slots: int, now: float) -> None:
        """The policy is not to count on slots that late writers may still write to."""
        self._num_withheld += more_slots
        if more_slots:
            self._policy.withhold(self._num_withheld * self.arena.slot_bytes, now=now)

    def forget(self, key: bytes, *, now: float) -> None:
        """A block turned out broken; unknown keys are ignored."""
        room = self._rooms.pop(key, None)
        if room is not None:
            self._policy.lost(key, "memory", now=now)
            self._free(room)
            self._on_gone(key)

    def own(self, key: bytes) -> None:
        """The block is this node's own from now on: its record says so, also after a restart."""
        room = self._rooms.get(key)
        if room is not None and not room.is_owned:
            owned = Room(room.info, room.slot, room.generation, room.is_kept, True)
            self._rooms[key] = owned
            self.arena.table.write(room.slot, room.info, "owned")

    def _free(self, room: Room) -> None:
        self.arena.table.renew(room.slot)
        self._allocator.give_back([room.slot])

    def recover(self, *, now: float) -> list[Room]:
        """Take over the blocks that an earlier server left in the arena; parents first.

        Slots that its clients were writing to serve nobody before ``give_back_left``.
        """
        found: dict[bytes, tuple[int, BlockInfo, bool]] = {}
        for slot in range(self.arena.num_slots):
            record = self.arena.table.read(slot)
            if record is not None and record[0].key not in found:
                found[record[0].key] = (slot, record[0], record[1] == "owned")
        rooms = []
        for slot, info, is_owned in sorted(found.values(), key=lambda f: (f[1].depth, f[0])):
            block = _as_new_block(info, is_owned, self.arena.slot_bytes)
            if info.length > self.arena.slot_bytes or not self._policy.recover(
                [block], "memory", now=now
            ):
                continue
            self._allocator.take_these([slot])
            room = Room(info, slot, self.arena.table.generation(slot), True, is_owned)
            self._rooms[info.key] = room
            rooms.append(room)
        kept = {room.slot for room in rooms}
        for slot in range(self.arena.num_slots):
            if self.arena.table.is_lent(slot):
                self._left_slots.append(slot)
            elif slot not in kept:
                self.arena.table.renew(slot)
        self._allocator.take_these(self._left_slots)
        self._withhold(len(self._left_slots), now)
        return rooms


def _as_new_block(info: BlockInfo, is_owned: bool, size_bytes: int) -> NewBlock:
    return NewBlock(
        key=info.key,
        parent=info.parent or None,
        depth=info.depth,
        size_bytes=size_bytes,
        is_owned=is_owned,
        tenant=info.tenant or None,
    )
