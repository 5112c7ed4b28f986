"""Memory split into areas: owned and replica blocks, tenants with quotas.

Each area ranks its own blocks and never grows beyond its limit. When all memory is full, room
comes from the areas that hold more than they are entitled to, the one that exceeds it most first,
and from the area that asks. An area within its entitlement gives way to nobody else: if nothing
that may go is left (all of it is being read), the new block is refused. One rule so covers the
threshold between owned and replica blocks (soft or static) and the quotas of tenants, whose limit
is their entitlement: within its quota nobody pushes a tenant's blocks out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from policies.prefix.eviction.base import EvictionPolicy, Key
from policies.prefix.store_settings import StoreSettings

EVERYBODY = None
_MakePolicy = Callable[[int], EvictionPolicy]


@dataclass(slots=True)
class Area:
    """Blocks that compete with each other.

    Attributes:
        policy: Ranks them.
        limit_bytes: The area never holds more.
        entitled_bytes: What it may hold without giving way to others.
        used_bytes: Held and reserved; changed by ``Areas`` alone.
    """

    policy: EvictionPolicy
    limit_bytes: int
    entitled_bytes: int
    used_bytes: int = 0


class Areas:
    """The areas of one memory, and which of them gives way."""

    def __init__(self, settings: StoreSettings, make_policy: _MakePolicy) -> None:
        """Lay out the areas.

        Args:
            settings: Of the node.
            make_policy: Builds an eviction policy for so many bytes.
        """
        self._rule = settings.replicas
        self.capacity_bytes = memory = settings.memory_bytes
        shared = memory - sum(settings.quota_bytes.values())
        self._quotas = dict(settings.quota_bytes)
        self._areas: dict[tuple[Key | None, str], Area] = {}
        self._used_bytes = 0
        self.withheld_bytes = 0  # serve nobody for the time being
        share = round(settings.replica_share * shared)
        if self._rule == "static":
            self._add((EVERYBODY, "owned"), make_policy, shared - share, shared - share)
            self._add((EVERYBODY, "replica"), make_policy, share, share)
        elif self._rule == "soft":
            self._add((EVERYBODY, "owned"), make_policy, memory, shared - share)
            self._add((EVERYBODY, "replica"), make_policy, memory, share)
        else:
            self._add((EVERYBODY, "all"), make_policy, memory, shared)
        for tenant, quota in self._quotas.items():
            self._add((tenant, "all"), make_policy, quota, quota)
        areas = self._areas.values()
        self._growing = tuple(a for a in areas if a.limit_bytes > a.entitled_bytes)
        self._of_everybody = tuple(a for (t, _), a in self._areas.items() if t is EVERYBODY)

    def _add(
        self, name: tuple[Key | None, str], make_policy: _MakePolicy, limit: int, entitled: int
    ) -> None:
        limit, entitled = max(1, limit), max(1, entitled)
        self._areas[name] = Area(make_policy(limit), limit, entitled)

    def area(self, tenant: Key | None, *, is_owned: bool) -> Area:
        """Where a block of that tenant and kind belongs."""
        if tenant is not None and tenant in self._quotas:
            return self._areas[(tenant, "all")]
        if self._rule in ("static", "soft"):
            return self._areas[(EVERYBODY, "owned" if is_owned else "replica")]
        return self._areas[(EVERYBODY, "all")]

    def __iter__(self) -> Iterator[Area]:
        return iter(self._areas.values())

    def told(self, tenant: Key | None) -> tuple[Area, ...]:
        """The areas that hear of every request of a tenant, whether they hold blocks of it or not.

        Others hear only of requests that read their blocks.
        """
        if tenant is not None and tenant in self._quotas:
            return (*self._of_everybody, self._areas[(tenant, "all")])
        return self._of_everybody

    @property
    def used_bytes(self) -> int:
        """Held and reserved, in sum."""
        return self._used_bytes

    def take(self, area: Area, size_bytes: int) -> None:
        """A block is held by an area from now on, or reserved there."""
        area.used_bytes += size_bytes
        self._used_bytes += size_bytes

    def give_back(self, area: Area, size_bytes: int) -> None:
        """A block is no longer held by an area."""
        self.take(area, -size_bytes)

    def victim(
        self, area: Area, size_bytes: int, pinned: Container[Key], *, now: float
    ) -> tuple[Area, Key] | None:
        """The next block to give up so that ``size_bytes`` fit into the area; None: nothing may go.

        Raises:
            LookupError: If they fit already.
        """
        if area.used_bytes + size_bytes > area.limit_bytes:
            key = area.policy.evict(pinned, now=now)
            return None if key is None else (area, key)
        if self.used_bytes + size_bytes <= self.capacity_bytes - self.withheld_bytes:
            raise LookupError("there is room")
        may_give = [a for a in self._growing if a is not area and a.used_bytes > a.entitled_bytes]
        may_give.append(area)
        may_give.sort(key=lambda a: a.used_bytes / a.entitled_bytes, reverse=True)
        for candidate in may_give:
            key = candidate.policy.evict(pinned, now=now)
            if key is not None:
                return candidate, key
        return None

    def fits(self, area: Area, size_bytes: int) -> bool:
        """Whether that much more fits into the area without giving anything up."""
        return (
            area.used_bytes + size_bytes <= area.limit_bytes
            and self.used_bytes + size_bytes <= self.capacity_bytes - self.withheld_bytes
        )
