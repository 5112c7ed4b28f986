"""One-sided reads between the nodes of a pool: NIXL where it is installed and was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.peer_client import Peers
from runtime.store.peer_identity import NodeIdentity

if TYPE_CHECKING:
    from runtime.store.transport_nixl import NixlTransport

THREADS = 16


class OneSided:
    """The memory that others may read, and reads from several nodes at once.

    The server of peers needs the memory before the connections exist that the transport needs, so
    the transport comes later; until then nothing can be read one-sided and TCP serves.
    """

    def __init__(self) -> None:
        self._transport: NixlTransport | None = None
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="store-nixl")

    def start(self, identity: NodeIdentity, peers: Peers, arena: memoryview) -> None:
        """Register the arena.

        Raises:
            StoreSetupError: If NIXL is not installed, or cannot start or register memory here.
        """
        from runtime.store.transport_nixl import NixlTransport

        self._transport = NixlTransport(identity, peers, arena)

    def describe(self) -> bytes:
        """What the other side's transfer library has to know; empty: nothing can be read."""
        return b"" if self._transport is None else self._transport.describe()

    def address_of(self, view: memoryview) -> int:
        """Address of a view; 0 if it cannot be read from afar."""
        return 0 if self._transport is None else self._transport.address_of(view)

    def fetch_many(
        self,
        wanted: Mapping[str, tuple[Sequence[bytes], Sequence[memoryview]]],
        deadline: Deadline,
    ) -> Mapping[str, Sequence[BlockInfo | None]]:
        """Blocks of several nodes at the same time; no buffer is written to afterwards."""
        transport = self._transport
        assert transport is not None
        jobs = {
            node: self._executor.submit(transport.fetch, node, keys, views, deadline)
            for node, (keys, views) in wanted.items()
        }
        return {node: job.result() for node, job in jobs.items()}

    def stop(self) -> None:
        """Deregister the memory; the network is stopped already."""
        self._executor.shutdown()
        if self._transport is not None:
            self._transport.close()
