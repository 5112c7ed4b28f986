"""Histograms that are counted once and shown under two names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts per bucket and a sum.

    Args:
        edges: Upper bounds, ascending, without infinity.
    """

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value; an edge belongs to the bucket below it."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values at or below it), cumulated, infinity last."""
        total = 0
        found: list[tuple[str, float]] = []
        for edge, count in zip((*self.edges, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if edge == float("inf") else str(float(edge)), total))
        return found


TTFT_EDGES_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_EDGES_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_EDGES_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_EDGES_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTION_EDGES = (0, 1, 2, 3, 5, 10, 20, 50)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to ``most``."""
    edges: list[int] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if step * decade > most:
                return tuple(edges)
            edges.append(step * decade)
        decade *= 10
