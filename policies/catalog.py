"""Scenario names of policies, one table per kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from policies.precision_baselines import (
    GreedyPlanner,
    UniformPlanner,
    UniformRemainderPlanner,
)
from policies.precision_plan import Engine, HullPlanner, PrecisionPlanner
from policies.prefix.eviction.arc import Arc
from policies.prefix.eviction.base import EvictionPolicy
from policies.prefix.eviction.fifo import Fifo
from policies.prefix.eviction.gdsf import Gdsf, GdsfPosition, TreeGdsf
from policies.prefix.eviction.lfu import Lfu
from policies.prefix.eviction.lru import Lru, LruFront
from policies.prefix.eviction.s3_fifo import S3Fifo
from policies.prefix.eviction.sieve import Sieve
from policies.prefix.eviction.tree_hd import TreeHd
from policies.prefix.eviction.tree_lru import TreeLru, TreeSlru
from policies.prefix.owners import AnchorOwns, OwnerRule, Rendezvous, WriterOwns
from policies.provisioning import Provisioning
from policies.routing import LeastTokenLoad, PowerOfTwo, RandomSlot, RoundRobin, RoutingPolicy

ROUTING: dict[str, Callable[[np.random.Generator], RoutingPolicy]] = {
    "random": RandomSlot,
    "round_robin": lambda rng: RoundRobin(),
    "least_token_load": lambda rng: LeastTokenLoad(),
    "power_of_two": PowerOfTwo,
}

PROVISIONING: dict[str, Callable[[], Provisioning]] = {
    "mean_field": lambda: Provisioning("mean_field"),
    "gaussian": lambda: Provisioning("gaussian"),
    "pearson3": lambda: Provisioning("pearson3"),
    "exact": lambda: Provisioning("exact"),
}

PRECISION: dict[str, Callable[[Engine], PrecisionPlanner]] = {
    "hull": HullPlanner,
    "greedy": GreedyPlanner,
    "uniform": UniformPlanner,
    "uniform_remainder": UniformRemainderPlanner,
}

EVICTION: dict[str, Callable[[int], EvictionPolicy]] = {  # of a memory of that many bytes
    "lru": Lru,
    "lru_front": LruFront,
    "fifo": Fifo,
    "lfu": Lfu,
    "gdsf": Gdsf,
    "gdsf_pos": GdsfPosition,
    "tree_lru": TreeLru,
    "tree_slru": TreeSlru,
    "tree_gdsf": TreeGdsf,
    "s3_fifo": S3Fifo,
    "sieve": Sieve,
    "arc": Arc,
    "tree_hd": TreeHd,
}

OWNERS: dict[str, Callable[[], OwnerRule]] = {
    "rendezvous": Rendezvous,
    "writer": WriterOwns,
    "anchor": AnchorOwns,
}


def routing_policy(name: str, rng: np.random.Generator) -> RoutingPolicy:
    """The routing policy of that name, with its own source of chance.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in ROUTING:
        raise ValueError(f"routing must be one of {', '.join(ROUTING)}, found {name!r}")
    return ROUTING[name](rng)


def precision_planner(name: str, engine: Engine = "auto") -> PrecisionPlanner:
    """The precision planner of that name.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in PRECISION:
        raise ValueError(f"precision must be one of {', '.join(PRECISION)}, found {name!r}")
    return PRECISION[name](engine)


def eviction_policy(name: str, capacity_bytes: int) -> EvictionPolicy:
    """The eviction policy of that name for a memory of that many bytes.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in EVICTION:
        raise ValueError(f"eviction must be one of {', '.join(EVICTION)}, found {name!r}")
    return EVICTION[name](capacity_bytes)


def owner_rule(name: str) -> OwnerRule:
    """The rule of that name for who owns a stored region.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in OWNERS:
        raise ValueError(f"owner must be one of {', '.join(OWNERS)}, found {name!r}")
    return OWNERS[name]()
