"""The store as a program sees it: the same verbs in library mode and behind a server.

No verb raises because something is missing, late or gone: a load answers how many leading blocks
are valid, a put how many are stored. Only wrong arguments raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from types import TracebackType
from typing import Any

from policies.prefix.keys import Namespace
from runtime.store.arguments import (
    checked_category,
    checked_keys,
    checked_sizes,
    checked_tenant,
)
from runtime.store.counters import Counters
from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreUnavailableError
from runtime.store.forks import on_fork
from runtime.store.found import Found, copied_sum
from runtime.store.link import Offered, Reserved, SlotOfBlock, StoreLink, deadline_of_call
from runtime.store.room import PutRoom
from runtime.store.session import StoreSession

DEADLINE_S = 1.0
Buffer = bytes | bytearray | memoryview
_Gone = (StoreUnavailableError, DeadlineError)


@dataclass(frozen=True, slots=True)
class Put:
    """What became of a put.

    Attributes:
        stored: Blocks of this put that are stored now: the leading ones that were new.
        reason: Why not all: ``""`` (all are), ``exists``, ``busy`` (another writes the same),
            ``full``, ``quota``, ``orphan`` (blocks before them are not stored), ``size`` (larger
            than the store's blocks), ``no_ssd`` (they were to be durable and the store has no
            SSD: nothing was written), ``late`` or ``unavailable``.
    """

    stored: int
    reason: str


class PrefixStore:
    """Blocks of prefixes by content key. Thread-safe."""

    def __init__(self, link: StoreLink) -> None:
        """See ``open_store`` and ``connect``."""
        self._link = link
        self._forget()
        on_fork(self, PrefixStore._forget)

    def _forget(self) -> None:
        self.counters = Counters()  # a forked child counts for itself

    # --- reading ---------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], *, deadline_s: float = DEADLINE_S) -> int:
        """How many leading blocks a load would bring as things are; it may still find fewer.

        Args:
            keys: The chain, root first.
            deadline_s: Seconds after which the answer is 0.

        Raises:
            ValueError: Here and everywhere, if an argument is not what ``arguments`` allows: keys
                of 32 bytes, at most 65,536 of them; tenants of 0 or 16 bytes.
        """
        checked_keys(keys)
        try:
            return self._link.lookup(keys, deadline_of_call(deadline_s))
        except _Gone as error:
            self._note(error)
            return 0

    def load(
        self,
        keys: Sequence[bytes],
        *,
        deadline_s: float = DEADLINE_S,
        category: int = 0,
        tenant: bytes = b"",
        is_checked: bool = True,
    ) -> Found:
        """The valid leading blocks, in place, until the result is closed.

        Args:
            keys: The chain, root first.
            deadline_s: Seconds for all of it; what is not there by then is a miss.
            category: Kind of request, where known, 0 to 2**31 - 1; helps the eviction policy.
            tenant: Tag of the tenant, against whose quota what comes into memory counts.
            is_checked: False: the caller copies the blocks with ``Found.copy_into`` or
                ``copy_each``, which check the copies; views alone are no valid blocks then.
        """
        return self._load(keys, deadline_s, category, tenant, is_checked=is_checked)

    def _load(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        category: int,
        tenant: bytes,
        *,
        is_checked: bool,
    ) -> Found:
        checked_keys(keys)
        category, tenant = checked_category(category), checked_tenant(tenant)
        deadline = deadline_of_call(deadline_s)
        try:
            offer = self._link.load(keys, deadline, category, is_checked, tenant)
            asked = sum(1 for _ in takewhile(_is_asked_for, zip(offer.blocks, keys, strict=False)))
            if asked < len(offer.blocks):
                self.counters.add("blocks_not_asked_for", len(offer.blocks) - asked)
                offer = offer._replace(blocks=offer.blocks[:asked])
            return Found(self._link, offer)
        except _Gone as error:
            self._note(error)
            return Found(self._link, Offered(0, ()))

    def load_into(
        self,
        keys: Sequence[bytes],
        destinations: Sequence[Buffer],
        *,
        deadline_s: float = DEADLINE_S,
        category: int = 0,
        tenant: bytes = b"",
    ) -> int:
        """Copy the valid leading blocks; how many there are.

        Args:
            keys: The chain, root first.
            destinations: Writable buffers, one per key, each at least as long as its block.
            deadline_s: Seconds for all of it.
            category: Kind of request, where known.
            tenant: As for ``load``.

        Raises:
            ValueError: If there are not as many buffers as keys, or one is too short or may not
                be written to.
        """
        if len(destinations) != len(keys):
            raise ValueError(f"{len(keys)} keys but {len(destinations)} destinations")
        if any(memoryview(destination).readonly for destination in destinations):
            raise ValueError("destinations: every buffer must be writable")
        with self._load(keys, deadline_s, category, tenant, is_checked=False) as found:
            return found.copy_into(destinations)

    # --- writing ---------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Buffer],
        *,
        first: int = 0,
        tenant: bytes = b"",
        durable: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> Put:
        """Store the blocks that are new; leading ones first, never with a hole.

        Args:
            keys: The whole chain, root first.
            blocks: Contiguous buffers of ``keys[first:]``.
            first: Position of the first block given; those before it have to be stored.
            tenant: Tag of the tenant (``policies.prefix.keys.tenant_tag``).
            durable: Whether to return only when the blocks are on SSD.
            deadline_s: Seconds for all of it.

        Raises:
            ValueError: If the numbers of keys and blocks do not fit.
        """
        views = [memoryview(block).cast("B") for block in blocks]
        first, _ = checked_sizes([view.nbytes for view in views], first, len(keys))
        deadline = deadline_of_call(deadline_s)
        total = 0
        while True:  # once, unless blocks in the middle are stored already
            with self.reserve(
                keys,
                [view.nbytes for view in views],
                first=first,
                tenant=tenant,
                durable=durable,
                deadline_s=deadline.left_s(),
            ) as room:
                stored = self._write(room, views[room.start - first :], deadline)
            total += stored
            if stored < len(room.buffers):
                return Put(total, "unavailable" if room.is_unavailable else "late")
            if room.reason or room.start + stored >= len(keys):
                return Put(total, "" if total and room.reason == "exists" else room.reason)

    def _write(self, room: PutRoom, views: Sequence[memoryview], deadline: Deadline) -> int:
        sums = []
        for buffer, view in zip(room.buffers, views, strict=False):
            if deadline.is_over:
                break
            sums.append(copied_sum(buffer, view))
        return room.commit(sums, deadline_s=deadline.left_s())

    @contextmanager
    def reserve(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        *,
        first: int = 0,
        tenant: bytes = b"",
        durable: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> Iterator[PutRoom]:
        """Room in the store to write new blocks into without a copy.

        What is not committed when the context ends is given back.

        Args:
            keys: The whole chain, root first.
            sizes: Bytes of the blocks of ``keys[first:]``.
            first, tenant, durable, deadline_s: As for ``put``.

        Raises:
            ValueError: If the numbers of keys and sizes do not fit.
        """
        checked_keys(keys)
        first, lengths = checked_sizes(sizes, first, len(keys))
        if len(dict.fromkeys(keys)) != len(keys):
            raise ValueError("keys: a chain has every block once, found one twice")
        room = self._reserve(
            keys,
            lengths,
            first,
            checked_tenant(tenant),
            bool(durable),
            deadline_of_call(deadline_s),
        )
        try:
            yield room
        finally:
            room.close()

    def _reserve(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        first: int,
        tenant: bytes,
        is_durable: bool,
        deadline: Deadline,
    ) -> PutRoom:
        link, is_unavailable = self._link, False
        try:
            found = link.reserve(keys, lengths, first, tenant, is_durable, deadline)
            sizes = lengths[found.start - first :]
            return PutRoom(link, found, sizes, is_durable, is_unavailable=False)
        except _Gone as error:
            self._note(error)
            is_unavailable = isinstance(error, StoreUnavailableError)
            found = Reserved(0, first, (), "unavailable" if is_unavailable else "late")
            return PutRoom(link, found, (), is_durable, is_unavailable=is_unavailable)

    # --- the rest --------------------------------------------------------------------------

    def session(self, namespace: Namespace, salt: str = "") -> StoreSession:
        """The store for one model's blocks and one tenant, by token ids."""
        return StoreSession(self, namespace, salt)

    def flush(self, *, deadline_s: float = 10.0) -> bool:
        """Wait until what is stored has reached its owners and the SSD; False if time ran out."""
        try:
            return self._link.flush(deadline_of_call(deadline_s))
        except _Gone as error:
            self._note(error)
            return False

    def stats(self, *, deadline_s: float = DEADLINE_S) -> Mapping[str, Any]:
        """Gauges and counters of the node, and of this client; empty if the node is gone."""
        try:
            stats = dict(self._link.stats(deadline_of_call(deadline_s)))
        except _Gone as error:
            self._note(error)
            stats = {}
        stats["client"] = dict(self.counters.all())
        return stats

    @property
    def block_bytes(self) -> int:
        """Most bytes of a block."""
        return self._link.arena.slot_bytes

    def close(self) -> None:
        """End all leases; in library mode write what waits for SSD and close the store."""
        self._link.close()

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _note(self, error: Exception) -> None:
        self.counters.add("late" if isinstance(error, DeadlineError) else "unavailable")


def _is_asked_for(offered: tuple[SlotOfBlock, bytes]) -> bool:
    block, key = offered
    return block.info.key == key
