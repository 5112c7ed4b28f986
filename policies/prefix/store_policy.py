"""What one node of the store keeps, where, and what goes when room is needed.

The policy owns the accounts of a node's memory and SSD; its driver (the store's server, or the
twin) owns the bytes. A block is first reserved (its bytes count, nobody sees it), then committed
(it may be read and given up) or cancelled. Keys are any hashable values and are never looked into,
so the store passes content keys and the twin small integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from models.prefix_costs import PrefixCosts
from policies.prefix.areas import Area, Areas
from policies.prefix.copy_prices import CopyPrices
from policies.prefix.eviction.base import Block, EvictionPolicy, Key
from policies.prefix.store_orders import FlushOrders, NewBlock, ReserveOrders, Tier, Victim
from policies.prefix.store_settings import StoreSettings


@dataclass(slots=True)
class _Resident:
    block: NewBlock
    area: Area
    is_committed: bool = False
    is_elsewhere: bool = False
    is_owned: bool = True


class StorePolicy:
    """One node's choices.

    ``now`` is seconds since the run began and never decreases.
    """

    def __init__(
        self,
        settings: StoreSettings,
        costs: PrefixCosts,
        make_policy: Callable[[str, int], EvictionPolicy] | None = None,
    ) -> None:
        """Start with nothing stored.

        Args:
            settings: Of the node.
            costs: What blocks cost to compute and to bring.
            make_policy: Name and capacity in bytes -> eviction policy; None: from the catalog.

        Raises:
            ValueError: If there is no eviction policy of a name.
        """
        if make_policy is None:
            from policies.catalog import eviction_policy

            make_policy = eviction_policy
        build = make_policy
        self.settings, self.costs = settings, costs
        self._prices = CopyPrices(costs, is_pooled=settings.num_nodes > 1)
        self._areas = Areas(settings, lambda size: build(settings.eviction, size))
        self._memory: dict[Key, _Resident] = {}
        self._ssd_policy = build(settings.ssd_eviction, max(1, settings.ssd_bytes))
        self._ssd: dict[Key, NewBlock] = {}
        self._ssd_pending: dict[Key, NewBlock] = {}
        self._ssd_used_bytes = 0
        self._awaited_children: dict[Key, int] = {}

    # --- what is where ---------------------------------------------------------------------

    def in_memory(self, key: Key) -> Literal["owned", "replica"] | None:
        """How a committed block is held in memory; None if it is not."""
        resident = self._memory.get(key)
        if resident is None or not resident.is_committed:
            return None
        return "owned" if resident.is_owned else "replica"

    def is_reserved(self, key: Key) -> bool:
        """Whether the block has room in memory but is not committed."""
        resident = self._memory.get(key)
        return resident is not None and not resident.is_committed

    def on_ssd(self, key: Key) -> bool:
        """Whether the block is on SSD."""
        return key in self._ssd

    @property
    def memory_used_bytes(self) -> int:
        """Held and reserved in memory."""
        return self._areas.used_bytes

    @property
    def ssd_used_bytes(self) -> int:
        """Held and being written on SSD."""
        return self._ssd_used_bytes

    def __len__(self) -> int:
        return len(self._memory.keys() | self._ssd.keys())

    # --- reading ---------------------------------------------------------------------------

    def read(
        self, chain: Sequence[Key], *, now: float, category: int = 0, tenant: Key | None = None
    ) -> FlushOrders:
        """A request with this prompt (root first, stored or not) reads what is stored of it.

        Args:
            chain: All blocks of the prompt.
            now: Seconds.
            category: Kind of request, where the caller knows it.
            tenant: Whose request, where tenants have quotas.

        Returns:
            Blocks worth writing to SSD now that they are used again.
        """
        flush: list[Key] = []
        wants_flush = self.settings.flush == "on_reuse" and self.settings.ssd_bytes > 0
        ranks: dict[int, tuple[EvictionPolicy, list[Key]]] = {
            id(area): (area.policy, []) for area in self._areas.told(tenant)
        }
        for key in chain:
            resident = self._memory.get(key)
            if resident is not None and resident.is_committed:
                area = resident.area
                ranks.setdefault(id(area), (area.policy, []))[1].append(key)
        if self.settings.ssd_bytes > 0:
            on_ssd = [key for key in chain if key in self._ssd]
            ranks[id(self._ssd_policy)] = (self._ssd_policy, on_ssd)
        for policy, held in ranks.values():
            policy.begin_request(chain, now=now, category=category)
            for key in held:
                policy.access(key, now=now)
            policy.end_request(held, now=now)
        if wants_flush:
            for key in chain:
                resident = self._memory.get(key)
                if resident is not None and self._is_to_flush(key, resident):
                    flush.append(key)
        return FlushOrders(tuple(flush))

    # --- memory ----------------------------------------------------------------------------

    def reserve(
        self, blocks: Sequence[NewBlock], *, pinned: Collection[Key], now: float
    ) -> ReserveOrders:
        """Make room in memory for the blocks of one chain, root first.

        Args:
            blocks: New blocks, each the child of the one before; not yet in memory.
            pinned: Blocks that may not go: being read, and the chain that the new ones extend.
            now: Seconds.

        Returns:
            How many leading blocks got room; their victims leave at once.

        Raises:
            ValueError: If a block is in memory already, or reserved.
        """
        keep = _Pinned(pinned, self._awaited_children)
        victims: list[Victim] = []
        for count, block in enumerate(blocks):
            if block.key in self._memory:
                raise ValueError("a block to be reserved is in memory already")
            if not block.is_owned and self.settings.replicas == "none":
                return ReserveOrders(count, tuple(victims), "rule")
            area = self._areas.area(block.tenant, is_owned=block.is_owned)
            while not self._areas.fits(area, block.size_bytes):
                is_quota = area.used_bytes + block.size_bytes > area.limit_bytes
                found = self._areas.victim(area, block.size_bytes, keep, now=now)
                if found is None:
                    is_tenants = is_quota and block.tenant in self.settings.quota_bytes
                    return ReserveOrders(count, tuple(victims), "quota" if is_tenants else "full")
                victims.append(self._forget(*found))
            self._areas.take(area, block.size_bytes)
            self._memory[block.key] = _Resident(
                block, area, is_owned=block.is_owned, is_elsewhere=not block.is_owned
            )
            if block.parent is not None:
                self._await_child(block.parent, 1)
        return ReserveOrders(len(blocks), tuple(victims))

    def _forget(self, area: Area, key: Key) -> Victim:
        resident = self._memory.pop(key)
        self._areas.give_back(area, resident.block.size_bytes)
        return Victim(key, is_lost=not resident.is_elsewhere and key not in self._ssd)

    def commit(self, keys: Sequence[Key], *, now: float) -> FlushOrders:
        """Reserved blocks (root first) hold their bytes now.

        Raises:
            KeyError: If one was not reserved.
        """
        flush = []
        by_area: dict[int, tuple[Area, list[Key]]] = {}
        for key in keys:
            resident = self._reserved(key)
            resident.is_committed = True
            self._settle(resident.block)
            resident.area.policy.insert(self._ranked(key, resident), now=now)
            by_area.setdefault(id(resident.area), (resident.area, []))[1].append(key)
            if self.settings.flush == "on_commit" and self._is_to_flush(key, resident):
                flush.append(key)
        for area, inserted in by_area.values():
            area.policy.end_request(inserted, now=now)
        return FlushOrders(tuple(flush))

    def cancel(self, keys: Iterable[Key], *, now: float) -> None:
        """Reserved blocks will not come; their room is free.

        Raises:
            KeyError: If one was not reserved.
        """
        for key in keys:
            resident = self._reserved(key)
            del self._memory[key]
            self._areas.give_back(resident.area, resident.block.size_bytes)
            self._settle(resident.block)

    def _reserved(self, key: Key) -> _Resident:
        resident = self._memory.get(key)
        if resident is None or resident.is_committed:
            raise KeyError("a block was not reserved")
        return resident

    def _await_child(self, parent: Key, change: int) -> None:
        count = self._awaited_children.get(parent, 0) + change
        if count:
            self._awaited_children[parent] = count
        else:
            self._awaited_children.pop(parent, None)

    def _settle(self, block: NewBlock) -> None:
        if block.parent is not None:
            self._await_child(block.parent, -1)

    def _is_to_flush(self, key: Key, resident: _Resident) -> bool:
        return (
            self.settings.ssd_bytes > 0
            and resident.is_committed
            and resident.is_owned
            and key not in self._ssd
            and key not in self._ssd_pending
        )

    # --- SSD -------------------------------------------------------------------------------

    def reserve_ssd(self, keys: Sequence[Key], *, now: float) -> ReserveOrders:
        """Make room on SSD for blocks in memory, in the order of a flush.

        Raises:
            KeyError: If a block is not in memory.
        """
        victims: list[Victim] = []
        for count, key in enumerate(keys):
            block = self._memory[key].block
            if key in self._ssd or key in self._ssd_pending:
                continue
            while self._ssd_used_bytes + block.size_bytes > self.settings.ssd_bytes:
                gone = self._ssd_policy.evict((), now=now)
                if gone is None:
                    return ReserveOrders(count, tuple(victims), "full")
                victims.append(self._forget_ssd(gone, now))
            self._ssd_pending[key] = block
            self._ssd_used_bytes += block.size_bytes
        return ReserveOrders(len(keys), tuple(victims))

    def _forget_ssd(self, key: Key, now: float) -> Victim:
        self._ssd_used_bytes -= self._ssd.pop(key).size_bytes
        self._reprice(key, now)
        resident = self._memory.get(key)
        return Victim(key, is_lost=resident is None or not resident.is_committed)

    def flushed(self, keys: Sequence[Key], *, now: float) -> None:
        """These blocks are durable on SSD.

        Raises:
            KeyError: If one had no room reserved there.
        """
        for key in keys:
            block = self._ssd_pending.pop(key)
            self._insert_ssd(block, now)
            self._reprice(key, now)
        self._ssd_policy.end_request(keys, now=now)

    def flush_failed(self, keys: Iterable[Key], *, now: float) -> None:
        """These blocks could not be written.

        Raises:
            KeyError: If one had no room reserved there.
        """
        for key in keys:
            self._ssd_used_bytes -= self._ssd_pending.pop(key).size_bytes

    def _insert_ssd(self, block: NewBlock, now: float) -> None:
        self._ssd[block.key] = block
        price_s = self._prices.on_ssd_s(block.depth, block.size_bytes)
        self._ssd_policy.insert(
            Block(block.key, block.parent, block.depth, block.size_bytes, price_s), now=now
        )

    def withhold(self, size_bytes: int, *, now: float) -> None:
        """So much of the memory serves nobody until told otherwise (late writers may write there).

        Blocks that are held stay; room for new ones is found within the rest.
        """
        self._areas.withheld_bytes = size_bytes

    # --- other events ----------------------------------------------------------------------

    def lost(self, key: Key, tier: Tier, *, now: float) -> None:
        """A stored block is gone or broken, by nobody's choice; unknown blocks are ignored."""
        if tier == "ssd":
            if key in self._ssd:
                self._ssd_policy.remove(key)
                self._forget_ssd(key, now)
            return
        resident = self._memory.get(key)
        if resident is not None and resident.is_committed:
            resident.area.policy.remove(key)
            self._forget(resident.area, key)

    def set_elsewhere(self, key: Key, is_elsewhere: bool, *, now: float) -> None:
        """Another node's memory has come to hold the block, or does no longer."""
        resident = self._memory.get(key)
        if resident is not None and resident.is_elsewhere != is_elsewhere:
            resident.is_elsewhere = is_elsewhere
            self._reprice(key, now)

    def own(self, keys: Iterable[Key], *, now: float) -> FlushOrders:
        """Replicas become this node's own (their owner died); unknown blocks are ignored."""
        flush = []
        for key in keys:
            resident = self._memory.get(key)
            if resident is None or resident.is_owned:
                continue
            resident.is_owned, resident.is_elsewhere = True, False
            if not resident.is_committed:
                continue
            area = self._areas.area(resident.block.tenant, is_owned=True)
            if area is not resident.area:
                resident.area.policy.remove(key)
                self._areas.give_back(resident.area, resident.block.size_bytes)
                resident.area = area
                self._areas.take(area, resident.block.size_bytes)
                area.policy.insert(self._ranked(key, resident), now=now)
            else:
                self._reprice(key, now)
            if self.settings.flush != "never" and self._is_to_flush(key, resident):
                flush.append(key)
        return FlushOrders(tuple(flush))

    def recover(self, blocks: Sequence[NewBlock], tier: Tier, *, now: float) -> int:
        """Blocks found after a restart, parents before children.

        Returns:
            How many leading ones are kept; the rest has no room.

        Raises:
            ValueError: If one is known already.
        """
        for count, block in enumerate(blocks):
            if block.key in (self._memory if tier == "memory" else self._ssd):
                raise ValueError("a recovered block is known already")
            if tier == "memory":
                area = self._areas.area(block.tenant, is_owned=block.is_owned)
                if not self._areas.fits(area, block.size_bytes):
                    return count
                self._areas.take(area, block.size_bytes)
                resident = _Resident(block, area, True, not block.is_owned, block.is_owned)
                self._memory[block.key] = resident
                area.policy.insert(self._ranked(block.key, resident), now=now)
            else:
                if self._ssd_used_bytes + block.size_bytes > self.settings.ssd_bytes:
                    return count
                self._ssd_used_bytes += block.size_bytes
                self._insert_ssd(block, now)
                self._reprice(block.key, now)
        return len(blocks)

    def _ranked(self, key: Key, resident: _Resident) -> Block:
        block = resident.block
        price_s = self._price_s(key, resident)
        return Block(key, block.parent, block.depth, block.size_bytes, price_s)

    def _price_s(self, key: Key, resident: _Resident) -> float:
        return self._prices.in_memory_s(
            resident.block.depth,
            resident.block.size_bytes,
            is_owned=resident.is_owned,
            is_on_ssd=key in self._ssd,
            is_elsewhere=resident.is_elsewhere,
        )

    def _reprice(self, key: Key, now: float) -> None:
        resident = self._memory.get(key)
        if resident is not None and resident.is_committed:
            resident.area.policy.reprice(key, self._price_s(key, resident), now=now)


class _Pinned:
    """What may not go: blocks in use, and parents of blocks that are on their way."""

    __slots__ = ("_awaited", "_pinned")

    def __init__(self, pinned: Collection[Key], awaited: dict[Key, int]) -> None:
        self._pinned, self._awaited = pinned, awaited

    def __contains__(self, key: object) -> bool:
        return key in self._pinned or key in self._awaited
