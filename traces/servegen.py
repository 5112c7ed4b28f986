"""Draws a trace from ServeGen client statistics, client by client.

A window's rate is the truth about how many requests come; the fitted process gives the shape of the
gaps. (In these files the fitted scale alone often misses the rate, since it was fitted to gaps that
reach beyond the window.) Each window starts in the middle of a gap as an observer would find it, so
its expected count is rate x time whatever the burstiness. P and D are independent given client and
window: only their separate laws are published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.argument_checks import require_not_negative, require_positive
from traces.errors import TraceError
from traces.request import Trace
from traces.servegen_files import Client, read_clients

MAX_EXPECTED_REQUESTS = 30_000_000


def generate_servegen(
    paths: str | Path | Sequence[str | Path],
    rng: np.random.Generator,
    *,
    start_s: float,
    duration_s: float,
    rate_scale: float = 1.0,
    clients: Sequence[int] | None = None,
) -> Trace:
    """One sample of the requests of all clients in a span of the recorded weeks.

    Args:
        paths: Directory with ``chunk-N-trace.csv`` and ``chunk-N-dataset.json``, or with their
            tar archives; or a list of such archives.
        rng: Source of chance.
        start_s: Where the span begins, on the clock of the files.
        duration_s: Its length, > 0.
        rate_scale: Factor on every rate, > 0.
        clients: Ids to take; None: all that have lengths.

    Returns:
        A trace in order of arrival. Clients without a length file are left out and named in
        ``notes``; requests without output or without a length law are counted in ``skipped``.

    Raises:
        TraceError: If the files break their format, or the span lies outside of them, holds no
            request, or more than 30 million.
        ValueError: If a number breaks its rule.
    """
    start_s = require_not_negative("start_s", start_s)
    end_s = start_s + require_positive("duration_s", duration_s)
    scale = require_positive("rate_scale", rate_scale)
    found = read_clients(paths, clients=clients)
    source = paths if isinstance(paths, str | Path) else ", ".join(str(p) for p in paths)
    usable = [client for client in found if client.dataset is not None]
    _check_span(found, usable, str(source), start_s, end_s, scale)
    skipped: dict[str, int] = {}
    columns = [_client_requests(c, rng, start_s, end_s, scale, skipped) for c in usable]
    arrival_s, prompts, outputs = (np.concatenate(column) for column in zip(*columns, strict=True))
    if len(arrival_s) == 0:
        raise TraceError(f"{source}: no requests between {start_s:g} s and {end_s:g} s")
    order = np.argsort(arrival_s, kind="stable")
    arrival_s = arrival_s[order]
    return Trace(
        name="servegen",
        source=f"{source}, {start_s:g} s to {end_s:g} s, rate x {scale:g}",
        format="servegen",
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=prompts[order],
        output_tokens=outputs[order],
        skipped=skipped,
        notes=_notes(found, usable),
    )


def expected_requests(client: Client, start_s: float, end_s: float, rate_scale: float) -> float:
    """Mean number of requests of a client in a span."""
    ends = np.append(client.start_s[1:], client.end_s)
    overlap = np.minimum(ends, end_s) - np.maximum(client.start_s, start_s)
    return float(np.maximum(overlap, 0.0) @ client.rate_per_s) * rate_scale


def client_arrivals(
    client: Client, rng: np.random.Generator, start_s: float, end_s: float, rate_scale: float
) -> NDArray[np.float64]:
    """One client's arrivals in a span: [n] seconds on the clock of the files, rising."""
    ends = np.append(client.start_s[1:], client.end_s)
    pieces = [np.empty(0)]
    first = max(0, int(np.searchsorted(client.start_s, start_s, side="right")) - 1)
    for i in range(first, len(ends)):
        low, high = max(float(client.start_s[i]), start_s), min(float(ends[i]), end_s)
        if low >= end_s:
            break
        rate = float(client.rate_per_s[i]) * rate_scale
        if rate > 0.0 and high > low:
            reach = (high - low) * rate
            unit = _stationary_renewal(rng, client.process[i], float(client.shape[i]), reach)
            pieces.append(low + unit / rate)
    return np.concatenate(pieces)


