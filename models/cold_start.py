"""Mean slot load of a run that begins with fresh requests in every slot.

The stationary mean holds after many lifetimes only. A run that starts cold and is short needs the
mean over its own steps, from the renewal equation y = h + f * y.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traces.lengths import LengthPairs


def geometric_horizon_load(
    mean_prompt_tokens: float, p: float, num_requests: float, batch_per_worker: int
) -> tuple[float, float]:
    """Design load of the paper's first version: geometric D, all slots fresh at step 0.

    Args:
        mean_prompt_tokens: Mean P, tokens.
        p: Parameter of D on 1, 2, ...; mean 1 / p.
        num_requests: N, requests per attention worker.
        batch_per_worker: B, slots of the worker.

    Returns:
        K = N / (B p), the steps those requests last, and the mean slot load over K steps; it
        tends to the stationary P + (1 - p) / p.

    Source:
        arXiv 2601.21351 v1.
    """
    if not 0.0 < p <= 1.0:
        raise ValueError(f"p must be in (0, 1], found {p!r}")
    if num_requests <= 0 or batch_per_worker < 1:
        raise ValueError(
            "num_requests must be > 0 and batch_per_worker >= 1, "
            f"found {num_requests!r} and {batch_per_worker!r}"
        )
    steps = num_requests / (batch_per_worker * p)
    reached = 1.0 - (1.0 - (1.0 - p) ** steps) / (steps * p)
    return steps, mean_prompt_tokens + (1.0 - p) / p * reached


def cold_start_load(lengths: LengthPairs, num_steps: int) -> NDArray[np.float64]:
    """[num_steps] mean load in tokens of a slot that takes a fresh request at step 0.

    The first request is in its k-th step at step k; after it ends at D the slot starts anew:
    y_k = E[(P + k) 1{D > k}] + sum_d P(D = d) y_{k-d}. Solved as y = h / (1 - f) by power series.

    Source:
        Renewal equation, docs/theory.md.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be >= 1, found {num_steps!r}")
    fresh = _first_request_load(lengths, num_steps)
    ends = np.bincount(
        np.minimum(lengths.output_tokens, num_steps), weights=lengths.weight, minlength=num_steps
    )[:num_steps]
    denominator = np.asarray(-ends, dtype=np.float64)
    denominator[0] = 1.0
    return _multiply(fresh, _reciprocal(denominator), num_steps)


def horizon_load(lengths: LengthPairs, num_steps: int) -> float:
    """Mean slot load in tokens over the first ``num_steps`` steps of a cold start."""
    return float(cold_start_load(lengths, num_steps).mean())


def settling_steps(lengths: LengthPairs, relative_error: float, max_steps: int) -> int | None:
    """First step of a cold start from which the mean load stays near its stationary value.

    Args:
        lengths: Joint law of (P, D).
        relative_error: Allowed distance from theta, as a share of it.
        max_steps: How far to look.

    Returns:
        The step, or None where the load has not settled by ``max_steps`` or its last tenth
        still strays: with all slots in phase it may never settle.
    """
    in_service = lengths.weight * lengths.output_tokens
    middle = lengths.prompt_tokens + (lengths.output_tokens - 1) / 2.0
    theta = float(in_service @ middle) / float(in_service.sum())
    load = cold_start_load(lengths, max_steps)
    astray = np.flatnonzero(np.abs(load - theta) > relative_error * theta)
    first = 0 if len(astray) == 0 else int(astray[-1]) + 1
    return first if first <= 0.9 * max_steps else None


def _first_request_load(lengths: LengthPairs, num_steps: int) -> NDArray[np.float64]:
    """[num_steps] E[(P + k) 1{D > k}]."""
    until = np.minimum(lengths.output_tokens, num_steps)
    ending = np.bincount(until, weights=lengths.weight, minlength=num_steps + 1)
    ending_prompt = np.bincount(
        until, weights=lengths.weight * lengths.prompt_tokens, minlength=num_steps + 1
    )
    alive = np.cumsum(ending[::-1])[::-1][1:]
    prompt = np.cumsum(ending_prompt[::-1])[::-1][1:]
    return np.asarray(prompt + np.arange(num_steps) * alive, dtype=np.float64)


def _reciprocal(series: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients of 1 / series to the same length, by Newton's iteration; series[0] is 1."""
    inverse = np.ones(1)
    while len(inverse) < len(series):
        size = min(2 * len(inverse), len(series))
        error = -_multiply(series[:size], inverse, size)
        error[0] += 2.0
        inverse = _multiply(inverse, error, size)
    return inverse


def _multiply(a: NDArray[np.float64], b: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """First ``size`` coefficients of the product of two power series."""
    length = 1 << (len(a) + len(b) - 2).bit_length()
    spectrum = np.fft.rfft(a, max(length, 1)) * np.fft.rfft(b, max(length, 1))
    return np.asarray(np.fft.irfft(spectrum, max(length, 1))[:size], dtype=np.float64)
