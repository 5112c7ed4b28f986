"""The connector's counts as vLLM's statistics and Prometheus series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from runtime.store.vllm_counts import AMOUNTS, added


@dataclass
class StoreConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Amounts of one interval, summed over steps, workers and the scheduler."""

    def reset(self) -> None:
        """Forget them."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> StoreConnectorStats:
        """The sum of two."""
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The amounts, for the log."""
        return {name: round(amount, 3) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class StorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter for each amount, ``vllm:ptstore_<name>``, by engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter: Any = metric_types[Counter]
        self._counters: dict[tuple[str, int], Any] = {}
        for name, text in AMOUNTS.items():
            metric = counter(name=f"vllm:ptstore_{name}", documentation=text, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[name, engine] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's amounts."""
        for name, amount in transfer_stats_data.items():
            counter = self._counters.get((name, engine_idx))
            if counter is not None and amount > 0:
                counter.inc(amount)
