"""A node's counts and gauges as plain values."""

from __future__ import annotations

from typing import Any

from runtime.store.node import StoreNode


def node_stats(node: StoreNode) -> dict[str, Any]:
    """Name, incarnation, gauges and counters of a node; no keys, no contents."""
    state = node.state
    return {
        "node": node.config.node,
        "incarnation": state.incarnation,
        "gauges": dict(node.gauges()),
        "counters": dict(state.counters.all()),
        "ssd_counters": {} if state.ssd is None else dict(state.ssd.counters),
        "pool_counters": dict(node.pool_counters()),
        "nodes": dict(state.weights),
        "settings": {
            "block_bytes": node.config.block_bytes,
            "eviction": node.config.eviction,
            "ssd_eviction": node.config.ssd_eviction,
            "replicas": node.config.replicas,
            "flush": node.config.flush,
            "owner_rule": node.config.owner_rule,
        },
    }
