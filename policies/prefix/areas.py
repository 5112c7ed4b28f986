"""Memory split into areas: owned and replica blocks, tenants with quotas.

Each area ranks its own blocks. An area never grows beyond its limit; when all memory is full, the
area that uses most of what it is entitled to gives way first. One rule so covers the threshold
between owned and replica blocks (soft or static) and quotas of tenants.
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
        used_bytes: Held and reserved.
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

    @property
    def used_bytes(self) -> int:
        """Held and reserved, in sum."""
        return sum(area.used_bytes for area in self._areas.values())

    def victim(
        self, area: Area, size_bytes: int, pinned: Container[Key], *, now: float
    ) -> tuple[Area, Key] | None:
        """The next block to give up so that ``size_bytes`` fit into the area; None: nothing can go.

        Raises:
            LookupError: If they fit already.
        """
        if area.used_bytes + size_bytes > area.limit_bytes:
            key = area.policy.evict(pinned, now=now)
            return None if key is None else (area, key)
        if self.used_bytes + size_bytes <= self.capacity_bytes:
            raise LookupError("there is room")
        fullest_first = sorted(
            self._areas.values(), key=lambda a: a.used_bytes / a.entitled_bytes, reverse=True
        )
        for candidate in fullest_first:
            key = candidate.policy.evict(pinned, now=now)
            if key is not None:
                return candidate, key
        return None

    def fits(self, area: Area, size_bytes: int) -> bool:
        """Whether that much more fits into the area without giving anything up."""
        return (
            area.used_bytes + size_bytes <= area.limit_bytes
            and self.used_bytes + size_bytes <= self.capacity_bytes
        )
