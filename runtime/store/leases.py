"""Who is reading which blocks, so that nothing is reused under a reader's eyes.

Pins belong to leases and leases to holders (connections): when a holder goes, for whatever reason,
all its pins go. A lease also ends by itself, so that a reader that hangs cannot keep memory for
ever; it then finds the generation of its slots changed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
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
        # In the order of their ends, too: those that are over are the first ones.
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        self._last_end_s = -math.inf
        self._of_holder: dict[Holder, dict[int, None]] = {}
        self._next_id = first_id

    def open(
        self, holder: Holder, keys: Sequence[bytes], passing: Sequence[Room], ends_s: float
    ) -> Lease:
        """Pin blocks for a holder; a lease never ends before one that was opened earlier."""
        self._last_end_s = max(self._last_end_s, ends_s)
        lease = Lease(
            lease_id=self._next_id,
            holder=holder,
            keys=tuple(keys),
            passing=tuple(passing),
            ends_s=self._last_end_s,
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
        count = 0
        while self._leases:
            first = next(iter(self._leases.values()))
            if first.ends_s > now:
                break
            self._end(first)
            count += 1
        return count

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


class PinnedChain(Collection[bytes]):
    """Pinned blocks and a chain, as they are at any moment: nothing is copied."""

    __slots__ = ("_chain", "_leases")

    def __init__(self, leases: Leases, chain: Iterable[bytes]) -> None:
        self._leases, self._chain = leases, dict.fromkeys(chain)

    def __contains__(self, key: object) -> bool:
        return key in self._leases or key in self._chain

    def __iter__(self) -> Iterator[bytes]:
        yield from self._leases
        yield from (key for key in self._chain if key not in self._leases)

    def __len__(self) -> int:
        return len(self._leases) + sum(key not in self._leases for key in self._chain)
