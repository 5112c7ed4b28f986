"""Blocks that a load found, in place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from runtime.store.blocks import BlockInfo
from runtime.store.errors import StoreError
from runtime.store.link import Offered, StoreLink


class Found:
    """The valid leading blocks of a chain, held until ``close``.

    Attributes:
        infos: What each block is, root first.
        views: Read-only bytes of each block, in the store's own memory: no copy was made.
    """

    def __init__(self, link: StoreLink, offer: Offered) -> None:
        """See ``PrefixStore.load``."""
        self._link, self._lease_id = link, offer.lease_id
        self._arena = link.arena
        self._slots = [(block.slot, block.generation) for block in offer.blocks]
        self.infos: Sequence[BlockInfo] = [block.info for block in offer.blocks]
        self.views: Sequence[memoryview] = [
            self._arena.slot(block.slot, block.info.length).toreadonly() for block in offer.blocks
        ]

    @property
    def leading(self) -> int:
        """How many leading blocks were valid when the load ended."""
        return len(self._slots)

    def still_valid(self) -> int:
        """How many leading blocks still hold the bytes that were checked.

        Fewer than ``leading`` only if the blocks were held longer than the store's lease time: ask
        after using views that might have been held so long.
        """
        for count, (slot, generation) in enumerate(self._slots):
            if self._arena.table.generation(slot) != generation:
                return count
        return len(self._slots)

    def copy_into(self, destinations: Sequence[bytes | bytearray | memoryview]) -> int:
        """Copy the blocks; how many leading copies are whole.

        Raises:
            ValueError: If a buffer is too short for its block.
        """
        for view, destination in zip(self.views, destinations, strict=False):
            target = memoryview(destination).cast("B")
            if target.nbytes < view.nbytes:
                raise ValueError(
                    f"a block of {view.nbytes:,} bytes does not fit a buffer of {target.nbytes:,}"
                )
            target[: view.nbytes] = view
        return min(self.still_valid(), len(destinations))

    def close(self) -> None:
        """The blocks are no longer needed; the views must not be read any more."""
        lease_id, self._lease_id = self._lease_id, 0
        if lease_id:
            with suppress(StoreError):  # a server that is gone holds no lease
                self._link.release(lease_id)

    def __enter__(self) -> Found:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
