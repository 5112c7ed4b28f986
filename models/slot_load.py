"""The load of one decode slot as met at a random step: its moments, and how well they are known.

A request with P prompt and D output tokens holds its slot for D steps and loads it with P, P + 1,
..., P + D - 1 tokens, once each. So a slot met at a random step holds a request with probability
proportional to D, at an age that is uniform on 0..D-1: the slot load is a mixture of uniform laws,
and its central moments follow without the cancellation of raw power sums. Everything here works on
the pairs themselves, so that a dependence between P and D counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from models.tail_index import TailIndex, tail_index
from traces.lengths import LengthPairs

WARN_RELATIVE_ERROR = 0.02
MIN_REQUESTS = 2
NO_VARIANCE_INDEX = 1.5
# Where the variance may not exist, theta +- 2 se covered theta in 31..79 % of simulated samples and
# theta +- 6 se in 65..100 % (docs/theory.md): such a standard error counts three times.
NO_VARIANCE_FACTOR = 3.0


class HeavyTailError(ValueError):
    """The sample cannot support the precision that was asked for; the message says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMoments:
    """Moments of the load of one slot at a random decode step.

    Attributes:
        theta_tokens: Mean load.
        nu2: Variance, tokens squared.
        nu_tokens: Standard deviation.
        skew: Third standardised moment; 0.0 where the variance is 0.
        theta_se: Standard error of theta from a sample of requests; None for an exact law, and
            for a single request.
        nu_se: Standard error of nu_tokens; None for an exact law or a variance of 0.
        theta_if_independent: What theta would be if P and D were independent.
        mean_prompt_tokens: Mean P over requests.
        mean_output_tokens: Mean D over requests.
        max_load_tokens: Largest load any slot can hold.
        num_requests: Requests behind the law; None for an exact law.
        tail: Tail index of what requests contribute to theta; None for an exact law or where the
            sample is too small or too flat to have a tail.
        warnings: What a reader of the numbers must know, one sentence each.
    """

    theta_tokens: float
    nu2: float
    nu_tokens: float
    skew: float
    theta_se: float | None
    nu_se: float | None
    theta_if_independent: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    max_load_tokens: int
    num_requests: int | None
    tail: TailIndex | None
    warnings: tuple[str, ...] = ()


def slot_moments(lengths: LengthPairs, *, max_relative_error: float | None = None) -> SlotMoments:
    """Moments of the stationary slot load of a joint law of lengths.

    Args:
        lengths: Joint law of (P, D).
        max_relative_error: Largest relative standard error of theta the caller can live with.

    Raises:
        HeavyTailError: If ``max_relative_error`` is given and the sample cannot support it.
        ValueError: If ``max_relative_error`` is not > 0.

    Source:
        theta and nu2: renewal-reward, arXiv 2601.21351. The third moment and the standard errors
        are derived in docs/theory.md.
    """
    prompt = lengths.prompt_tokens.astype(np.float64)
    output = lengths.output_tokens.astype(np.float64)
    weight = lengths.weight
    mean_output = float(weight @ output)
    in_service = weight * output / mean_output
    middle = prompt + (output - 1.0) / 2.0
    spread = (output * output - 1.0) / 12.0
    theta = float(in_service @ middle)
    off = middle - theta
    nu2 = float(in_service @ (spread + off * off))
    third = float(in_service @ (off * (3.0 * spread + off * off)))
    nu = math.sqrt(nu2)
    # A third moment below the rounding of its own terms is that of a symmetric law.
    is_rounding = abs(third) <= 1e-13 * nu2 * float(np.abs(off).max() + nu)
    theta_se, nu_se = _standard_errors(lengths, theta, nu2, mean_output)
    mean_prompt = float(weight @ prompt)
    mean_output_squared = float(weight @ (output * output))
    tail = None if lengths.num_requests is None else tail_index(lengths)
    moments = SlotMoments(
        theta_tokens=theta,
        nu2=nu2,
        nu_tokens=nu,
        skew=0.0 if is_rounding else third / nu**3,
        theta_se=theta_se,
        nu_se=nu_se,
        theta_if_independent=mean_prompt + (mean_output_squared / mean_output - 1.0) / 2.0,
        mean_prompt_tokens=mean_prompt,
        mean_output_tokens=mean_output,
        max_load_tokens=int((lengths.prompt_tokens + lengths.output_tokens).max()) - 1,
        num_requests=lengths.num_requests,
        tail=tail,
        warnings=_warnings(lengths, theta, theta_se, tail),
    )
    if max_relative_error is not None:
        _refuse_if_unsupported(lengths, moments, max_relative_error)
    return moments


