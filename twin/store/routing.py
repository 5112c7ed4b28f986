"""Which GPU gets a request."""

from __future__ import annotations

from collections.abc import Sequence

from models.prefix_costs import PrefillCost, PrefixCosts
from models.prefix_settings import RoutingName
from policies.prefix.eviction.base import Key
from traces.prefix_workloads import PrefixRequest
from twin.store.gpu_tier import GpuTier
from twin.store.pool import StorePool


class RequestRouter:
    """One rule over all GPUs of a cluster.

    ``random``: by the request's draw; ``round_robin``: in turn; ``sticky``: where the session was
    before, a new one by its draw; ``prefix_aware``: where the first token is expected soonest,
    given what waits there and what it has of the prompt.
    """

    def __init__(
        self,
        rule: RoutingName,
        *,
        gpus_per_node: int,
        nodes: Sequence[str],
        prefill: PrefillCost,
        costs: PrefixCosts,
        block_bytes: int,
        tiers: Sequence[GpuTier],
        pool: StorePool | None,
    ) -> None:
        """Fix the rule.

        Args:
            rule: Its name.
            gpus_per_node, nodes: GPU g belongs to node ``nodes[g // gpus_per_node]``.
            prefill: Seconds of computing a prompt.
            costs: Of blocks, and their size in tokens.
            block_bytes: Size of a block.
            tiers: Each GPU's own cache.
            pool: The stores, or None.
        """
        self._rule = rule
        self._gpus_per_node, self._nodes = gpus_per_node, tuple(nodes)
        self._prefill, self._costs, self._block_bytes = prefill, costs, block_bytes
        self._tiers, self._pool = tiers, pool
        self._place: dict[int, int] = {}
        self._backlog_s = [0.0] * (gpus_per_node * len(self._nodes))

    def choose(self, at: int, request: PrefixRequest, draw: float) -> int:
        """The GPU of the request.

        Args:
            at: Its number in order of arrival.
            request: What it asks.
            draw: In 0..1, its own.
        """
        count = len(self._backlog_s)
        by_chance = min(int(draw * count), count - 1)
        if self._rule == "round_robin":
            return at % count
        if self._rule == "sticky" and request.session >= 0:
            return self._place.setdefault(request.session, by_chance)
        if self._rule == "prefix_aware":
            # ties go to the first from the drawn one on, so that equal GPUs share the load
            order = [(by_chance + step) % count for step in range(count)]
            expected = self._expected_s(request)
            return min(order, key=lambda gpu: expected[gpu])
        return by_chance

    def assigned(self, gpu: int, seconds: float) -> None:
        """So much work has been given to a GPU (negative: it has been done)."""
        self._backlog_s[gpu] = max(0.0, self._backlog_s[gpu] + seconds)

    def _expected_s(self, request: PrefixRequest) -> list[float]:
        """[gpus] seconds until the first token."""
        costs, prompt = self._costs, request.prompt
        usable = usable_blocks(request, costs.block_tokens)
        pooled = 0 if self._pool is None else min(usable, self._pool.leading(prompt))
        at_node = [self._held(node, prompt[:pooled]) for node in self._nodes]
        found = []
        for gpu, backlog_s in enumerate(self._backlog_s):
            own = min(usable, self._tiers[gpu].leading(prompt))
            cached = max(own, pooled)
            tokens = cached * costs.block_tokens
            seconds = self._prefill.seconds(request.prompt_tokens - tokens, tokens)
            if pooled > own:
                size = self._block_bytes
                seconds += (pooled - own) * size / costs.local.bytes_per_s
                away = max(0, pooled - max(own, at_node[gpu // self._gpus_per_node]))
                seconds += costs.remote.seconds(away * size)
            found.append(backlog_s + seconds)
        return found

    def _held(self, node: str, keys: Sequence[Key]) -> int:
        """How many of the first blocks the node's own memory holds."""
        if self._pool is None:
            return 0
        policy = self._pool.policies[node]
        for count, key in enumerate(keys):
            if policy.in_memory(key) is None:
                return count
        return len(keys)


def usable_blocks(request: PrefixRequest, block_tokens: int) -> int:
    """Blocks of the prompt that need not be computed: at least one token always is."""
    return min(len(request.prompt), (request.prompt_tokens - 1) // block_tokens)
