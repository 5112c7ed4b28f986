"""The stores of all nodes and the directory between them, as states without time or bytes.

Every node's choices are those of its own ``StorePolicy``; where a copy is known to lie is told by
one ``Directory``. On a real cluster each node has a copy of the directory and learns of changes a
network delay later; here all see a change at once. Who moves bytes, and how long that takes, is
decided elsewhere: the caller tells when a step is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from models.prefix_costs import PrefixCosts
from policies.prefix.directory import Directory, Held
from policies.prefix.eviction.base import Key
from policies.prefix.load_plan import LoadPlan, plan_load
from policies.prefix.owners import OwnerKey, OwnerRule
from policies.prefix.put_plan import plan_put
from policies.prefix.store_log import LoggedStore
from policies.prefix.store_orders import NewBlock, Victim
from policies.prefix.store_policy import StorePolicy
from policies.prefix.store_settings import StoreSettings
from traces.decisions import DecisionLog

INCARNATION = 1


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks of one chain that have room at a node and wait for their bytes.

    Attributes:
        node: Where.
        blocks: Root first.
        region: First key of the region they form.
        is_owned: Whether the node answers for them.
    """

    node: str
    blocks: tuple[NewBlock, ...]
    region: Key
    is_owned: bool

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(block.size_bytes for block in self.blocks)


@dataclass(slots=True)
class PoolCounts:
    """What happened, in blocks.

    Attributes:
        stored, replicated: Given room as owned blocks and as copies.
        reread: Back in a memory after a read from SSD.
        busy: Not stored because another writer was storing the same blocks.
        refused: Not stored for want of room.
        dropped, lost: Given up by a memory, and those of them that no node holds any longer.
        flushed: Written to SSD.
    """

    stored: int = 0
    replicated: int = 0
    reread: int = 0
    busy: int = 0
    refused: int = 0
    dropped: int = 0
    lost: int = 0
    flushed: int = 0