def required_requests(lengths: LengthPairs, relative_error: float) -> int:
    """Requests a trace of this law needs for a relative standard error of theta.

    Args:
        lengths: Joint law of (P, D).
        relative_error: Wanted standard error of theta over theta, > 0.

    Source:
        n = Var(R - theta D) / (E[D] eps theta)^2 with R = D P + D (D - 1) / 2, docs/theory.md.
    """
    _check_positive("relative_error", relative_error)
    theta, mean_output, variance = _reward_variance(lengths)
    if theta == 0.0:
        return 1
    return max(1, math.ceil(variance / (mean_output * relative_error * theta) ** 2))


def required_steps(lengths: LengthPairs, num_slots: int, relative_error: float) -> int:
    """Decode steps to simulate for a relative standard error of the mean slot load.

    Args:
        lengths: Joint law of (P, D).
        num_slots: Slots that run side by side, in total, >= 1.
        relative_error: Wanted standard error of the mean load over theta, > 0.

    Source:
        K = Var(R - theta D) / (E[D] S (eps theta)^2), docs/theory.md.
    """
    _check_positive("relative_error", relative_error)
    _check_positive("num_slots", num_slots)
    theta, mean_output, variance = _reward_variance(lengths)
    if theta == 0.0:
        return 1
    return max(1, math.ceil(variance / (mean_output * num_slots * (relative_error * theta) ** 2)))


def _reward_variance(lengths: LengthPairs) -> tuple[float, float, float]:
    """theta, E[D] and Var(R - theta D) per request."""
    output = lengths.output_tokens.astype(np.float64)
    middle = lengths.prompt_tokens + (output - 1.0) / 2.0
    mean_output = float(lengths.weight @ output)
    theta = float(lengths.weight @ (output * middle)) / mean_output
    residual = output * (middle - theta)
    return theta, mean_output, float(lengths.weight @ (residual * residual))


def _standard_errors(
    lengths: LengthPairs, theta: float, nu2: float, mean_output: float
) -> tuple[float | None, float | None]:
    """Ratio-estimator standard errors of theta and nu by the delta method."""
    if lengths.num_requests is None or lengths.num_requests < MIN_REQUESTS:
        return None, None
    output = lengths.output_tokens.astype(np.float64)
    off = lengths.prompt_tokens + (output - 1.0) / 2.0 - theta
    scale = mean_output * math.sqrt(lengths.num_requests)
    reward = output * off
    theta_se = math.sqrt(float(lengths.weight @ (reward * reward))) / scale
    if nu2 == 0.0:
        return theta_se, None
    square = output * ((output * output - 1.0) / 12.0 + off * off - nu2)
    nu2_se = math.sqrt(float(lengths.weight @ (square * square))) / scale
    return theta_se, nu2_se / (2.0 * math.sqrt(nu2))


def _warnings(
    lengths: LengthPairs, theta: float, theta_se: float | None, tail: TailIndex | None
) -> tuple[str, ...]:
    found = []
    if lengths.num_requests is not None and lengths.num_requests < MIN_REQUESTS:
        found.append("theta comes from a single request: its error is unknown")
    if theta_se is not None and _trusted_error(theta_se, tail) > WARN_RELATIVE_ERROR * theta:
        found.append(_unattainable(lengths, WARN_RELATIVE_ERROR, tail))
    if tail is not None and _has_no_variance(tail):
        found.append(
            f"heavy tail: what a request contributes to theta falls off like a power of about "
            f"{tail.index:.2f} (+- {2.0 * tail.standard_error:.2f}); below 2 the standard error of "
            f"theta means little, below 1 theta does not exist"
        )
    return tuple(found)


def _refuse_if_unsupported(lengths: LengthPairs, moments: SlotMoments, wanted: float) -> None:
    _check_positive("max_relative_error", wanted)
    if lengths.num_requests is None:
        return
    error, tail = moments.theta_se, moments.tail
    if error is None or _trusted_error(error, tail) > wanted * moments.theta_tokens:
        raise HeavyTailError(_unattainable(lengths, wanted, tail))


def _has_no_variance(tail: TailIndex | None) -> bool:
    return tail is not None and tail.is_surely_below(NO_VARIANCE_INDEX)


def _trusted_error(theta_se: float, tail: TailIndex | None) -> float:
    return theta_se * (NO_VARIANCE_FACTOR if _has_no_variance(tail) else 1.0)


def _unattainable(lengths: LengthPairs, wanted: float, tail: TailIndex | None) -> str:
    n = lengths.num_requests
    why = "heavy tail" if _has_no_variance(tail) else "too few requests"
    refusal = f"{why}: {100.0 * wanted:.3g} % not attainable with {n} request(s)"
    if n is None or n < MIN_REQUESTS:
        return f"{refusal}; their spread is unknown"
    trusted = wanted / (NO_VARIANCE_FACTOR if _has_no_variance(tail) else 1.0)
    return f"{refusal}; at least {required_requests(lengths, trusted)} are needed"


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, found {value!r}")
