"""What a client asks of a node, be it in the same process or behind a unix socket."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from runtime.store.arena import SharedArena
from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline

MOST_SECONDS = 86_000.0


def deadline_of_call(seconds: float) -> Deadline:
    """That many seconds from now, a day at most: no call waits without an end.

    Raises:
        ValueError: If it is no number.
    """
    if math.isnan(seconds):
        raise ValueError("deadline_s: must be a number of seconds, found nan")
    return Deadline.after(min(seconds, MOST_SECONDS))


class SlotOfBlock(NamedTuple):
    """Where a block lies in the shared memory.

    Attributes:
        slot: Index of the slot.
        generation: Another number in the slot table means other bytes.
        info: The block.
    """

    slot: int
    generation: int
    info: BlockInfo


class Offered(NamedTuple):
    """Valid leading blocks under a lease; lease 0 and no blocks for a miss.

    Attributes:
        arena: The memory the slots are of: a server that starts again may have another.
    """

    lease_id: int
    blocks: Sequence[SlotOfBlock]
    arena: SharedArena | None = None


class Reserved(NamedTuple):
    """Room for blocks.

    Attributes:
        reservation_id: 0 if there is none.
        start: Position in the chain of the first block with room.
        slots: Slots of the blocks that have room, root first.
        reason: Why not all that were asked for have room.
        arena: The memory the slots are of.
    """

    reservation_id: int
    start: int
    slots: Sequence[int]
    reason: str
    arena: SharedArena | None = None


class StoreLink(Protocol):
    """One way to a node. Raises ``StoreUnavailableError`` or ``DeadlineError`` only."""

    @property
    def arena(self) -> SharedArena:
        """The shared memory of the node."""
        ...

    def lookup(self, keys: Sequence[bytes], deadline: Deadline) -> int:
        """How many leading blocks the pool holds."""
        ...

    def load(
        self,
        keys: Sequence[bytes],
        deadline: Deadline,
        category: int,
        is_checked: bool,
        tenant: bytes,
    ) -> Offered:
        """Hold the valid leading blocks; not ``is_checked``: the caller checks what it copies."""
        ...

    def doubt(self, key: bytes) -> None:
        """A block did not look right to a reader: check it, and drop it if it is broken."""
        ...

    def release(self, lease_id: int) -> None:
        """The reader is done."""
        ...

    def reserve(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        first: int,
        tenant: bytes,
        is_durable: bool,
        deadline: Deadline,
    ) -> Reserved:
        """Room for ``keys[first:]``, as far as they are new."""
        ...

    def commit(
        self, reservation_id: int, checksums: Sequence[int], is_durable: bool, deadline: Deadline
    ) -> int:
        """Blocks are written, with these checksums; how many leading ones are stored."""
        ...

    def abort(self, reservation_id: int) -> None:
        """Nothing will be written."""
        ...

    def flush(self, deadline: Deadline) -> bool:
        """Wait until all is sent to owners and on SSD; False if time ran out."""
        ...

    def stats(self, deadline: Deadline) -> Mapping[str, Any]:
        """Counts and gauges."""
        ...

    def close(self) -> None:
        """End leases, reservations and the link."""
        ...
