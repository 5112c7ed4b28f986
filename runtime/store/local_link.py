"""A node in this very process: the library mode."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from runtime.store.arena import SharedArena
from runtime.store.calls import Calls
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreUnavailableError
from runtime.store.forks import on_fork
from runtime.store.link import Offered, Reserved, SlotOfBlock
from runtime.store.node import StoreNode
from runtime.store.node_stats import node_stats

CLOSE_S = 5.0


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
        self._pid = os.getpid()
        self._calls = Calls()
        on_fork(self, LocalLink._forget)

    @property
    def arena(self) -> SharedArena:
        """The shared memory of the node."""
        return self._node.arena

    def lookup(self, keys: Sequence[bytes], deadline: Deadline) -> int:
        """See ``StoreLink``."""
        with self._open_node() as node:
            return node.lookup(keys)

    def load(
        self,
        keys: Sequence[bytes],
        deadline: Deadline,
        category: int,
        is_checked: bool,
        tenant: bytes,
    ) -> Offered:
        """See ``StoreLink``."""
        with self._open_node() as node:
            offer = node.load(
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
        with self._open_node() as node:
            node.doubt(key)

    def release(self, lease_id: int) -> None:
        """See ``StoreLink``."""
        with self._open_node() as node:
            node.release(lease_id, self._holder)

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
        with self._open_node() as node:
            reservation = node.reserve(
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
        with self._open_node() as node:
            return node.commit(
                reservation_id,
                checksums,
                holder=self._holder,
                deadline=deadline,
                is_durable=is_durable,
            )

    def abort(self, reservation_id: int) -> None:
        """See ``StoreLink``."""
        with self._open_node() as node:
            node.abort(reservation_id, self._holder)

    def flush(self, deadline: Deadline) -> bool:
        """See ``StoreLink``."""
        with self._open_node() as node:
            return node.flush(deadline)

    def stats(self, deadline: Deadline) -> Mapping[str, Any]:
        """See ``StoreLink``."""
        with self._open_node() as node:
            return node_stats(node)

    def close(self) -> None:
        """End leases and reservations; close the node if the link owns it.

        Calls under way end first, within a few seconds. In a forked child nothing is done.
        """
        if self._is_forked:
            return
        if not self._calls.close():
            return
        self._calls.finish(Deadline.after(CLOSE_S))
        self._node.leave(self._holder)
        if self._is_owner:
            self._node.close()

    @contextmanager
    def _open_node(self) -> Iterator[StoreNode]:
        """The node, which is not closed meanwhile."""
        if self._is_forked:  # asked first: whoever held the lock does not exist in the child
            raise StoreUnavailableError("the store is the parent's of this process")
        with self._calls.running():
            yield self._node

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _forget(self) -> None:
        self._pid = 0  # the first process of a container has the number of its parent, perhaps