@dataclass(slots=True)
class StorePool:
    """One pool of stores.

    Attributes:
        policies: Node -> its policy.
        costs: What blocks cost to compute and to bring.
        owners: Which node keeps a region.
        block_bytes: Size of every block.
        may_recompute: Whether a load ends where computing again is cheaper; else all is loaded.
        directory: Who holds what.
        counts: What happened so far.
    """

    policies: Mapping[str, StorePolicy]
    costs: PrefixCosts
    owners: OwnerRule
    block_bytes: int
    may_recompute: bool
    directory: Directory = field(default_factory=Directory)
    counts: PoolCounts = field(default_factory=PoolCounts)
    _weights: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self._weights = dict.fromkeys(self.policies, 1.0)

    # --- reading ---------------------------------------------------------------------------

    def leading(self, chain: Sequence[Key]) -> int:
        """How many of the first blocks some node holds."""
        return self.directory.leading(chain)

    def plan(self, node: str, chain: Sequence[Key], own: int = 0) -> LoadPlan:
        """From where a node would bring the blocks of a chain behind the first ``own``."""
        costs = self.costs if self.may_recompute else None
        return plan_load(chain[own:], self.directory, local=node, costs=costs, first=own)

    def read(
        self, nodes: Sequence[str], chain: Sequence[Key], *, now: float, category: int = 0
    ) -> dict[str, tuple[Key, ...]]:
        """A request reads the chain at these nodes, each once.

        Returns:
            Node -> blocks to be written to its SSD now that they are used again.
        """
        flush: dict[str, tuple[Key, ...]] = {}
        for node in nodes:
            orders = self.policies[node].read(chain, now=now, category=category)
            if orders.flush:
                flush[node] = orders.flush
        return flush

    # --- storing ---------------------------------------------------------------------------

    def reserve_region(self, writer: str, chain: Sequence[Key], *, now: float) -> Room | None:
        """Room for all that is behind the longest stored prefix, at its owner.

        Args:
            writer: Node that has computed the chain.
            chain: All blocks, root first.
            now: Seconds.

        Returns:
            The leading blocks that have room; None if there is nothing to store, another writer is
            at it, or there is no room.
        """
        plan = plan_put(
            cast(Sequence[OwnerKey], chain),
            self.directory,
            block_bytes=self.block_bytes,
            rule=self.owners,
            writer=writer,
            weights=self._weights,
        )
        first, region, owner = plan.lcp, plan.region, plan.owner
        if region is None or owner is None:
            return None
        if self.policies[owner].is_reserved(region):
            self.counts.busy += len(chain) - first
            return None
        new = [i for i in range(first, len(chain)) if chain[i] not in self.directory]
        room = self._reserve(owner, chain, new, True, now)
        admitted = 0 if room is None else len(room.blocks)
        self.counts.stored += admitted
        self.counts.refused += len(new) - admitted
        return room

    def reserve_copies(
        self, node: str, chain: Sequence[Key], positions: Sequence[int], *, now: float
    ) -> Room | None:
        """Room for copies of those blocks of the chain that the node does not hold in memory."""
        if self.policies[node].settings.replicas == "none":
            return None
        room = self._reserve(node, chain, positions, False, now)
        self.counts.replicated += 0 if room is None else len(room.blocks)
        return room

    def reserve_reread(
        self, node: str, chain: Sequence[Key], positions: Sequence[int], *, now: float
    ) -> Room | None:
        """Room in memory for blocks that the node has read from its own SSD."""
        room = self._reserve(node, chain, positions, True, now)
        self.counts.reread += 0 if room is None else len(room.blocks)
        return room

    def _reserve(
        self,
        node: str,
        chain: Sequence[Key],
        positions: Sequence[int],
        is_owned: bool,
        now: float,
    ) -> Room | None:
        policy = self.policies[node]
        blocks = [
            NewBlock(chain[i], chain[i - 1] if i else None, i, self.block_bytes, is_owned)
            for i in positions
            if policy.in_memory(chain[i]) is None and not policy.is_reserved(chain[i])
        ]
        if not blocks:
            return None
        orders = policy.reserve(blocks, pinned=dict.fromkeys(chain), now=now)
        for victim in orders.victims:
            self._gone(node, victim, now)
        if orders.admitted == 0:
            return None
        return Room(node, tuple(blocks[: orders.admitted]), blocks[0].key, is_owned)

    def commit(self, room: Room, *, now: float) -> tuple[Key, ...]:
        """The bytes are there: everybody may read the blocks now.

        Returns:
            Blocks to be written to the node's SSD.
        """
        keys = [block.key for block in room.blocks]
        orders = self.policies[room.node].commit(keys, now=now)
        for index, block in enumerate(room.blocks):
            held = Held(room.region, index, block.depth, block.size_bytes)
            self.directory.add(
                room.node, INCARNATION, block.key, held, tier="memory", is_owned=room.is_owned
            )
            self._tell_elsewhere(block.key, now)
        return orders.flush

    def reserve_flush(
        self, node: str, keys: Sequence[Key], *, now: float
    ) -> tuple[tuple[Key, Held], ...]:
        """Room on a node's SSD for these blocks; those that have it now, and where they lie."""
        policy = self.policies[node]
        held = [(key, self.directory.held_at(key, node, "memory")) for key in keys]
        kept = [(key, place) for key, place in held if place is not None]
        orders = policy.reserve_ssd([key for key, _ in kept], now=now)
        for victim in orders.victims:
            self.directory.discard(node, INCARNATION, victim.key, tier="ssd")
        return tuple(kept[: orders.admitted])

    def flushed(self, node: str, blocks: Sequence[tuple[Key, Held]], *, now: float) -> None:
        """These blocks, which had room reserved, are on the node's SSD."""
        self.policies[node].flushed([key for key, _ in blocks], now=now)
        self.counts.flushed += len(blocks)
        for key, held in blocks:
            self.directory.add(node, INCARNATION, key, held, tier="ssd", is_owned=True)

    # --- what others hold ------------------------------------------------------------------

    def _gone(self, node: str, victim: Victim, now: float) -> None:
        self.directory.discard(node, INCARNATION, victim.key, tier="memory")
        self.counts.dropped += 1
        self.counts.lost += victim.key not in self.directory
        self._tell_elsewhere(victim.key, now)

    def _tell_elsewhere(self, key: Key, now: float) -> None:
        """Every memory with a copy learns whether it is the only one."""
        holders = [place.node for place in self.directory.places(key) if place.memory is not None]
        has_others = len(holders) > 1
        for node in holders:
            self.policies[node].set_elsewhere(key, has_others, now=now)


def new_pool(
    nodes: Sequence[str],
    settings: StoreSettings,
    costs: PrefixCosts,
    owners: OwnerRule,
    *,
    block_bytes: int,
    may_recompute: bool,
    log: DecisionLog | None = None,
) -> StorePool:
    """A pool of equal nodes with nothing stored.

    Args:
        nodes: Names.
        settings: Of every node.
        costs: What blocks cost.
        owners: Which node keeps a region.
        block_bytes: Size of every block.
        may_recompute: Whether loads end where computing again is cheaper.
        log: Where every call of every policy goes; None: nowhere.
    """
    policies: dict[str, StorePolicy] = {}
    for node in nodes:
        policies[node] = (
            StorePolicy(settings, costs)
            if log is None
            else LoggedStore(settings, costs, log, name=f"prefix-{node}")
        )
    return StorePool(policies, costs, owners, block_bytes, may_recompute)
