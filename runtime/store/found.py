"""Blocks that a load found, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from runtime.store.blocks import BlockInfo, checksum
from runtime.store.errors import StoreError, StoreUnavailableError
from runtime.store.link import Offered, StoreLink

# Large enough for the C library to copy past the cache, which is almost twice as fast; pieces that
# fit the cache are checked faster, but lose more than that in copying.
PIECE_BYTES = 2 << 20


class Found:
    """The valid leading blocks of a chain, held until ``close``.

    Attributes:
        infos: What each block is, root first.
        views: Read-only bytes of each block, in the store's own memory: no copy was made.
    """

    def __init__(self, link: StoreLink, offer: Offered) -> None:
        """See ``PrefixStore.load``.

        Raises:
            StoreUnavailableError: If the store was closed meanwhile.
        """
        self._link, self._lease_id = link, offer.lease_id
        self._arena = offer.arena or link.arena
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

        Fewer than ``leading`` only if the blocks were held longer than the store's lease time, or
        longer than the store was open (then 0): ask after using views that might have been held so
        long.
        """
        count = 0
        try:
            for slot, generation in self._slots:
                if self._arena.table.generation(slot) != generation:
                    break
                count += 1
        except StoreUnavailableError:  # closed meanwhile
            return 0
        return count

    def copy_into(self, destinations: Sequence[bytes | bytearray | memoryview]) -> int:
        """Copy the blocks; how many leading copies are whole and right.

        Each copy is checked, not the original: what was reported right is what the caller has.

        Raises:
            ValueError: If a buffer is too short for its block.
        """
        targets = [memoryview(destination).cast("B") for destination in destinations]

        def copy(position: int, view: memoryview) -> int | None:
            if position >= len(targets):
                return None
            target = targets[position]
            if target.nbytes < view.nbytes:
                raise ValueError(
                    f"a block of {view.nbytes:,} bytes does not fit a buffer of {target.nbytes:,}"
                )
            return copied_sum(target[: view.nbytes], view)

        return self.copy_each(copy)

    def copy_each(self, copy: Callable[[int, memoryview], int | None]) -> int:
        """Have the blocks copied, root first; how many leading copies are whole and right.

        Args:
            copy: Copies the block of a position, whose bytes it is given, to wherever it likes.
                Answers the CRC32C of what arrived there, or None: copy no more.
        """
        copied = 0
        for info, view in zip(self.infos, self.views, strict=True):
            arrived = copy(copied, view)
            if arrived is None:
                break
            if arrived != info.crc:
                if self.still_valid() > copied:  # not reused meanwhile, so it is broken
                    with suppress(StoreError):
                        self._link.doubt(info.key)
                break
            copied += 1
        return min(self.still_valid(), copied)

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


def copied_sum(target: memoryview, source: memoryview) -> int:
    """Copy; the CRC32C of what arrived."""
    total = 0
    for at in range(0, source.nbytes, PIECE_BYTES):
        piece = target[at : at + PIECE_BYTES]
        piece[:] = source[at : at + PIECE_BYTES]
        total = checksum(piece, total)
    return total
