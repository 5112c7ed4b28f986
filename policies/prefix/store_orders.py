"""What the store's policy is told of blocks, and what it orders."""

from __future__ import annotations

from typing import Literal, NamedTuple

from policies.prefix.eviction.base import Key

Tier = Literal["memory", "ssd"]


class NewBlock(NamedTuple):
    """A block that is to be kept on this node.

    Attributes:
        key: Its name.
        parent: The block before it; None for a first block.
        depth: Its position in the chain, 0 for a first block.
        size_bytes: What it takes.
        is_owned: Whether this node answers for it; else it is a copy of another node's block.
        tenant: Whose it is, where tenants have quotas; None for everybody's.
    """

    key: Key
    parent: Key | None
    depth: int
    size_bytes: int
    is_owned: bool = True
    tenant: Key | None = None


class Victim(NamedTuple):
    """A block to be given up.

    Attributes:
        key: Its name.
        is_lost: Whether no other copy is known: the next reader has to compute it again.
    """

    key: Key
    is_lost: bool


class ReserveOrders(NamedTuple):
    """Room for new blocks.

    Attributes:
        admitted: How many leading blocks of those asked for have room now.
        victims: Blocks to give up first, in this order.
        refusal: Why the next block had no room: ``""``, ``full`` (everything else is in use or
            reserved), ``quota`` (of its tenant) or ``rule`` (this node keeps no such copies).
    """

    admitted: int
    victims: tuple[Victim, ...]
    refusal: Literal["", "full", "quota", "rule"] = ""


class FlushOrders(NamedTuple):
    """Blocks to be written to SSD when it is convenient, in this order."""

    flush: tuple[Key, ...]
