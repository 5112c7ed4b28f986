"""Slot load from a system that was watched for a while: requests still running count too.

Completed requests alone are biased towards short ones. Two estimators avoid that: a product-limit
(Kaplan-Meier) survival curve of the output length over completed and running requests, and a
census of the live slots at one moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

JACKKNIFE_GROUPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEstimate:
    """Mean and variance of the slot load, estimated from what was seen.

    Attributes:
        theta_tokens: Mean load.
        nu2: Variance, tokens squared.
        theta_se: Standard error of theta; None where there is too little to tell.
        num_completed: Completed requests used.
        num_running: Running requests used.
        share_beyond: Estimated share of requests longer than anything observed; theta misses
            what they add beyond that, so it is a lower bound where this is not 0.
        warnings: What a reader of the numbers must know.
    """

    theta_tokens: float
    nu2: float
    theta_se: float | None
    num_completed: int
    num_running: int
    share_beyond: float = 0.0
    warnings: tuple[str, ...] = ()


def census_load(prompt_tokens: ArrayLike, age_tokens: ArrayLike) -> LoadEstimate:
    """Slot load from all live slots at one moment of a settled system.

    Args:
        prompt_tokens: [n] P of each live request.
        age_tokens: [n] tokens it has generated so far, >= 0.

    Returns:
        The mean of P + age with the standard error of independent slots.
    """
    load = _whole("prompt_tokens", prompt_tokens) + _whole("age_tokens", age_tokens)
    if len(load) == 0:
        raise ValueError("no live slots: at least one is needed")
    n = len(load)
    error = float(load.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    return LoadEstimate(
        theta_tokens=float(load.mean()),
        nu2=float(load.var(ddof=1)) if n > 1 else 0.0,
        theta_se=error,
        num_completed=0,
        num_running=n,
    )


def censored_load(
    completed_prompt_tokens: ArrayLike,
    completed_output_tokens: ArrayLike,
    running_prompt_tokens: ArrayLike,
    running_age_tokens: ArrayLike,
) -> LoadEstimate:
    """Slot load from completed requests and those still running when the watch ended.

    S(a) = P(D > a) comes from the product-limit estimator, where a running request of age a is
    known to have D > a. theta = sum_a S(a) (mean P of those seen at age a + a) / sum_a S(a).

    Args:
        completed_prompt_tokens: [n] P of completed requests.
        completed_output_tokens: [n] their D, >= 1.
        running_prompt_tokens: [k] P of requests in a slot at the end.
        running_age_tokens: [k] tokens they had generated, >= 0.

    Returns:
        theta, nu2 and a standard error of theta from a grouped jackknife over requests.

    Source:
        E. L. Kaplan, P. Meier, JASA 53 (1958) 457; the use for theta is derived in docs/theory.md.
    """
    prompt = np.concatenate(
        [
            _whole("completed_prompt_tokens", completed_prompt_tokens),
            _whole("running_prompt_tokens", running_prompt_tokens),
        ]
    )
    outputs = _whole("completed_output_tokens", completed_output_tokens)
    ages = _whole("running_age_tokens", running_age_tokens)
    if len(outputs) == 0:
        raise ValueError("no completed request: at least one is needed")
    if float(outputs.min()) < 1:
        raise ValueError(f"completed_output_tokens must be >= 1, found {int(outputs.min())}")
    if len(prompt) != len(outputs) + len(ages):
        raise ValueError("prompt tokens and output or age tokens differ in length")
    last_age = np.concatenate([outputs - 1, ages]).astype(np.int64)
    is_completed = np.arange(len(prompt)) < len(outputs)
    theta, nu2, beyond = _product_limit(prompt, last_age, is_completed)
    warnings: tuple[str, ...] = ()
    if beyond > 0.0:
        warnings = (
            f"the longest request was still running: {100.0 * beyond:.2g} % of requests are longer "
            f"than the {int(last_age.max()) + 1} tokens observed, so theta is a lower bound",
        )
    return LoadEstimate(
        theta_tokens=theta,
        nu2=nu2,
        theta_se=_jackknife_error(prompt, last_age, is_completed),
        num_completed=len(outputs),
        num_running=len(ages),
        share_beyond=beyond,
        warnings=warnings,
    )


def _product_limit(
    prompt: NDArray[np.float64], last_age: NDArray[np.int64], is_completed: NDArray[np.bool_]
) -> tuple[float, float, float]:
    """theta, nu2 and the estimated share of requests that outlive every observed age."""
    size = int(last_age.max()) + 1
    at_age = _seen_from(np.bincount(last_age, minlength=size))
    prompt_sum = _seen_from(np.bincount(last_age, weights=prompt, minlength=size))
    square_sum = _seen_from(np.bincount(last_age, weights=prompt * prompt, minlength=size))
    ended = np.bincount(last_age[is_completed], minlength=size)
    watched = ended + np.append(at_age[1:], 0.0)
    hazard = np.divide(ended, watched, out=np.zeros(size), where=watched > 0)
    survival = np.cumprod(1.0 - hazard)
    weight = np.append(1.0, survival[:-1])
    weight /= weight.sum()
    age = np.arange(size)
    mean_prompt = prompt_sum / at_age
    theta = float(weight @ (mean_prompt + age))
    second = square_sum / at_age + 2.0 * age * mean_prompt + age * age
    return theta, max(0.0, float(weight @ second) - theta * theta), float(survival[-1])


def _seen_from(count_by_last_age: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Sums over all requests that were seen at each age."""
    return np.asarray(np.cumsum(count_by_last_age[::-1])[::-1], dtype=np.float64)


def _jackknife_error(
    prompt: NDArray[np.float64], last_age: NDArray[np.int64], is_completed: NDArray[np.bool_]
) -> float | None:
    """Standard error of theta from leaving out every 20th request in turn."""
    group = np.arange(len(prompt)) % JACKKNIFE_GROUPS
    if len(prompt) < 2 * JACKKNIFE_GROUPS:
        return None
    without = []
    for g in range(JACKKNIFE_GROUPS):
        keep = group != g
        without.append(_product_limit(prompt[keep], last_age[keep], is_completed[keep])[0])
    spread = np.asarray(without) - np.mean(without)
    factor = (JACKKNIFE_GROUPS - 1) / JACKKNIFE_GROUPS
    return math.sqrt(factor * float(spread @ spread))


def _whole(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if len(array) and not (np.all(np.isfinite(array)) and float(array.min()) >= 0.0):
        raise ValueError(f"{name} must be finite and >= 0")
    return array
