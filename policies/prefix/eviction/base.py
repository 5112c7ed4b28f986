"""What an eviction policy is told and asked.

A policy ranks the blocks of one memory. It does not know capacities of other memories, clocks, or
what a block holds; keys are any hashable values (32-byte content keys in the store, small integers
in the twin), and never looked into.

The order of calls for one request, as every driver makes them:

1. ``begin_request`` with the whole chain of the prompt, resident or not;
2. ``access`` for every resident block of the chain, root first;
3. for every missing block, root first: ``evict`` until there is room, then ``insert``;
4. ``end_request`` with the chain that was touched.

Blocks of the running request are pinned meanwhile. A block that leaves for another reason (lost,
dropped, moved) is told by ``remove``.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import NamedTuple, Protocol

Key = Hashable


class Block(NamedTuple):
    """A block as a policy sees it.

    Attributes:
        key: Its name.
        parent: The block before it in its chain; None for a first block.
        depth: Its position in the chain, 0 for a first block.
        size_bytes: What it takes, > 0.
        cost_s: Seconds lost if this copy is given up and wanted again, >= 0.
    """

    key: Key
    parent: Key | None
    depth: int
    size_bytes: int
    cost_s: float


class EvictionPolicy(Protocol):
    """Ranks the blocks of one memory.

    ``now`` is seconds since the run began and never decreases.
    """

    @property
    def keeps_prefixes_whole(self) -> bool:
        """Whether a block is never given up before the resident blocks behind it."""
        ...

    def begin_request(self, chain: Sequence[Key], *, now: float, category: int = 0) -> None:
        """A request with this prompt (root first, resident or not) starts to read."""
        ...

    def access(self, key: Key, *, now: float) -> None:
        """A resident block is used by the request that began last.

        Raises:
            KeyError: If the block is not resident.
        """
        ...

    def insert(self, block: Block, *, now: float) -> None:
        """A block becomes resident; its parent may be absent.

        Raises:
            ValueError: If it is resident already.
        """
        ...

    def end_request(self, chain: Sequence[Key], *, now: float) -> None:
        """The request has touched these blocks (root first, prompt and generated)."""
        ...

    def evict(self, pinned: Container[Key], *, now: float) -> Key | None:
        """Give up the block of least worth that is not pinned; None if there is none.

        The block is no longer resident when this returns.
        """
        ...

    def remove(self, key: Key) -> None:
        """A block is gone for a reason that is not the policy's choice.

        Raises:
            KeyError: If the block is not resident.
        """
        ...

    def reprice(self, key: Key, cost_s: float, *, now: float) -> None:
        """The loss of giving this copy up has changed (another copy came or went).

        Raises:
            KeyError: If the block is not resident.
        """
        ...

    def __contains__(self, key: Key) -> bool: ...

    def __len__(self) -> int: ...
