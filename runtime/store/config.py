"""How a store is set up on one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from models.prefix_costs import PrefixCosts
from policies.prefix.store_settings import FlushRule, ReplicaRule
from runtime.store.errors import StoreSetupError

DEFAULT_BLOCK_BYTES = 2 << 20
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
        if self.dram_bytes < self.block_bytes:
            raise StoreSetupError(
                f"DRAM size: must hold at least one block of {self.block_bytes:,} bytes, "
                f"found {self.dram_bytes:,}"
            )
        for name in ("lease_s", "reservation_s"):
            if getattr(self, name) <= 0:
                raise StoreSetupError(f"{name}: must be > 0, found {getattr(self, name)}")
        if not 0 < len(self.node.encode()) <= 255:
            raise StoreSetupError(f"node: must be a name of 1 to 255 bytes, found {self.node!r}")
