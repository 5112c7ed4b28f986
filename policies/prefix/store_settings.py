"""How one node of the store is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from policies.prefix.eviction.base import Key

ReplicaRule = Literal["unified", "none", "soft", "static"]
FlushRule = Literal["on_commit", "on_reuse", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """One node's memory, SSD and rules.

    Attributes:
        memory_bytes: Host memory for blocks.
        ssd_bytes: SSD for blocks; 0: none.
        eviction: Name of the policy that ranks the blocks in memory.
        ssd_eviction: Name of the policy that ranks the blocks on SSD.
        replicas: Copies of other nodes' blocks: ``unified`` (each copy is worth what its loss
            costs, no threshold), ``none``, ``soft`` (they use any free room and go first once they
            hold more than ``replica_share``) or ``static`` (they have that share to themselves).
        replica_share: Share of memory, 0..1; for ``soft`` and ``static``.
        flush: When owned blocks are written to SSD: as soon as they are stored (``on_commit``),
            when they are read for the first time (``on_reuse``: less wear), or ``never``.
        num_nodes: Nodes of the pool: in a pool most readers of an owned block sit elsewhere.
        quota_bytes: Tenant -> most bytes of memory its blocks may take; others share the rest.
    """

    memory_bytes: int
    ssd_bytes: int = 0
    eviction: str = "tree_hd"
    ssd_eviction: str = "lru"
    replicas: ReplicaRule = "unified"
    replica_share: float = 0.25
    flush: FlushRule = "on_commit"
    num_nodes: int = 1
    quota_bytes: Mapping[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ValueError(f"memory_bytes must be > 0, found {self.memory_bytes}")
        if self.ssd_bytes < 0:
            raise ValueError(f"ssd_bytes must be >= 0, found {self.ssd_bytes}")
        if self.replicas not in get_args(ReplicaRule):
            raise ValueError(
                f"replicas must be one of {', '.join(get_args(ReplicaRule))}, "
                f"found {self.replicas!r}"
            )
        if self.flush not in get_args(FlushRule):
            raise ValueError(
                f"flush must be one of {', '.join(get_args(FlushRule))}, found {self.flush!r}"
            )
        if not 0.0 < self.replica_share < 1.0:
            raise ValueError(f"replica_share must be within 0..1, found {self.replica_share}")
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes must be >= 1, found {self.num_nodes}")
        if any(quota <= 0 for quota in self.quota_bytes.values()):
            raise ValueError("quota_bytes must be > 0 for every tenant")
        if sum(self.quota_bytes.values()) >= self.memory_bytes:
            raise ValueError(
                f"quota_bytes: {sum(self.quota_bytes.values()):,} bytes in sum leave nothing of "
                f"memory_bytes ({self.memory_bytes:,}) to the other tenants"
            )
