"""What a server of peers asks of the node behind it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.peer_messages import Announcement, Removal


class RegionRoom(Protocol):
    """Room for the leading blocks of a region, not visible before commit."""

    @property
    def buffers(self) -> Sequence[memoryview]:
        """Writable, one per block admitted, each of its block's length."""

    def commit(self) -> int:
        """Makes the blocks visible; called after all their checksums were found right.

        Returns:
            How many leading blocks are stored.
        """


class PeerHandler(Protocol):
    """The node behind a server of peers; called from several threads."""

    def open_blocks(
        self, keys: Sequence[bytes]
    ) -> AbstractContextManager[Sequence[tuple[BlockInfo, memoryview] | None]]:
        """The blocks that are here, leased while open; may read the SSD."""

    def receive_region(
        self, infos: Sequence[BlockInfo], writer: str, is_owned: bool, deadline: Deadline
    ) -> AbstractContextManager[RegionRoom]:
        """Room for a region; leaving without commit gives it back."""

    def announced(
        self,
        node: str,
        incarnation: int,
        added: Sequence[Announcement],
        removed: Sequence[Removal],
    ) -> None:
        """Changes of another node's holdings; may repeat what is known already."""

    def retained(self, node: str, incarnation: int, kept: Collection[tuple[bytes, str]]) -> None:
        """All that the node holds, as (key, tier); every other copy of its is void."""

    def directory_page(self, after: bytes, limit: int) -> Sequence[Announcement]:
        """What this node itself holds, by ascending key, beginning behind ``after``.

        At most ``limit`` keys; the copies of one key are never divided between pages. Empty at
        the end.
        """
