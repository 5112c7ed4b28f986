"""What of a computed prefix is new to the pool, and who is to keep it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from policies.prefix.directory import Directory
from policies.prefix.owners import OwnerKey, OwnerRule


class PutPlan(NamedTuple):
    """One region to be stored: the blocks behind what is stored already.

    Attributes:
        lcp: How many leading blocks are stored.
        region: First key of the region; None if there is nothing to store.
        owners: The owner, then holders of fixed copies; empty if there is nothing to store or
            nobody who may own.
        size_bytes: Of the region.
    """

    lcp: int
    region: OwnerKey | None
    owners: tuple[str, ...]
    size_bytes: int

    @property
    def owner(self) -> str | None:
        """Who is responsible for the region."""
        return self.owners[0] if self.owners else None


def plan_put(
    keys: Sequence[OwnerKey],
    directory: Directory,
    *,
    block_bytes: int,
    rule: OwnerRule,
    writer: str,
    weights: Mapping[str, float],
    live: Container[str] | None = None,
    count: int = 1,
) -> PutPlan:
    """Plan the put of a prompt's blocks.

    A block behind a hole is stored again: without the block before it nobody finds it, and a
    region is never mixed from two writers.

    Args:
        keys: Of all full blocks of the prompt, first block first.
        directory: What is held where.
        block_bytes: Size of each block, > 0.
        rule: Who owns.
        writer: The node that computed the blocks.
        weights: Of the nodes that may own, by name.
        live: Nodes whose copies count as stored; None for all.
        count: Copies wanted, >= 1.

    Raises:
        ValueError: If ``block_bytes`` or ``count`` is below 1, or a weight is not finite and >= 0.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be >= 1, found {block_bytes}")
    lcp = directory.leading(keys, live)
    if lcp == len(keys):
        return PutPlan(lcp, None, (), 0)
    owners = rule.owners(
        first=keys[lcp], anchor=keys[0], writer=writer, weights=weights, count=count
    )
    return PutPlan(lcp, keys[lcp], owners, (len(keys) - lcp) * block_bytes)
