"""Which node is responsible for a region of stored blocks.

Rendezvous hashing: every node draws a number for the key, the best draw owns, and a node that
leaves gives each of its keys to that key's second choice while no other key moves.

    u     = (first 8 bytes of SHA-256(node name, 00, key), big endian, + 0.5) / 2^64
    score = weight / -ln(u)

so a node owns a share of the keys proportional to its weight (weighted rendezvous: Thaler and
Ravishankar 1998; logarithmic form: Schindelhauer and Schomaker 2005).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Protocol

OwnerKey = bytes | int


def rendezvous_order(key: OwnerKey, weights: Mapping[str, float]) -> tuple[str, ...]:
    """Nodes that may own the key, best first, ties by name.

    Args:
        key: Content key, or the number of a block in a simulation (hashed as 8 bytes, big endian).
        weights: By node name, >= 0; a node of weight 0 never owns.

    Raises:
        ValueError: If a weight is negative or not finite, or a number does not fit 8 bytes.
    """
    data = key if isinstance(key, bytes) else _number_bytes(key)
    scores = []
    for node, weight in weights.items():
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"weight of node {node} must be finite and >= 0, found {weight}")
        if weight > 0.0:
            scores.append((-weight / _negative_log(node, data), node))
    return tuple(node for _, node in sorted(scores))


class OwnerRule(Protocol):
    """Decides who keeps the owned copies of a new region."""

    def owners(
        self,
        *,
        first: OwnerKey,
        anchor: OwnerKey,
        writer: str,
        weights: Mapping[str, float],
        count: int = 1,
    ) -> tuple[str, ...]:
        """Up to ``count`` different nodes: the owner, then holders of fixed copies.

        Args:
            first: First key of the region.
            anchor: First key of the whole chain.
            writer: Node that computed the blocks.
            weights: Of the live nodes, by name, >= 0; a node of weight 0 never owns.
            count: Copies wanted, >= 1; fewer come back when there are fewer nodes.

        Raises:
            ValueError: If ``count`` is below 1 or a weight is not finite and >= 0.
        """
        ...


class Rendezvous:
    """By the first key of the region: even over the nodes, whoever writes."""

    def owners(
        self,
        *,
        first: OwnerKey,
        anchor: OwnerKey,
        writer: str,
        weights: Mapping[str, float],
        count: int = 1,
    ) -> tuple[str, ...]:
        """See `OwnerRule.owners`."""
        return rendezvous_order(first, weights)[: _checked(count)]


class WriterOwns:
    """The node that computed the blocks: no network on writing, as skewed as the writing is."""

    def owners(
        self,
        *,
        first: OwnerKey,
        anchor: OwnerKey,
        writer: str,
        weights: Mapping[str, float],
        count: int = 1,
    ) -> tuple[str, ...]:
        """See `OwnerRule.owners`; further copies, and all copies of a writer that may not own, go
        by rendezvous.
        """
        order = rendezvous_order(first, weights)
        if writer in order:
            order = (writer, *(node for node in order if node != writer))
        return order[: _checked(count)]


class AnchorOwns:
    """By the first key of the chain: one request per load, but shared beginnings are hot spots."""

    def owners(
        self,
        *,
        first: OwnerKey,
        anchor: OwnerKey,
        writer: str,
        weights: Mapping[str, float],
        count: int = 1,
    ) -> tuple[str, ...]:
        """See `OwnerRule.owners`."""
        return rendezvous_order(anchor, weights)[: _checked(count)]


def _checked(count: int) -> int:
    if count < 1:
        raise ValueError(f"count must be >= 1, found {count}")
    return count


def _number_bytes(number: int) -> bytes:
    if not 0 <= number < 2**64:
        raise ValueError(f"a numbered key must be in 0..2^64-1, found {number}")
    return number.to_bytes(8, "big")


def _negative_log(node: str, key: bytes) -> float:
    """-ln(u) > 0."""
    draw = hashlib.sha256(node.encode() + b"\0" + key).digest()[:8]
    u = (int.from_bytes(draw, "big") + 0.5) / 2**64
    # The largest 1,024 draws round to u = 1, whose logarithm is 0; the next number below stands in.
    return -math.log(min(u, 1.0 - 2.0**-53))
