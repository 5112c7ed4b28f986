"""Laws of prompt and output lengths, as support grids without sampling noise.

Each function returns a ``LengthPairs`` whose ``num_requests`` is None: the law is known, not
estimated. Unbounded tails are cut where less than 1e-9 of the requests lie beyond, and the rest is
scaled to 1; moments are those of the cut law. The law of observed requests is ``Trace.lengths()``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from traces.argument_checks import (
    require_between,
    require_count,
    require_not_negative,
    require_positive,
)
from traces.lengths import LengthPairs

TAIL_PROBABILITY = 1e-9
MAX_SUPPORT = 4_000_000
_NORMAL_REACH = 6.0  # 1e-9 of a standard normal lies beyond
_OUTPUT_STEP, _PROMPT_STEP = 0.05, 0.25  # in standard deviations; see lognormal


def fixed(prompt_tokens: int, output_tokens: int) -> LengthPairs:
    """Every request alike."""
    prompt = require_count("prompt_tokens", prompt_tokens, minimum=0)
    output = require_count("output_tokens", output_tokens)
    return LengthPairs.from_pairs([prompt], [output], name=f"fixed {prompt} + {output}")


def two_point(
    prompt_tokens: int,
    first_output_tokens: int,
    second_output_tokens: int,
    second_probability: float,
) -> LengthPairs:
    """Two kinds of requests with one prompt length and two output lengths."""
    prompt = require_count("prompt_tokens", prompt_tokens, minimum=0)
    first = require_count("first_output_tokens", first_output_tokens)
    second = require_count("second_output_tokens", second_output_tokens)
    share = require_between("second_probability", second_probability, 0.0, 1.0)
    name = f"two-point {prompt} + {first} or {second}"
    return _merged(
        np.full(2, prompt), np.array([first, second]), np.array([1 - share, share]), name
    )


def uniform(
    prompt_tokens: int, minimum_output_tokens: int, maximum_output_tokens: int
) -> LengthPairs:
    """Output lengths equally likely from minimum to maximum, both included."""
    prompt = require_count("prompt_tokens", prompt_tokens, minimum=0)
    low = require_count("minimum_output_tokens", minimum_output_tokens)
    high = require_count("maximum_output_tokens", maximum_output_tokens, minimum=low)
    outputs = np.arange(low, _checked_support(high, "maximum_output_tokens") + 1)
    name = f"uniform {prompt} + {low}..{high}"
    return LengthPairs.from_pairs(np.full(len(outputs), prompt), outputs, name=name)


def geometric(prompt_tokens: int, mean_output_tokens: float) -> LengthPairs:
    """Output lengths 1, 2, ... where every step ends the request with one probability.

    Args:
        prompt_tokens: Prompt of every request, >= 0.
        mean_output_tokens: 1 / that probability, >= 1.

    Raises:
        ValueError: If an argument breaks its rule.
    """
    prompt = require_count("prompt_tokens", prompt_tokens, minimum=0)
    mean = require_between("mean_output_tokens", mean_output_tokens, 1.0, 1e9)
    name = f"geometric {prompt} + {mean:g}"
    if mean == 1.0:
        return LengthPairs.from_pairs([prompt], [1], name=name)
    log_survival = math.log1p(-1.0 / mean)
    last = math.ceil(math.log(TAIL_PROBABILITY) / log_survival)
    outputs = np.arange(1, _checked_support(last, "mean_output_tokens") + 1)
    weight = np.exp((outputs - 1) * log_survival)
    return LengthPairs.from_pairs(np.full(last, prompt), outputs, weight, name=name)


def lognormal(
    mean_prompt_tokens: float,
    mean_output_tokens: float,
    sigma_prompt: float,
    sigma_output: float,
    correlation: float = 0.0,
    *,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> LengthPairs:
    """Prompt and output lengths whose logarithms are jointly normal, rounded, at least 1.

    The grid is even in the two independent normals behind the law. For smooth integrands an even
    grid converges faster than any power of its step, and unlike Gauss-Hermite nodes it stays fine
    where the lengths are sampled.

    Args:
        mean_prompt_tokens: Mean prompt before rounding and capping, >= 1.
        mean_output_tokens: Mean output before rounding and capping, >= 1.
        sigma_prompt: Standard deviation of log P, 0..4.
        sigma_output: Standard deviation of log D, 0..4.
        correlation: Correlation of log P and log D, -1..1.
        max_prompt_tokens: Longer prompts are shortened to this; None: no cap.
        max_output_tokens: Longer outputs are shortened to this; None: no cap.

    Raises:
        ValueError: If an argument breaks its rule.
    """
    sigma_p = require_between("sigma_prompt", sigma_prompt, 0.0, 4.0)
    sigma_d = require_between("sigma_output", sigma_output, 0.0, 4.0)
    rho = require_between("correlation", correlation, -1.0, 1.0)
    mu_p = math.log(require_between("mean_prompt_tokens", mean_prompt_tokens, 1.0, 1e9))
    mu_d = math.log(require_between("mean_output_tokens", mean_output_tokens, 1.0, 1e9))
    z_d, weight_d = _normal_grid(_OUTPUT_STEP if sigma_d > 0.0 or rho != 0.0 else None)
    z_own, weight_own = _normal_grid(_PROMPT_STEP if sigma_p > 0.0 and abs(rho) < 1.0 else None)
    z_p = rho * z_d[:, None] + math.sqrt(1.0 - rho * rho) * z_own[None, :]
    outputs = np.exp(mu_d - 0.5 * sigma_d**2 + sigma_d * z_d)
    prompts = np.exp(mu_p - 0.5 * sigma_p**2 + sigma_p * z_p)
    weight = weight_d[:, None] * weight_own[None, :]
    return _merged(
        _rounded(prompts, max_prompt_tokens, "max_prompt_tokens").ravel(),
        np.repeat(_rounded(outputs, max_output_tokens, "max_output_tokens"), len(z_own)),
        weight.ravel(),
        f"lognormal {mean_prompt_tokens:g} + {mean_output_tokens:g}",
    )


def pareto(
    prompt_tokens: int,
    minimum_output_tokens: float,
    tail_index: float,
    cap_tokens: int,
    *,
    num_quantiles: int = 400_000,
) -> LengthPairs:
    """Output lengths with a power-law tail: P(D > d) = (minimum / d) ** tail_index, capped.

    Quantiles at (i + 1/2) / num_quantiles, rounded down: the law ends at the last of them, about
    minimum * (2 num_quantiles) ** (1 / tail_index), where the cap lies beyond. The mean
    needs tail_index > 1, the mean slot load > 2, its variance > 3; below, the cap decides.

    Args:
        prompt_tokens: Prompt of every request, >= 0.
        minimum_output_tokens: Shortest output, >= 1.
        tail_index: > 0; smaller is heavier.
        cap_tokens: Longest output, at least the minimum.
        num_quantiles: How finely the law is cut, >= 1.

    Raises:
        ValueError: If an argument breaks its rule.
    """
    prompt = require_count("prompt_tokens", prompt_tokens, minimum=0)
    minimum = require_between("minimum_output_tokens", minimum_output_tokens, 1.0, 1e9)
    index = require_positive("tail_index", tail_index)
    cap = require_count("cap_tokens", cap_tokens, minimum=math.ceil(minimum))
    count = require_count("num_quantiles", num_quantiles)
    u = (np.arange(_checked_support(count, "num_quantiles")) + 0.5) / count
    log_outputs = math.log(minimum) - np.log1p(-u) / index
    outputs = np.floor(np.exp(np.minimum(log_outputs, math.log(cap) + 1.0)))
    outputs = np.minimum(outputs, cap).astype(np.int64)
    lengths, counts = np.unique(outputs, return_counts=True)
    name = f"pareto {prompt} + {minimum:g}, index {index:g}"
    return LengthPairs.from_pairs(np.full(len(lengths), prompt), lengths, counts, name=name)


def merge_equal_pairs(lengths: LengthPairs) -> LengthPairs:
    """The same law with every distinct pair once, ordered by output and prompt length."""
    return _merged(
        lengths.prompt_tokens,
        lengths.output_tokens,
        lengths.weight,
        lengths.name,
        lengths.num_requests,
    )


def _merged(
    prompts: NDArray[np.int64],
    outputs: NDArray[np.int64],
    weight: NDArray[np.float64],
    name: str,
    num_requests: int | None = None,
) -> LengthPairs:
    """Add up the weights of equal pairs; pairs of weight 0 go."""
    order = np.lexsort((prompts, outputs))
    p, d, w = prompts[order], outputs[order], weight[order]
    is_first = np.concatenate(([True], (np.diff(p) != 0) | (np.diff(d) != 0)))
    total = np.add.reduceat(w, np.flatnonzero(is_first))
    keep = total > 0.0
    return LengthPairs.from_pairs(
        p[is_first][keep], d[is_first][keep], total[keep], num_requests=num_requests, name=name
    )


def _normal_grid(step: float | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """An even grid over a standard normal and its weights; None: the single point 0."""
    if step is None:
        return np.zeros(1), np.ones(1)
    half = round(_NORMAL_REACH / step)
    z = np.arange(-half, half + 1, dtype=np.float64) * step
    density: NDArray[np.float64] = np.exp(-0.5 * z * z)
    return z, density / density.sum()


def _rounded(tokens: NDArray[np.float64], cap: int | None, cap_name: str) -> NDArray[np.int64]:
    limit = 10**9 if cap is None else require_count(cap_name, cap)
    return np.clip(np.rint(tokens), 1, limit).astype(np.int64)


def _checked_support(size: int, name: str) -> int:
    """``size``, unless a law of that many points would be too large to work with."""
    require_not_negative(name, size)
    if size > MAX_SUPPORT:
        raise ValueError(
            f"{name} leads to {size} support points; at most {MAX_SUPPORT} are allowed"
        )
    return size
