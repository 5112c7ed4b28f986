"""The systems that are compared: what each keeps, where, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass

from models.prefix_settings import PrefixModeName, PrefixScenario
from policies.prefix.store_settings import ReplicaRule, StoreSettings

LABELS: dict[PrefixModeName, str] = {
    "vanilla": "no reuse",
    "local_prefix": "GPU cache",
    "evostore": "EvoStore",
    "ptstore": "PTStore",
    "product": "this store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One system.

    Attributes:
        name: Its name in scenarios.
        has_gpu_tier: Whether a GPU keeps blocks in its own memory.
        store: Settings of every node's store; None: memory is not pooled.
        may_recompute: Whether it computes again what would be dearer to fetch.
        lookup_s: Seconds of finding out what is stored; 0.0 without a store.
        overlap: Share of the network's part of a load that runs beside the copy to the device.
    """

    name: PrefixModeName
    has_gpu_tier: bool
    store: StoreSettings | None
    may_recompute: bool = False
    lookup_s: float = 0.0
    overlap: float = 0.0


def build_mode(name: PrefixModeName, scenario: PrefixScenario) -> Mode:
    """The system of that name, as the scenario sets it up.

    Source:
        vLLM's prefix cache; EvoStore: owned copies, no replicas; PTStore: owned copies and
        replicas up to a threshold, GDSF with C = seconds of computing again.
    """
    if name in ("vanilla", "local_prefix"):
        return Mode(name=name, has_gpu_tier=name == "local_prefix", store=None)
    pooled = scenario.store
    if name == "product":
        return Mode(
            name=name,
            has_gpu_tier=True,
            store=_settings(scenario, scenario.product.eviction, "unified"),
            may_recompute=True,
            lookup_s=scenario.product.lookup_s,
            overlap=scenario.product.overlap,
        )
    is_evostore = name == "evostore"
    return Mode(
        name=name,
        has_gpu_tier=False,
        store=_settings(
            scenario, "lru" if is_evostore else "gdsf", "none" if is_evostore else "soft"
        ),
        lookup_s=pooled.lookup_s,
        overlap=pooled.overlap,
    )


def _settings(scenario: PrefixScenario, eviction: str, replicas: ReplicaRule) -> StoreSettings:
    cluster = scenario.cluster
    return StoreSettings(
        memory_bytes=cluster.memory_bytes,
        ssd_bytes=cluster.ssd_bytes,
        eviction=eviction,
        replicas=replicas,
        replica_share=scenario.store.replica_share,
        flush=scenario.store.flush if cluster.ssd_bytes else "never",
        num_nodes=cluster.nodes,
    )
