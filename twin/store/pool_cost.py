"""Mean seconds of fetching and computing in a pool under a rule for replicas, nothing queued.

Requests come one after the other to nodes drawn at random. Each is charged for what its prompt
costs: a block from a memory the copy to the device; one from another node the network as well; one
from SSD the disk; a block that nobody holds its prefill. Every state is that of the real policies;
only time is summed instead of simulated, so rules can be compared over many settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.prefix_costs import PrefixCosts
from policies.prefix.owners import Rendezvous
from policies.prefix.store_settings import ReplicaRule, StoreSettings
from traces.prefix_workloads import PrefixRequest
from twin.store.pool import Room, StorePool, new_pool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRule:
    """How copies of other nodes' blocks are kept.

    Attributes:
        replicas: Rule of the store.
        share: Share of memory, for ``soft`` and ``static``.
    """

    replicas: ReplicaRule
    share: float = 0.25

    @property
    def label(self) -> str:
        """``none``, ``unified``, ``soft:0.1``, ``static:0.25``."""
        has_share = self.replicas in ("soft", "static")
        return f"{self.replicas}:{self.share:g}" if has_share else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCost:
    """What requests cost in the mean, and where their blocks came from.

    Attributes:
        fetch_s, compute_s: Seconds a request.
        local, remote, ssd, computed: Shares of the prompts' blocks.
    """

    fetch_s: float
    compute_s: float
    local: float
    remote: float
    ssd: float
    computed: float

    @property
    def total_s(self) -> float:
        """Fetching and computing."""
        return self.fetch_s + self.compute_s


def pool_cost(
    requests: Sequence[PrefixRequest],
    nodes_of: Sequence[int],
    *,
    num_nodes: int,
    node_blocks: int,
    ssd_blocks: int,
    rule: PoolRule,
    costs: PrefixCosts,
    block_bytes: int,
    eviction: str = "gdsf",
) -> PoolCost:
    """Run all requests through one pool.

    Args:
        requests: In order of time.
        nodes_of: [requests] node of each.
        num_nodes: Nodes of the pool.
        node_blocks, ssd_blocks: Blocks that one node's memory and its SSD hold.
        rule: For replicas.
        costs: Of blocks.
        block_bytes: Size of a block.
        eviction: Policy of every memory.
    """
    names = tuple(f"node-{n:03d}" for n in range(num_nodes))
    settings = StoreSettings(
        memory_bytes=node_blocks * block_bytes,
        ssd_bytes=ssd_blocks * block_bytes,
        eviction=eviction,
        replicas=rule.replicas,
        replica_share=rule.share,
        num_nodes=num_nodes,
    )
    pool = new_pool(
        names, settings, costs, Rendezvous(), block_bytes=block_bytes, may_recompute=True
    )
    sums = dict.fromkeys(("fetch_s", "compute_s", "local", "remote", "ssd", "computed"), 0.0)
    recompute_s: list[float] = []
    total = 0
    for request, node in zip(requests, nodes_of, strict=True):
        while len(recompute_s) < len(request.prompt):
            recompute_s.append(costs.recompute_s(len(recompute_s)))
        wanted = _read(pool, names[node], request, block_bytes, sums)
        _keep(pool, names[node], request)
        sums["compute_s"] += sum(recompute_s[wanted : len(request.prompt)])
        sums["computed"] += len(request.prompt) - wanted
        total += len(request.prompt)
    count = len(requests)
    return PoolCost(
        fetch_s=sums["fetch_s"] / count,
        compute_s=sums["compute_s"] / count,
        **{name: sums[name] / total for name in ("local", "remote", "ssd", "computed")},
    )


def _read(
    pool: StorePool, node: str, request: PrefixRequest, block_bytes: int, sums: dict[str, float]
) -> int:
    """Charge what is fetched; returns how many leading blocks are."""
    chain, now, costs = request.prompt, request.time_s, pool.costs
    plan = pool.plan(node, chain)
    holders = [node, *plan.remote]
    for holder, keys in pool.read(holders, chain, now=now, category=request.category).items():
        _flush(pool, holder, keys, now)
    copied_s = block_bytes / costs.local.bytes_per_s
    for way in plan.ways:
        is_remote, is_ssd = way.node != node, way.source in ("ssd", "remote_ssd")
        sums["fetch_s"] += copied_s
        if is_remote:
            sums["fetch_s"] += block_bytes / costs.remote.bytes_per_s
        if is_ssd:
            sums["fetch_s"] += block_bytes / costs.ssd.bytes_per_s
        sums["ssd" if is_ssd else "remote" if is_remote else "local"] += 1
    sums["fetch_s"] += len(plan.remote) * costs.remote.request_s
    on_ssd = [i for i, way in enumerate(plan.ways) if way.source == "ssd"]
    _commit(pool, pool.reserve_reread(node, chain, on_ssd, now=now), now)
    away = [i for i, way in enumerate(plan.ways) if way.node != node]
    _commit(pool, pool.reserve_copies(node, chain, away, now=now), now)
    return plan.wanted


def _keep(pool: StorePool, node: str, request: PrefixRequest) -> None:
    """Store what was new at its owner; the writer keeps a copy where it keeps copies at all."""
    chain, now = request.prompt + request.generated, request.time_s
    room = pool.reserve_region(node, chain, now=now)
    if room is None:
        return
    _commit(pool, room, now)
    if room.node != node:
        positions = [block.depth for block in room.blocks]
        _commit(pool, pool.reserve_copies(node, chain, positions, now=now), now)


def _commit(pool: StorePool, room: Room | None, now: float) -> None:
    if room is not None:
        keys = pool.commit(room, now=now)
        if keys:
            _flush(pool, room.node, keys, now)


def _flush(pool: StorePool, node: str, keys: Sequence[Any], now: float) -> None:
    blocks = pool.reserve_flush(node, keys, now=now)
    pool.flushed(node, blocks, now=now)