def _stationary_renewal(
    rng: np.random.Generator, process: str, shape: float, reach: float
) -> NDArray[np.float64]:
    """Events of a renewal process of rate 1 on [0, reach), begun long before 0.

    The gap across 0 is met with probability proportional to its length; 0 lies anywhere in it.
    """
    if process == "Gamma":
        straddling = rng.gamma(shape + 1.0) / shape
    elif process == "Weibull":
        straddling = rng.gamma(1.0 + 1.0 / shape) ** (1.0 / shape) / _weibull_mean(shape)
    else:
        straddling = rng.gamma(2.0)
    events = [np.array([rng.random() * straddling])]
    reached = float(events[0][0])
    while reached < reach:
        block = int((reach - reached) * 1.1) + 64
        gaps = reached + np.cumsum(_unit_gaps(rng, process, shape, block))
        events.append(gaps)
        reached = float(gaps[-1])
    all_events = np.concatenate(events)
    return all_events[: int(np.searchsorted(all_events, reach, side="left"))]


def _unit_gaps(
    rng: np.random.Generator, process: str, shape: float, count: int
) -> NDArray[np.float64]:
    """Gaps of mean 1 of the named process; a Poisson process where none is named."""
    if process == "Gamma":
        return rng.gamma(shape, 1.0 / shape, count)
    if process == "Weibull":
        return rng.weibull(shape, count) / _weibull_mean(shape)
    return rng.exponential(1.0, count)


def _weibull_mean(shape: float) -> float:
    return math.exp(math.lgamma(1.0 + 1.0 / shape))


def _client_requests(
    client: Client,
    rng: np.random.Generator,
    start_s: float,
    end_s: float,
    rate_scale: float,
    skipped: dict[str, int],
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Arrival, prompt and output columns of one client; what is left out is counted."""
    arrival_s = client_arrivals(client, rng, start_s, end_s, rate_scale)
    prompts = np.zeros(len(arrival_s), dtype=np.int64)
    outputs = np.zeros(len(arrival_s), dtype=np.int64)
    starts = client.length_starts_s()
    window = np.searchsorted(starts, arrival_s, side="right") - 1
    has_law = np.zeros(len(arrival_s), dtype=np.bool_)
    for w in np.unique(window):
        laws = None if w < 0 else client.length_laws(float(starts[w]))
        if laws is None:
            continue
        rows = np.flatnonzero(window == w)
        has_law[rows] = True
        for column, law in zip((prompts, outputs), laws, strict=True):
            column[rows] = rng.choice(law.tokens, size=len(rows), p=law.probability)
    keep = has_law & (outputs >= 1) & (prompts >= 1)
    _count(skipped, "the client has no length law in that window", ~has_law)
    _count(skipped, "output_tokens must be >= 1", has_law & (outputs < 1))
    _count(skipped, "prompt_tokens must be >= 1", has_law & (outputs >= 1) & (prompts < 1))
    return arrival_s[keep], prompts[keep], outputs[keep]


def _count(skipped: dict[str, int], rule: str, broken: NDArray[np.bool_]) -> None:
    number = int(np.count_nonzero(broken))
    if number:
        skipped[rule] = skipped.get(rule, 0) + number


def _check_span(
    found: list[Client],
    usable: list[Client],
    source: str,
    start_s: float,
    end_s: float,
    rate_scale: float,
) -> None:
    if not usable:
        raise TraceError(f"{source}: none of the {len(found)} clients has a length file")
    first_s = min(float(client.start_s[0]) for client in found)
    last_s = max(client.end_s for client in found)
    if start_s < first_s or end_s > last_s * (1.0 + 1e-12):
        raise TraceError(
            f"{source}: the statistics cover {first_s:g} s to {last_s:g} s, "
            f"asked for {start_s:g} s to {end_s:g} s"
        )
    expected = sum(expected_requests(c, start_s, end_s, rate_scale) for c in usable)
    if expected > MAX_EXPECTED_REQUESTS:
        raise TraceError(
            f"{source}: about {expected:.3g} requests expected, at most {MAX_EXPECTED_REQUESTS:g} "
            "are allowed; take a shorter duration_s or a smaller rate_scale"
        )


def _notes(found: list[Client], usable: list[Client]) -> tuple[str, ...]:
    notes = ["Lengths are independent given client and window; only separate laws are published."]
    without = [client.client_id for client in found if client.dataset is None]
    if without:
        share = sum(float(c.rate_per_s.mean()) for c in found if c.dataset is None)
        total = sum(float(client.rate_per_s.mean()) for client in found)
        notes.append(
            f"{len(without)} of {len(found)} clients have no length file and are left out "
            f"({', '.join(str(c) for c in without)}): {share / total:.0%} of all requests."
            if total > 0
            else f"{len(without)} of {len(found)} clients have no length file and are left out."
        )
    return tuple(notes)
