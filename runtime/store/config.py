"""How a store is set up on one node."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from models.prefix_costs import PrefixCosts
from policies.catalog import EVICTION, OWNERS
from policies.prefix.store_settings import FlushRule, ReplicaRule
from runtime.store.errors import StoreSetupError
from runtime.store.sizes import MOST_BYTES

DEFAULT_BLOCK_BYTES = 2 << 20
LEAST_BLOCK_BYTES = 64
MOST_BLOCK_BYTES = 1 << 30
TENANT_BYTES = 16
LEASE_S = 30.0
RESERVATION_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """One node's store.

    Attributes:
        folder: Home of the store: SSD segments, index, incarnation.
        dram_bytes: Shared memory for blocks.
        ssd_bytes: SSD for blocks; 0: none.
        block_bytes: Most bytes of a block; the memory is cut into slots of this size.
        node: Name of this node in its pool.
        eviction, ssd_eviction, replicas, replica_share, flush: As in ``StoreSettings``.
        owner_rule: Who answers for a region: ``rendezvous``, ``writer`` or ``anchor``.
        costs: What blocks cost to compute and to bring. None: nominal prices rank the blocks, and
            whatever is stored is loaded; given: blocks that are cheaper computed are not loaded.
        quota_bytes: Tenant's tag -> most bytes of memory.
        lease_s: A reader that holds blocks longer than this loses them.
        reservation_s: A writer that has not committed by then loses its room.
        segment_bytes: Size of the SSD's segment files.
        log_calls: Calls of the policy to keep for replay; 0: none.
        is_arena_kept: Whether a clean close leaves the blocks in shared memory.
        is_pooled: Whether other nodes belong to the pool.
    """

    folder: Path
    dram_bytes: int
    ssd_bytes: int = 0
    block_bytes: int = DEFAULT_BLOCK_BYTES
    node: str = "local"
    eviction: str = "tree_hd"
    ssd_eviction: str = "lru"
    replicas: ReplicaRule = "unified"
    replica_share: float = 0.25
    flush: FlushRule = "on_commit"
    owner_rule: str = "rendezvous"
    costs: PrefixCosts | None = None
    quota_bytes: Mapping[bytes, int] = field(default_factory=dict)
    lease_s: float = LEASE_S
    reservation_s: float = RESERVATION_S
    segment_bytes: int = 256 << 20
    log_calls: int = 0
    is_arena_kept: bool = False
    is_pooled: bool = False

    def __post_init__(self) -> None:
        """Checks.

        Raises:
            StoreSetupError: Naming the setting that is out of range, and what is allowed.
        """
        _check_sizes(self)
        for name, found, allowed in (
            ("eviction", self.eviction, tuple(EVICTION)),
            ("ssd_eviction", self.ssd_eviction, tuple(EVICTION)),
            ("replicas", self.replicas, get_args(ReplicaRule)),
            ("flush", self.flush, get_args(FlushRule)),
            ("owner_rule (owner)", self.owner_rule, tuple(OWNERS)),
        ):
            if found not in allowed:
                raise StoreSetupError(
                    f"{name}: must be one of {', '.join(allowed)}, found {found!r}"
                )
        if not 0.0 < self.replica_share < 1.0:
            raise StoreSetupError(f"replica_share: must be within 0..1, found {self.replica_share}")
        for name in ("lease_s", "reservation_s"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise StoreSetupError(
                    f"{name}: must be > 0 and finite, found {getattr(self, name)}"
                )
        if self.log_calls < 0:
            raise StoreSetupError(f"log_calls: must be >= 0, found {self.log_calls}")
        if not 0 < len(self.node.encode()) <= 255:
            raise StoreSetupError(f"node: must be a name of 1 to 255 bytes, found {self.node!r}")
        _check_quotas(self.quota_bytes, self.policy_memory_bytes)

    @property
    def policy_memory_bytes(self) -> int:
        """Memory that the policy fills: all slots but those for blocks that only pass."""
        num_slots = self.dram_bytes // self.block_bytes
        return (num_slots - passing_slots(num_slots)) * self.block_bytes


def passing_slots(num_slots: int) -> int:
    """Slots for blocks that serve one load or one put only, such as what is too cheap to keep."""
    return min(num_slots // 16, 256)


def _check_sizes(config: StoreConfig) -> None:
    if not LEAST_BLOCK_BYTES <= config.block_bytes <= MOST_BLOCK_BYTES:
        raise StoreSetupError(
            f"block_bytes: slot size: must be >= {LEAST_BLOCK_BYTES} B and at most 1 GiB, "
            f"found {config.block_bytes:,} B"
        )
    if config.dram_bytes < config.block_bytes:
        raise StoreSetupError(
            f"dram: DRAM size: must hold at least one block of {config.block_bytes:,} bytes, "
            f"found {config.dram_bytes:,}"
        )
    for name, size in (("dram", config.dram_bytes), ("ssd", config.ssd_bytes)):
        if not 0 <= size <= MOST_BYTES:
            raise StoreSetupError(f"{name}: must be at most 1,048,576 TiB, found {size:,} B")
    if config.segment_bytes <= 0:
        raise StoreSetupError(f"segment_bytes: must be > 0, found {config.segment_bytes}")
    if config.ssd_bytes > 0:
        disk = _disk_bytes(config.folder)
        if disk is not None and config.ssd_bytes > disk:
            raise StoreSetupError(
                f"ssd: {config.ssd_bytes / 2**30:,.1f} GiB are more than the disk of "
                f"{config.folder} has, {disk / 2**30:,.1f} GiB"
            )


def _check_quotas(quotas: Mapping[bytes, int], memory_bytes: int) -> None:
    for tenant, quota in quotas.items():
        if not isinstance(tenant, bytes) or len(tenant) != TENANT_BYTES:
            raise StoreSetupError(f"quota_bytes: a tenant's tag must have {TENANT_BYTES} bytes")
        if quota <= 0:
            raise StoreSetupError(f"quota_bytes: a quota must be > 0, found {quota}")
    if sum(quotas.values()) >= memory_bytes:
        raise StoreSetupError(
            f"quota_bytes: the sum of the quotas, {sum(quotas.values()):,} bytes, must leave "
            f"something of the memory ({memory_bytes:,} bytes) to the other tenants; they leave "
            "nothing"
        )


def _disk_bytes(folder: Path) -> int | None:
    """Size of the disk that the folder is on, or will be on once it is made."""
    for place in (folder.absolute(), *folder.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(place).total
    return None
