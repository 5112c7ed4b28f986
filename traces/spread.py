"""Mean, spread and quantiles of one column, and how two columns go together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One column in numbers, unknown values left out; unit of the column.

    Attributes:
        num: How many values are known.
        mean: Their mean.
        std: Standard deviation (divided by num).
        p50: Median.
        p90: 90 % quantile, interpolated.
        p99: 99 % quantile, interpolated.
        max: Largest value.
    """

    num: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: NDArray[np.float64]) -> Spread | None:
    """The spread of the known (not NaN) values; None where there are none."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return None
    p50, p90, p99 = (float(q) for q in np.quantile(known, (0.5, 0.9, 0.99)))
    return Spread(
        num=len(known),
        mean=float(known.mean()),
        std=float(known.std()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=float(known.max()),
    )


def pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Linear correlation; None where one column does not vary."""
    x, y = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0.0 else None


def spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Correlation of ranks, equal values sharing their mean rank."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2.0
    return mean_rank[inverse]
