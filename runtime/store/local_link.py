"""A node in this very process: the library mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.store.arena import SharedArena
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreUnavailableError
from runtime.store.link import Offered, Reserved, SlotOfBlock
from runtime.store.node import StoreNode
from runtime.store.node_stats import node_stats


class LocalLink:
    """Calls a node directly. Thread-safe."""

    def __init__(self, node: StoreNode, *, is_owner: bool) -> None:
        """Link to a node.

        Args:
            node: Open.
            is_owner: Whether closing the link closes the node.
        """
        self._node, self._is_owner = node, is_owner
        self._holder = node.new_holder()
        self._is_closed = False

    @property
    def arena(self) -> SharedArena:
        """The shared memory of the node."""
        return self._node.arena

    def lookup(self, keys: Sequence[bytes], deadline: Deadline) -> int:
        """See ``StoreLink``."""
        return self._open_node().lookup(keys)

    def load(
        self,
        keys: Sequence[bytes],
        deadline: Deadline,
        category: int,
        is_checked: bool,
        tenant: bytes,
    ) -> Offered:
        """See ``StoreLink``."""
        offer = self._open_node().load(
            keys,
            holder=self._holder,
            deadline=deadline,
            category=category,
            is_checked=is_checked,
            tenant=tenant,
        )
        if offer.lease is None:
            return Offered(0, ())
        return Offered(
            offer.lease.lease_id,
            [SlotOfBlock(room.slot, room.generation, room.info) for room in offer.rooms],
        )

    def doubt(self, key: bytes) -> None:
        """See ``StoreLink``."""
        if not self._is_closed:
            self._node.doubt(key)

    def release(self, lease_id: int) -> None:
        """See ``StoreLink``."""
        if not self._is_closed:
            self._node.release(lease_id, self._holder)

    def reserve(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        first: int,
        tenant: bytes,
        is_durable: bool,
        deadline: Deadline,
    ) -> Reserved:
        """See ``StoreLink``."""
        reservation = self._open_node().reserve(
            keys,
            lengths,
            first=first,
            tenant=tenant,
            holder=self._holder,
            is_durable=is_durable,
        )
        slots = [room.slot for room in reservation.rooms]
        return Reserved(reservation.reservation_id, reservation.start, slots, reservation.reason)

    def commit(
        self, reservation_id: int, checksums: Sequence[int], is_durable: bool, deadline: Deadline
    ) -> int:
        """See ``StoreLink``."""
        return self._open_node().commit(
            reservation_id,
            checksums,
            holder=self._holder,
            deadline=deadline,
            is_durable=is_durable,
        )

    def abort(self, reservation_id: int) -> None:
        """See ``StoreLink``."""
        if not self._is_closed:
            self._node.abort(reservation_id, self._holder)

    def flush(self, deadline: Deadline) -> bool:
        """See ``StoreLink``."""
        return self._open_node().flush(deadline)

    def stats(self, deadline: Deadline) -> Mapping[str, Any]:
        """See ``StoreLink``."""
        return node_stats(self._open_node())

    def close(self) -> None:
        """End leases and reservations; close the node if the link owns it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._node.leave(self._holder)
        if self._is_owner:
            self._node.close()

    def _open_node(self) -> StoreNode:
        if self._is_closed:
            raise StoreUnavailableError("the store is closed")
        return self._node
