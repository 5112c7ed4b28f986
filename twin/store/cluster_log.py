"""What a run of a cluster keeps: fates of requests, a series of looks, bytes of links."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.prefix_settings import PrefixModeName
from twin.store.cluster_links import KINDS, ClusterNetwork
from twin.store.load_sources import LoadSources
from twin.store.pool import StorePool
from twin.store.requests import RequestStream

Floats = NDArray[np.float64]
TIERS = ("gpu", "memory", "replica", "remote", "ssd", "computed")
_TIMES = ("arrival_s", "ready_s", "start_s", "first_token_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """One system, one stream, one replication.

    Attributes:
        mode: Which system.
        stream: Which requests.
        prompt_tokens: The one prompt length; None where lengths vary.
        requests: Column -> [n]: times, node, GPU, ``tokens_X`` by tier of ``TIERS``, ``ttft_s``.
        series: Column -> [looks]; engines' names where they have one, queries and hits in tokens
            so far. Who waits is looked up, loaded, or queues for its GPU.
        links: Kind -> bytes, mean and highest utilization over its links, of the whole run.
        counts: Blocks stored, replicated, dropped, ...
        duration_s: Until the last block was in its place.
    """

    mode: PrefixModeName
    stream: str
    prompt_tokens: int | None
    requests: dict[str, NDArray[np.float64] | NDArray[np.int64]]
    series: dict[str, Floats]
    links: dict[str, dict[str, float]]
    counts: dict[str, int]
    duration_s: float


@dataclass(slots=True)
class ClusterLog:
    """Collects one run."""

    stream: RequestStream
    gpus_per_node: int
    num_finished: int = 0
    _arrived: int = 0
    _started: int = 0
    _times: dict[str, Floats] = field(init=False)
    _gpu: NDArray[np.int64] = field(init=False)
    _tokens: dict[str, NDArray[np.int64]] = field(init=False)
    _total_tokens: dict[str, int] = field(init=False)
    _series: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.stream.requests)
        self._times = {name: np.full(count, np.nan) for name in _TIMES}
        self._gpu = np.zeros(count, dtype=np.int64)
        self._tokens = {name: np.zeros(count, dtype=np.int64) for name in TIERS}
        self._total_tokens = dict.fromkeys(TIERS, 0)

    def arrive(self, at: int, gpu: int, now: float) -> None:
        """A request is there and has a GPU."""
        self._times["arrival_s"][at] = now
        self._gpu[at] = gpu
        self._arrived += 1

    def loaded(self, at: int, now: float) -> None:
        """Its blocks are on the GPU; it waits for its turn."""
        self._times["ready_s"][at] = now

    def started(self, at: int, now: float) -> None:
        """The GPU computes it."""
        self._times["start_s"][at] = now
        self._started += 1

    def first_token(self, at: int, now: float, own: int, sources: LoadSources, cached: int) -> None:
        """Its first token is there.

        Args:
            at: Number of the request.
            now: Seconds.
            own: Leading blocks that were on the GPU.
            sources: Where the blocks behind those of the first look came from.
            cached: Leading blocks that were not computed.
        """
        self._times["first_token_s"][at] = now
        self.num_finished += 1
        size = self.stream.block_tokens
        blocks = {"gpu": own, **sources.behind(own), "computed": 0}
        for name in TIERS[:-1]:
            self._tokens[name][at] = blocks[name] * size
            self._total_tokens[name] += blocks[name] * size
        computed = self.stream.requests[at].prompt_tokens - cached * size
        self._tokens["computed"][at] = computed
        self._total_tokens["computed"] += computed

    def sample(self, now: float, network: ClusterNetwork, pool: StorePool | None) -> None:
        """One look at everything that changes."""
        row: dict[str, float] = {
            "time_s": now,
            "num_requests_waiting": self._arrived - self._started,
            "num_requests_running": self._started - self.num_finished,
            "num_requests_finished": self.num_finished,
            "prefix_cache_queries": sum(self._total_tokens.values()),
            "prefix_cache_hits": sum(self._total_tokens[name] for name in TIERS[:-1]),
        }
        for name in TIERS:
            row[f"tokens_{name}"] = self._total_tokens[name]
        for kind, links in network.by_kind().items():
            row[f"bytes_{_plain(kind)}"] = sum(link.carried_bytes for link in links)
        policies = [] if pool is None else list(pool.policies.values())
        row["memory_used_bytes"] = sum(policy.memory_used_bytes for policy in policies)
        row["ssd_used_bytes"] = sum(policy.ssd_used_bytes for policy in policies)
        for name, value in row.items():
            self._series.setdefault(name, []).append(float(value))

    def finish(
        self,
        mode: PrefixModeName,
        network: ClusterNetwork,
        pool: StorePool | None,
        now: float,
    ) -> ClusterRun:
        """The run, once everything has happened."""
        self.sample(now, network, pool)
        times = self._times
        links = {}
        for kind, of_kind in network.by_kind().items():
            shares = [link.utilization(now) for link in of_kind]
            links[kind] = {
                "bytes": sum(link.carried_bytes for link in of_kind),
                "mean_utilization": float(np.mean(shares)),
                "highest_utilization": max(shares),
                "busy_share": max(link.busy_s for link in of_kind) / now if now > 0 else 0.0,
            }
        assert tuple(links) == KINDS
        requests: dict[str, NDArray[np.float64] | NDArray[np.int64]] = {
            **times,
            "ttft_s": times["first_token_s"] - times["arrival_s"],
            "node": self._gpu // self.gpus_per_node,
            "gpu": self._gpu,
            "prompt_tokens": np.array([r.prompt_tokens for r in self.stream.requests]),
            **{f"tokens_{name}": values for name, values in self._tokens.items()},
        }
        return ClusterRun(
            mode=mode,
            stream=self.stream.name,
            prompt_tokens=self.stream.prompt_tokens,
            requests=requests,
            series={name: np.asarray(values) for name, values in self._series.items()},
            links=links,
            counts={} if pool is None else asdict(pool.counts),
            duration_s=now,
        )


def _plain(kind: str) -> str:
    return kind.lower().replace(" ", "_")
