"""What the parts of a node share: one lock, one clock, the policy, memory, SSD and directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from policies.prefix.directory import Directory, Held
from policies.prefix.eviction.base import Key
from policies.prefix.owners import OwnerRule
from policies.prefix.store_policy import StorePolicy
from runtime.store.blocks import BlockInfo
from runtime.store.config import StoreConfig
from runtime.store.counters import Counters
from runtime.store.leases import Lease, Leases, PinnedChain
from runtime.store.node_memory import NodeMemory, Room
from runtime.store.peer_messages import Announcement, Removal, Tier
from runtime.store.ssd import SsdTier

STRANGER_S = 30.0


@dataclass(slots=True)
class NodeState:
    """Shared by the parts of one node. Everything here is read and changed under ``lock``.

    Attributes:
        config: Of the node.
        incarnation: Larger at every start.
        policy: Decides what stays.
        memory: Blocks in shared memory.
        ssd: Blocks on SSD, or None.
        directory: What the whole pool holds.
        owner_rule: Who answers for a region.
        counters: What happened.
        weights: Weights of the live nodes, this one among them.
        on_change: Told of copies that this node came to hold or gave up.
        lock: Guards all of it.
        changed: Notified when a block arrived or did not.
    """

    config: StoreConfig
    incarnation: int
    policy: StorePolicy
    memory: NodeMemory
    ssd: SsdTier | None
    directory: Directory
    owner_rule: OwnerRule
    counters: Counters
    weights: dict[str, float]
    on_change: Callable[[Sequence[Announcement], Sequence[Removal]], None]
    lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    leases: Leases = field(init=False)
    _start_s: float = field(default_factory=time.monotonic)
    _gone: list[Removal] = field(default_factory=list)
    _strangers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self.leases = Leases(self._lease_ended, first_id=self.incarnation)

    def now(self) -> float:
        """Seconds since the node began."""
        return time.monotonic() - self._start_s

    def _lease_ended(self, lease: Lease) -> None:
        if lease.passing:
            self.memory.cancel(lease.passing, now=self.now())

    def hold(self, infos: Iterable[BlockInfo], tier: Tier, *, is_owned: bool) -> None:
        """This node has come to hold copies: enter and announce them."""
        added = []
        for info in infos:
            held = Held(info.region, info.index, info.depth, info.length)
            self.directory.add(
                self.config.node, self.incarnation, info.key, held, tier=tier, is_owned=is_owned
            )
            is_shared = len(self.directory.places(info.key)) > 1
            if is_shared and tier == "memory" and self.is_elsewhere(info.key):
                self.policy.set_elsewhere(info.key, True, now=self.now())
            added.append(
                Announcement(
                    key=info.key,
                    region=info.region,
                    index=info.index,
                    depth=info.depth,
                    length=info.length,
                    tier=tier,
                    is_owned=is_owned,
                )
            )
        self._announce(added)

    def gone(self, key: bytes, tier: Tier) -> None:
        """This node gave a copy up; announced with the next change or ``tell``."""
        self.directory.discard(self.config.node, self.incarnation, key, tier=tier)
        self._gone.append(Removal(key=key, tier=tier))

    def tell(self) -> None:
        """Announce what was given up."""
        if self._gone:
            self._announce([])

    def _announce(self, added: Sequence[Announcement]) -> None:
        removed, self._gone = self._gone, []
        if added or removed:
            self.on_change(added, removed)

    def is_stored(self, key: Key) -> bool:
        """Whether a live node holds the block."""
        weights = self.weights
        return any(place.node in weights for place in self.directory.places(key))

    def is_elsewhere(self, key: Key) -> bool:
        """Whether the memory of another live node holds the block."""
        here, weights = self.config.node, self.weights
        return any(
            place.memory is not None and place.node != here and place.node in weights
            for place in self.directory.places(key)
        )

    def reprice(self, key: Key) -> None:
        """Copies came or went: what is the one here worth now?"""
        self.policy.set_elsewhere(key, self.is_elsewhere(key), now=self.now())

    def forget_strangers(self, *, now: float) -> None:
        """Forget what nodes said that have not been live for a while.

        The announcements of a node that joins may overtake its first heartbeat, so they are kept
        for some time; a node that left may speak on. Neither is believed as long as it is not
        live, and all holdings are read when a node joins.
        """
        strangers = [node for node in self.directory.nodes() if node not in self.weights]
        self._strangers = {node: self._strangers.get(node, now) for node in strangers}
        for node, since_s in self._strangers.items():
            if now - since_s >= STRANGER_S:
                self.directory.forget_node(node)
                self.counters.add("strangers_forgotten")

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are held by live nodes."""
        return self.directory.leading(keys, self.weights)

    def pin_chain(self, keys: Iterable[bytes]) -> Collection[bytes]:
        """Pinned blocks and a chain: what may not go while room is made for the chain's end."""
        return PinnedChain(self.leases, keys)

    def forget_broken(self, room: Room) -> None:
        """A block in memory is not what its checksum says."""
        self.counters.add("blocks_broken_in_memory")
        if self.memory.get(room.info.key) is room:
            self.memory.forget(room.info.key, now=self.now())
            self.tell()
