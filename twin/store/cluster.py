"""One system serving one stream of requests on simulated time.

A request is looked up, its blocks are brought to its GPU, then it waits for the GPU and is
computed; the blocks that were new are stored behind its back. Loads do not occupy the GPU, as with
the asynchronous connectors of engines. First tokens are all that is watched: decoding is left out.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from policies.prefix.eviction.base import Key
from policies.prefix.request_routing import RequestRouting, ServerState
from traces.decisions import DecisionLog
from traces.prefix_workloads import PrefixRequest
from twin.store.cluster_links import ClusterNetwork
from twin.store.cluster_log import ClusterLog, ClusterRun
from twin.store.deployment import Deployment
from twin.store.gpu_tier import GpuTier
from twin.store.load_sources import LoadSources, load_sources
from twin.store.modes import Mode
from twin.store.pool import Room, StorePool, new_pool
from twin.store.requests import RequestStream
from twin.store.routing import server_states, usable_blocks

Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class _Place:
    gpu: int
    node: str


class PrefixCluster:
    """A cluster under one system."""

    def __init__(
        self,
        deployment: Deployment,
        mode: Mode,
        requests: RequestStream,
        *,
        log: DecisionLog | None = None,
    ) -> None:
        """Set everything up empty.

        Args:
            deployment: Nodes, GPUs, links.
            mode: The system.
            requests: What it serves.
            log: Where the calls of the store policies go; None: nowhere.
        """
        self._env = simpy.Environment()
        self._deployment, self._mode, self._stream = deployment, mode, requests
        self._block_bytes = requests.block_tokens * deployment.token_bytes
        self._costs = deployment.costs(
            requests.block_tokens, lookup_s=mode.lookup_s, overlap=mode.overlap
        )
        self._nodes = tuple(f"node-{n:03d}" for n in range(deployment.nodes))
        self._network = ClusterNetwork(
            self._env, self._nodes, deployment.gpus_per_node, deployment.links
        )
        self._gpus = [simpy.Resource(self._env) for _ in range(deployment.num_gpus)]
        self._tiers = [
            GpuTier(deployment.cache_tokens // requests.block_tokens if mode.has_gpu_tier else 0)
            for _ in range(deployment.num_gpus)
        ]
        self._pool = self._new_pool(log)
        self._routing = RequestRouting(
            deployment.routing,
            num_servers=deployment.num_gpus,
            prefill=deployment.prefill,
            costs=self._costs,
            block_bytes=self._block_bytes,
        )
        self._log = ClusterLog(requests, deployment.gpus_per_node)

    def _new_pool(self, log: DecisionLog | None) -> StorePool | None:
        if self._mode.store is None:
            return None
        return new_pool(
            self._nodes,
            self._mode.store,
            self._costs,
            self._deployment.owners,
            block_bytes=self._block_bytes,
            may_recompute=self._mode.may_recompute,
            log=log,
        )

    def run(self) -> ClusterRun:
        """Serve every request to its first token, and all that is stored to its place."""
        self._env.process(self._arrivals())
        self._env.process(self._sample())
        self._env.run()
        assert self._log.num_finished == len(self._stream.requests)
        return self._log.finish(self._mode.name, self._network, self._pool, self._env.now)

    def _arrivals(self) -> Steps:
        for at, request in enumerate(self._stream.requests):
            wait_s = request.time_s - self._env.now
            if wait_s > 0.0:
                yield self._env.timeout(wait_s)
            gpu = self._route(at, request)
            node = self._nodes[gpu // self._deployment.gpus_per_node]
            self._log.arrive(at, gpu, self._env.now)
            self._env.process(self._serve(at, request, _Place(gpu, node)))

    def _route(self, at: int, request: PrefixRequest) -> int:
        states: list[ServerState] = []
        if self._routing.needs_states:
            states = server_states(
                request,
                block_tokens=self._costs.block_tokens,
                tiers=self._tiers,
                nodes=self._nodes,
                gpus_per_node=self._deployment.gpus_per_node,
                pool=self._pool,
            )
        return self._routing.choose(
            at,
            session=request.session,
            prompt_tokens=request.prompt_tokens,
            draw=self._stream.draws[at],
            states=states,
        )

    def _sample(self) -> Steps:
        """Series: about 200 looks over the time of arrivals."""
        last_s = self._stream.requests[-1].time_s
        step_s = max(last_s / 200.0, 1e-3)
        while self._log.num_finished < len(self._stream.requests):
            self._log.sample(self._env.now, self._network, self._pool)
            yield self._env.timeout(step_s)

    # --- one request -----------------------------------------------------------------------

    def _serve(self, at: int, request: PrefixRequest, place: _Place) -> Steps:
        env, tokens_per_block = self._env, self._stream.block_tokens
        usable = usable_blocks(request, tokens_per_block)
        tier = self._tiers[place.gpu]
        own = tier.leading(request.prompt[:usable])
        expected_s = self._deployment.prefill.seconds(
            request.prompt_tokens - own * tokens_per_block, own * tokens_per_block
        )
        self._routing.assigned(place.gpu, expected_s)
        sources = LoadSources.nothing(own)
        if self._pool is not None and self._is_worth_asking(request, usable, own):
            if self._mode.lookup_s > 0.0:
                yield env.timeout(self._mode.lookup_s)
            sources = load_sources(self._pool, place.node, request.prompt[:usable], own)
            yield from self._load(self._pool, request, place, sources)
        self._log.loaded(at, env.now)
        with self._gpus[place.gpu].request() as turn:
            yield turn
            self._log.started(at, env.now)
            # meanwhile another request may have brought more of the prompt to this GPU
            own_now = max(own, tier.leading(request.prompt[:usable]))
            cached = max(own_now, sources.until)
            cached_tokens = cached * tokens_per_block
            yield env.timeout(
                self._deployment.prefill.seconds(
                    request.prompt_tokens - cached_tokens, cached_tokens
                )
            )
        self._routing.assigned(place.gpu, -expected_s)
        self._log.first_token(at, env.now, own_now, sources, cached)
        chain = request.prompt + request.generated
        tier.keep(chain)
        if self._pool is not None:
            yield from self._store(self._pool, chain, place)

    def _is_worth_asking(self, request: PrefixRequest, usable: int, own: int) -> bool:
        """Whether the store could save more than it takes to ask it."""
        if not self._mode.may_recompute:
            return True
        costs, size = self._costs, self._stream.block_tokens
        missing = usable - own
        if missing <= 0:
            return False
        prefill = self._deployment.prefill
        without_s = prefill.seconds(request.prompt_tokens - own * size, own * size)
        with_s = prefill.seconds(request.prompt_tokens - usable * size, usable * size)
        with_s += missing * self._block_bytes / costs.local.bytes_per_s
        return without_s - with_s > costs.lookup_s

    def _load(
        self, pool: StorePool, request: PrefixRequest, place: _Place, sources: LoadSources
    ) -> Steps:
        """Bring blocks to the GPU: other nodes in parallel, then the copy to the device.

        The last ``overlap`` of every remote transfer runs beside that copy.
        """
        env, size = self._env, self._block_bytes
        holders = [place.node, *(node for node in sources.remote if node != place.node)]
        flushes = pool.read(holders, request.prompt, now=env.now, category=request.category)
        for node, keys in flushes.items():
            env.process(self._flush(pool, node, keys))
        if sources.num_blocks == 0:
            return
        overlap = self._mode.overlap
        first = [
            env.process(self._fetch(place, node, count, share=1.0 - overlap, is_first=True))
            for node, count in sources.remote.items()
        ]
        if sources.ssd_positions:
            first.append(env.process(self._read_ssd(place.node, len(sources.ssd_positions))))
        if first:
            yield env.all_of(first)
        rest: list[simpy.Event] = [
            env.process(self._fetch(place, node, count, share=overlap, is_first=False))
            for node, count in sources.remote.items()
            if overlap > 0.0
        ]
        rest.append(self._network.to_device(place.gpu, sources.num_blocks * size))
        yield env.all_of(rest)
        prompt, node = request.prompt, place.node
        for room in (
            pool.reserve_reread(node, prompt, sources.ssd_positions, now=env.now),
            pool.reserve_copies(node, prompt, sources.remote_positions, now=env.now),
        ):
            if room is not None:
                self._commit(pool, room)

    def _fetch(
        self, place: _Place, owner: str, counts: tuple[int, int], *, share: float, is_first: bool
    ) -> Steps:
        """A share of what one other node sends: from memory, and from its SSD."""
        in_memory, on_ssd = counts
        if is_first:
            if self._deployment.links.rpc_s > 0.0:
                yield self._env.timeout(self._deployment.links.rpc_s)
            if on_ssd:
                yield from self._read_ssd(owner, on_ssd)
        size_bytes = (in_memory + on_ssd) * self._block_bytes * share
        yield self._network.between(owner, place.gpu, size_bytes)

    def _read_ssd(self, node: str, blocks: int) -> Steps:
        yield self._network.on_ssd(node, blocks * self._block_bytes)

    # --- storing ---------------------------------------------------------------------------

    def _store(self, pool: StorePool, chain: Sequence[Key], place: _Place) -> Steps:
        """New blocks to their owner; the writer keeps a copy where it keeps copies at all."""
        room = pool.reserve_region(place.node, chain, now=self._env.now)
        if room is None:
            return
        yield self._network.from_device(place.gpu, room.size_bytes)
        if room.node != place.node:
            positions = [block.depth for block in room.blocks]
            copies = pool.reserve_copies(place.node, chain, positions, now=self._env.now)
            if self._deployment.links.rpc_s > 0.0:
                yield self._env.timeout(self._deployment.links.rpc_s)
            yield self._network.out_of(place.gpu, room.node, room.size_bytes)
            self._commit(pool, room)
            if copies is not None:
                self._commit(pool, copies)
        else:
            self._commit(pool, room)

    def _commit(self, pool: StorePool, room: Room) -> None:
        keys = pool.commit(room, now=self._env.now)
        if keys:
            self._env.process(self._flush(pool, room.node, keys))

    def _flush(self, pool: StorePool, node: str, keys: Sequence[Key]) -> Steps:
        blocks = pool.reserve_flush(node, keys, now=self._env.now)
        if blocks:
            yield self._network.on_ssd(node, len(blocks) * self._block_bytes)
            pool.flushed(node, blocks, now=self._env.now)
