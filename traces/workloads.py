"""Bundled workloads: statistics of public traces, so that a run needs no download.

A file of ``traces/data`` holds no request of its trace. It describes cells of at least ten similar
requests by count, means, standard deviations and correlation of (P, D), and the arrivals by rates
per minute and the CV of the gaps once that rate is taken out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.argument_checks import require_positive
from traces.arrivals import RateTable, time_varying
from traces.length_laws import merge_equal_pairs
from traces.lengths import LengthPairs

BUNDLED: tuple[str, ...] = ("azure-2023-conversation", "mooncake-conversation")


def bundled_lengths(name: str) -> LengthPairs:
    """The fitted joint law of a bundled workload.

    ``num_requests`` is the number of requests of the source, so that standard errors derived from
    the law are those of the trace.

    Raises:
        ValueError: If no workload of that name is bundled.
    """
    document = _document(name)
    return expand_cells(name, document["cells"], int(document["num_requests"]))


def bundled_arrivals(
    name: str, rng: np.random.Generator, *, num_requests: int, rate_scale: float = 1.0
) -> NDArray[np.float64]:
    """Arrivals with the rate by minute and the burstiness of a bundled workload.

    Args:
        name: One of ``BUNDLED``.
        rng: Source of chance.
        num_requests: How many, >= 1; beyond the source's duration its rates begin again.
        rate_scale: How many times faster than the source, > 0: like ``arrivals.replay``, all of
            time shrinks, so that as many requests see the same ups and downs.

    Returns:
        arrival_s: [num_requests] seconds, never decreasing, first >= 0.

    Raises:
        ValueError: If no workload of that name is bundled, or a number breaks its rule.
    """
    scale = require_positive("rate_scale", rate_scale)
    arrivals = _document(name)["arrivals"]
    arrival_s = time_varying(
        rng,
        rate_per_s=_rate_table(arrivals),
        num_requests=num_requests,
        cv=float(arrivals["gap_cv"]),
    )
    return arrival_s / scale


def bundled_info(name: str) -> Mapping[str, object]:
    """Source, licence, size and statistics of a bundled workload, JSON-ready.

    Raises:
        ValueError: If no workload of that name is bundled.
    """
    document = _document(name)
    table = _rate_table(document["arrivals"])
    return {
        "name": name,
        "num_requests": document["num_requests"],
        **document["source"],
        **document["statistics"],
        "rate_per_s": table.mean_rate_per_s(),
        "duration_s": document["arrivals"]["period_s"],
        "gap_cv": document["arrivals"]["gap_cv"],
        "fit": document["fit"],
    }


def expand_cells(name: str, cells: Sequence[Sequence[float]], num_requests: int) -> LengthPairs:
    """A law from cells (requests, mean P, mean D, sd P, sd D, correlation).

    Each cell becomes the four points (mean +- sd) with weights (1 +- correlation) / 4, which have
    its means, variances and covariance; then lengths are rounded, at least 1.
    """
    count, mean_p, mean_d, sd_p, sd_d, rho = np.asarray(cells, dtype=np.float64).T[:, :, None]
    side_p = np.array([[-1.0, -1.0, 1.0, 1.0]])
    side_d = np.array([[-1.0, 1.0, -1.0, 1.0]])
    prompts = np.maximum(np.rint(mean_p + side_p * sd_p), 1).astype(np.int64)
    outputs = np.maximum(np.rint(mean_d + side_d * sd_d), 1).astype(np.int64)
    weight = count * (1.0 + side_p * side_d * rho) / 4.0
    keep = weight > 0.0
    law = LengthPairs.from_pairs(
        prompts[keep], outputs[keep], weight[keep], num_requests=num_requests, name=name
    )
    return merge_equal_pairs(law)


def _rate_table(arrivals: Mapping[str, Any]) -> RateTable:
    rates, window_s = arrivals["rate_per_s"], float(arrivals["rate_window_s"])
    return RateTable(
        start_s=tuple(window_s * i for i in range(len(rates))),
        rate_per_s=tuple(float(rate) for rate in rates),
        period_s=float(arrivals["period_s"]),
    )


@functools.cache
def _document(name: str) -> dict[str, Any]:
    if name not in BUNDLED:
        raise ValueError(f"bundled workload must be one of {', '.join(BUNDLED)}, found {name!r}")
    text = resources.files("traces").joinpath("data", f"{name}.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
