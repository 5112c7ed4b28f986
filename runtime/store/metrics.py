"""A node's counts and gauges for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "prefix_store"
_TIERS = ("memory", "replica", "remote", "ssd")


class StoreCollector(Collector):
    """Reads the counts when they are asked for."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        """Collect.

        Args:
            stats: As ``runtime.store.node_stats.node_stats`` gives them.
        """
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All metrics; none is labelled with keys or tenants."""
        stats = self._stats()
        node = stats["node"]
        counters = dict(stats["counters"])
        counters.pop("blocks_hit", None)  # the sum over tiers
        hits = CounterMetricFamily(
            f"{PREFIX}_blocks_hit", "Blocks served, by where they were.", labels=["node", "tier"]
        )
        for tier in _TIERS:
            hits.add_metric([node, tier], counters.pop(f"blocks_hit_{tier}", 0))
        yield hits
        refused = CounterMetricFamily(
            f"{PREFIX}_puts_refused", "Puts not wholly stored, by why.", labels=["node", "reason"]
        )
        for name in [name for name in counters if name.startswith("puts_")]:
            refused.add_metric([node, name.removeprefix("puts_")], counters.pop(name))
        yield refused
        counters |= stats["pool_counters"]
        for name, value in (
            counters | {f"ssd_{k}": v for k, v in stats["ssd_counters"].items()}
        ).items():
            counter = CounterMetricFamily(f"{PREFIX}_{name}", counter_help(name), labels=["node"])
            counter.add_metric([node], value)
            yield counter
        for name, value in stats["gauges"].items():
            gauge = GaugeMetricFamily(f"{PREFIX}_{name}", gauge_help(name), labels=["node"])
            gauge.add_metric([node], value)
            yield gauge
        incarnation = GaugeMetricFamily(
            f"{PREFIX}_incarnation", "Number of this start of the node.", labels=["node"]
        )
        incarnation.add_metric([node], stats["incarnation"])
        yield incarnation


_PARTS = {"ssd_": "On the SSD", "peer_": "Asked of other nodes", "served_": "Asked by other nodes"}


def counter_help(name: str) -> str:
    """A sentence that says what a counter counts."""
    for prefix, where in _PARTS.items():
        if name.startswith(prefix):
            words = name.removeprefix(prefix).replace("_", " ")
            return f"{where}: number of {words} since the server started."
    words = name.replace("_", " ").replace("ssd", "SSD")
    return f"Number of {words} since the server started."


def gauge_help(name: str) -> str:
    """A sentence that says what a gauge shows."""
    words = name.removesuffix("_bytes").replace("_", " ").replace("ssd", "SSD")
    words = words[0].upper() + words[1:]
    if name.endswith("_bytes"):
        return f"{words}: size in bytes at the moment."
    return f"{words}: how many there are at the moment."


def serve_metrics(
    stats: Callable[[], dict[str, Any]], host: str, port: int
) -> tuple[int, Callable[[], None]]:
    """Answer Prometheus at ``/metrics``.

    Returns:
        The port, and what stops answering.

    Raises:
        OSError: If the address cannot be listened on.
    """
    registry = CollectorRegistry()
    registry.register(StoreCollector(stats))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5.0)

    return int(server.server_address[1]), stop
