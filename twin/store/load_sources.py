"""From a load plan to what moves in simulated time: how many blocks, from which node and tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.prefix.eviction.base import Key
from policies.prefix.load_plan import Source
from twin.store.pool import StorePool

_TIER_OF_SOURCE: dict[Source, str] = {
    "memory": "memory",
    "replica": "replica",
    "remote": "remote",
    "ssd": "ssd",
    "remote_ssd": "ssd",
}


@dataclass(frozen=True, slots=True)
class LoadSources:
    """Blocks ``first .. until - 1`` of a prompt, and where each comes from.

    Attributes:
        first: Leading blocks that the GPU holds already.
        until: Leading blocks that are there after the load; ``first`` where nothing is loaded.
        tiers: [until - first] memory, replica, remote or ssd.
        remote: Other node -> blocks from its memory and from its SSD.
        remote_positions: Blocks that came over the network, by position in the prompt.
        ssd_positions: Those from the own SSD.
    """

    first: int
    until: int
    tiers: tuple[str, ...]
    remote: Mapping[str, tuple[int, int]]
    remote_positions: tuple[int, ...]
    ssd_positions: tuple[int, ...]

    @classmethod
    def nothing(cls, first: int) -> LoadSources:
        """No load."""
        return cls(first, first, (), {}, (), ())

    @property
    def num_blocks(self) -> int:
        """Blocks that are copied to the GPU."""
        return self.until - self.first

    def behind(self, own: int) -> dict[str, int]:
        """Tier -> blocks of the load that lie behind the GPU's own ``own`` blocks."""
        counts = dict.fromkeys(("memory", "replica", "remote", "ssd"), 0)
        for tier in self.tiers[max(0, own - self.first) :]:
            counts[tier] += 1
        return counts


def load_sources(pool: StorePool, node: str, chain: Sequence[Key], own: int) -> LoadSources:
    """What a node would load of a chain of which a GPU holds the first ``own`` blocks.

    Args:
        pool: The stores.
        node: Whose GPU reads.
        chain: Blocks that may be loaded, root first.
        own: Leading blocks that need not be.
    """
    plan = pool.plan(node, chain, own)
    remote: dict[str, tuple[int, int]] = {}
    positions = []
    for position, way in enumerate(plan.ways, start=own):
        if way.node == node:
            continue
        in_memory, on_ssd = remote.get(way.node, (0, 0))
        is_ssd = way.source == "remote_ssd"
        remote[way.node] = (in_memory + (not is_ssd), on_ssd + is_ssd)
        positions.append(position)
    return LoadSources(
        first=own,
        until=own + plan.wanted,
        tiers=tuple(_TIER_OF_SOURCE[way.source] for way in plan.ways),
        remote=remote,
        remote_positions=tuple(positions),
        ssd_positions=tuple(
            position for position, way in enumerate(plan.ways, start=own) if way.source == "ssd"
        ),
    )
