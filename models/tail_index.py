"""How fast the tail of what requests contribute to theta falls off: Hill's estimator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from traces.lengths import LengthPairs

MIN_TAIL_REQUESTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TailIndex:
    """A power-law fit P(R > x) ~ x^-index to the largest contributions R = D P + D (D - 1) / 2.

    theta is a ratio of means with R on top, so theta exists for an index above 1 and its standard
    error means something above 2. Where output lengths rule the tail with an index a, R has a / 2:
    the variance of the slot load exists for a > 3, an index above 1.5.

    Attributes:
        index: The exponent.
        standard_error: Of ``index``.
        num_requests: Requests the tail was fitted to.
    """

    index: float
    standard_error: float
    num_requests: int

    def is_surely_below(self, bound: float) -> bool:
        """Whether even two standard errors above the estimate lie below ``bound``."""
        return self.index + 2.0 * self.standard_error < bound


def tail_index(lengths: LengthPairs) -> TailIndex | None:
    """Hill's estimator on the sqrt(n) requests that hold the most tokens over their life.

    Returns:
        None where fewer than 10 requests lie above the threshold: too few, or too many equal ones.

    Raises:
        ValueError: If the law is exact: there is no sample to estimate from.

    Source:
        B. M. Hill, Ann. Statist. 3 (1975) 1163.
    """
    if lengths.num_requests is None:
        raise ValueError("tail_index needs a sample of requests, found an exact law")
    output = lengths.output_tokens.astype(np.float64)
    held = output * (lengths.prompt_tokens + (output - 1.0) / 2.0)
    requests = lengths.weight * lengths.num_requests
    order = np.argsort(-held, kind="stable")
    reached = np.cumsum(requests[order])
    wanted = math.sqrt(lengths.num_requests) * (1.0 + 1e-12)
    threshold = float(held[order[min(len(order) - 1, int(np.searchsorted(reached, wanted)))]])
    above = held > threshold
    num_above = round(float(requests[above].sum()))
    if threshold <= 0.0 or num_above < MIN_TAIL_REQUESTS:
        return None
    mean_log = float(requests[above] @ np.log(held[above] / threshold)) / num_above
    return TailIndex(
        index=1.0 / mean_log,
        standard_error=1.0 / (mean_log * math.sqrt(num_above)),
        num_requests=num_above,
    )
