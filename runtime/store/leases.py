"""Who is reading which blocks, so that nothing is reused under a reader's eyes.

Pins belong to leases and leases to holders (connections): when a holder goes, for whatever reason,
all its pins go. A lease also ends by itself, so that a reader that hangs cannot keep memory for
ever; it then finds the generation of its slots changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from runtime.store.node_memory import Room

Holder = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Blocks that a reader holds.

    Attributes:
        lease_id: Number of the lease.
        holder: Who holds it.
        keys: The blocks that stay in memory.
        passing: Slots that serve this lease alone.
        ends_s: When it ends by itself, on the store's clock.
    """

    lease_id: int
    holder: Holder
    keys: tuple[bytes, ...]
    passing: tuple[Room, ...]
    ends_s: float


class Leases(Collection[bytes]):
    """All leases of a node; as a collection, the keys that are pinned. Not thread-safe."""

    def __init__(self, on_end: Callable[[Lease], None], *, first_id: int = 1) -> None:
        """Start with none.

        Args:
            on_end: Called when a lease has ended, its pins being gone.
            first_id: Larger than any number of an earlier start, whose readers may still be there.
        """
        self._on_end = on_end
        self._pins: dict[bytes, int] = {}
        self._leases: dict[int, Lease] = {}
        self._of_holder: dict[Holder, dict[int, None]] = {}
        self._next_id = first_id

    def open(
        self, holder: Holder, keys: Sequence[bytes], passing: Sequence[Room], ends_s: float
    ) -> Lease:
        """Pin blocks for a holder."""
        lease = Lease(
            lease_id=self._next_id,
            holder=holder,
            keys=tuple(keys),
            passing=tuple(passing),
            ends_s=ends_s,
        )
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        self._of_holder.setdefault(holder, {})[lease.lease_id] = None
        self.pin(lease.keys)
        return lease

    def close(self, lease_id: int, holder: Holder) -> bool:
        """End a lease of that holder; False if it has none of that number (any more)."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder:
            return False
        self._end(lease)
        return True

    def close_all(self, holder: Holder) -> int:
        """End every lease of a holder that went away; how many there were."""
        ids = list(self._of_holder.get(holder, ()))
        for lease_id in ids:
            self._end(self._leases[lease_id])
        return len(ids)

    def expire(self, now: float) -> int:
        """End the leases that are over; how many there were."""
        over = [lease for lease in self._leases.values() if lease.ends_s <= now]
        for lease in over:
            self._end(lease)
        return len(over)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Pin blocks for work of the node itself; ``unpin`` has to follow."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Take back one pin of each block.

        Raises:
            KeyError: If one is not pinned.
        """
        for key in keys:
            count = self._pins[key] - 1
            if count:
                self._pins[key] = count
            else:
                del self._pins[key]

    @property
    def num_leases(self) -> int:
        """Leases that are open."""
        return len(self._leases)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        held = self._of_holder[lease.holder]
        del held[lease.lease_id]
        if not held:
            del self._of_holder[lease.holder]
        self.unpin(lease.keys)
        self._on_end(lease)

    def __contains__(self, key: object) -> bool:
        return key in self._pins

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pins)

    def __len__(self) -> int:
        return len(self._pins)
