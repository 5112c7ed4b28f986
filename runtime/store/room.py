"""Room in the store for blocks that are about to be written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from runtime.store.arguments import checked_checksums
from runtime.store.blocks import checksum
from runtime.store.errors import StoreError, StoreUnavailableError
from runtime.store.link import Reserved, StoreLink, deadline_of_call


class PutRoom:
    """Slots for the leading new blocks of a chain.

    Attributes:
        start: Position in the chain of the first block with room.
        buffers: Writable bytes of each block, in the store's own memory.
        reason: Why not all blocks have room; see ``Put``.
        is_unavailable: Whether the store could not be reached.
    """

    def __init__(
        self,
        link: StoreLink,
        found: Reserved,
        sizes: Sequence[int],
        is_durable: bool,
        *,
        is_unavailable: bool,
    ) -> None:
        """See ``PrefixStore.reserve``.

        Raises:
            StoreUnavailableError: If the store was closed meanwhile.
        """
        self._link, self._id = link, found.reservation_id
        self._is_durable = is_durable
        self.start, self.reason = found.start, found.reason
        self.is_unavailable = is_unavailable
        arena = found.arena or link.arena
        self.buffers: Sequence[memoryview] = [
            arena.slot(slot, size) for slot, size in zip(found.slots, sizes, strict=False)
        ]

    def commit(self, checksums: Sequence[int] | None = None, *, deadline_s: float = 1.0) -> int:
        """The leading blocks are written; how many are stored (durably, if asked for).

        Args:
            checksums: CRC32C of each block that was written; None: of all, computed here.
            deadline_s: Seconds to wait.

        Raises:
            ValueError: If a checksum is none, or there are more than buffers; the room is given
                back.
        """
        if not self._id:
            return 0
        try:
            if checksums is None:
                checksums = [checksum(buffer) for buffer in self.buffers]
            checksums = checked_checksums(checksums, len(self.buffers))
            deadline = deadline_of_call(deadline_s)
            stored = self._link.commit(self._id, checksums, self._is_durable, deadline)
        except StoreError as error:
            self.is_unavailable = isinstance(error, StoreUnavailableError)
            return 0  # it may not have been heard: see close
        except BaseException:
            self.close()
            raise
        self._id = 0
        return stored

    def close(self) -> None:
        """Give back what was not committed."""
        reservation_id, self._id = self._id, 0
        if reservation_id:
            with suppress(StoreError):  # a server that is gone keeps no reservation
                self._link.abort(reservation_id)
