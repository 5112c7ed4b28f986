"""What the cluster tells its routing policy of each GPU."""

from __future__ import annotations

from collections.abc import Sequence

from policies.prefix.eviction.base import Key
from policies.prefix.request_routing import ServerState
from traces.prefix_workloads import PrefixRequest
from twin.store.gpu_tier import GpuTier
from twin.store.pool import StorePool


def server_states(
    request: PrefixRequest,
    *,
    block_tokens: int,
    tiers: Sequence[GpuTier],
    nodes: Sequence[str],
    gpus_per_node: int,
    pool: StorePool | None,
) -> list[ServerState]:
    """[gpus] What each GPU, its node and the pool have of the prompt.

    Args:
        request: What is asked.
        block_tokens: Tokens of a block.
        tiers: Each GPU's own cache.
        nodes, gpus_per_node: GPU g belongs to node ``nodes[g // gpus_per_node]``.
        pool: The stores, or None.
    """
    usable = usable_blocks(request, block_tokens)
    pooled = 0 if pool is None else min(usable, pool.leading(request.prompt))
    at_node = [_held(pool, node, request.prompt[:pooled]) for node in nodes]
    return [
        ServerState(
            device_blocks=min(usable, tier.leading(request.prompt)),
            memory_blocks=at_node[gpu // gpus_per_node],
            pooled_blocks=pooled,
        )
        for gpu, tier in enumerate(tiers)
    ]


def _held(pool: StorePool | None, node: str, keys: Sequence[Key]) -> int:
    """How many of the first blocks the node's own memory holds."""
    if pool is None:
        return 0
    policy = pool.policies[node]
    for count, key in enumerate(keys):
        if policy.in_memory(key) is None:
            return count
    return len(keys)


def usable_blocks(request: PrefixRequest, block_tokens: int) -> int:
    """Blocks of the prompt that need not be computed: at least one token always is."""
    return min(len(request.prompt), (request.prompt_tokens - 1) // block_tokens)
