"""How sure a simulated mean is: warm-up cut, batch means, replications, comparisons.

All intervals are Student t intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from twin.comparisons import Difference, not_worse_than_best, paired_difference

__all__ = [
    "Difference",
    "Estimate",
    "WarmupCut",
    "batch_means",
    "mser5",
    "not_worse_than_best",
    "paired_difference",
    "ratio_batch_means",
    "ratio_replications",
    "replications",
]

_MSER_BATCH = 5
_FEWEST_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and how far the truth may be from it.

    Attributes:
        mean: Point estimate.
        half_width: Of the confidence interval; infinite where the data cannot tell.
        standard_error: Of the mean.
        confidence: Nominal coverage of ``mean`` +- ``half_width``.
        num_samples: Independent pieces it rests on: batches or replications.
        method: ``batch means``, ``ratio of batch means``, ``replications`` or ``ratio of
            replications``.
        lag1: Correlation of neighbouring batches; None for replications.
        warning: Why the interval may be too narrow, or None.
    """

    mean: float
    half_width: float
    standard_error: float
    confidence: float
    num_samples: int
    method: str
    lag1: float | None = None
    warning: str | None = None

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width

    @property
    def relative_standard_error(self) -> float:
        """Standard error over the size of the mean; infinite at a mean of 0."""
        return self.standard_error / abs(self.mean) if self.mean else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCut:
    """Where a series has settled.

    Attributes:
        first: Samples to leave out; the series from there on is used.
        num_samples: Length of the series.
        warning: Set when the best cut lies at the limit, so the run may be too short.
    """

    first: int
    num_samples: int
    warning: str | None = None


def mser5(series: ArrayLike) -> WarmupCut:
    """The cut that makes the standard error of what remains smallest, on means of five.

    Only a cut in the first half is accepted: later ones rest on too few samples.

    Args:
        series: [n], n >= 20.

    Raises:
        ValueError: If the series is shorter, or not finite.

    Source:
        White, Cobb and Spratt, "A comparison of five steady-state truncation heuristics for
        simulation", Winter Simulation Conference 2000.
    """
    values = _series(series, "series", at_least=4 * _MSER_BATCH)
    num_batches = len(values) // _MSER_BATCH
    means = values[: num_batches * _MSER_BATCH].reshape(num_batches, _MSER_BATCH).mean(axis=1)
    centred = means - means.mean()
    remaining = num_batches - np.arange(num_batches // 2 + 1)
    total = np.cumsum(centred[::-1])[::-1][: len(remaining)]
    squares = np.cumsum(centred[::-1] ** 2)[::-1][: len(remaining)]
    marginal = np.maximum(squares - total**2 / remaining, 0.0) / remaining**2
    best = int(np.argmin(marginal))
    warning = None
    if best == len(remaining) - 1:
        warning = (
            f"the series of {len(values)} samples still drifts in its second half: "
            "the run is too short for its warm-up"
        )
    return WarmupCut(first=best * _MSER_BATCH, num_samples=len(values), warning=warning)


def batch_means(series: ArrayLike, *, confidence: float = 0.95, num_batches: int = 20) -> Estimate:
    """Mean of a settled series, with an interval from the means of equal batches.

    Neighbouring batches must be nearly uncorrelated. While their lag-1 correlation is
    significantly positive, pairs are joined, down to 8 batches or more; if they still hang
    together, the estimate carries a warning.

    Args:
        series: [n] values of equal weight, in order of time; n >= 2 * ``num_batches``. What does
            not fill the batches is left out at the front.
        confidence: In (0, 1).
        num_batches: To begin with, >= 8.

    Raises:
        ValueError: If an argument is out of its range.

    Source:
        Law, "Simulation Modeling and Analysis", 5th ed., 9.5.3; von Neumann's test of the lag-1
        correlation in Fishman, Management Science 24, 1978.
    """
    values = _series(series, "series", at_least=2 * _batches(num_batches))
    sums, sizes = _batch_sums(values, num_batches), _batch_sums(np.ones(len(values)), num_batches)
    return _ratio(sums, sizes, _confidence(confidence), "batch means")


def ratio_batch_means(
    numerator: ArrayLike,
    denominator: ArrayLike,
    *,
    confidence: float = 0.95,
    num_batches: int = 20,
) -> Estimate:
    """A rate of a settled run, e.g. tokens over seconds, as a ratio of sums.

    Batches have equal numbers of rows; the interval comes from the spread of
    ``numerator - ratio * denominator`` over batches. Correlated batches: see ``batch_means``.

    Args:
        numerator: [n], in order of time.
        denominator: [n], of positive sum.
        confidence: In (0, 1).
        num_batches: To begin with, >= 8.

    Raises:
        ValueError: If an argument is out of its range, or the series differ in length.

    Source:
        Ratio estimator of Law, "Simulation Modeling and Analysis", 5th ed., 9.5.3 and Cochran,
        "Sampling Techniques", 3rd ed., 6.3.
    """
    at_least = 2 * _batches(num_batches)
    above = _series(numerator, "numerator", at_least=at_least)
    below = _series(denominator, "denominator", at_least=at_least)
    if len(above) != len(below):
        raise ValueError(
            f"numerator and denominator differ in length: {len(above)} and {len(below)}"
        )
    sums = _batch_sums(above, num_batches)
    return _ratio(
        sums, _batch_sums(below, num_batches), _confidence(confidence), "ratio of batch means"
    )


def replications(values: ArrayLike, *, confidence: float = 0.95) -> Estimate:
    """Mean over independent runs.

    Args:
        values: [k] one number a run; k >= 2.
        confidence: In (0, 1).

    Raises:
        ValueError: If there are fewer, or one is not finite.
    """
    samples = _series(values, "values", at_least=2)
    standard_error = float(samples.std(ddof=1)) / math.sqrt(len(samples))
    return Estimate(
        mean=float(samples.mean()),
        half_width=_student_t(_confidence(confidence), len(samples) - 1) * standard_error,
        standard_error=standard_error,
        confidence=confidence,
        num_samples=len(samples),
        method="replications",
    )


def ratio_replications(
    numerator: ArrayLike, denominator: ArrayLike, *, confidence: float = 0.95
) -> Estimate:
    """A rate over independent runs as a ratio of sums: the mean of their rates would be biased.

    Args:
        numerator: [k] one sum a run, e.g. tokens; k >= 2.
        denominator: [k] e.g. seconds, of positive sum.
        confidence: In (0, 1).

    Raises:
        ValueError: If there are fewer, one is not finite, or the lengths differ.

    Source:
        Cochran, "Sampling Techniques", 3rd ed., 6.3.
    """
    above = _series(numerator, "numerator", at_least=2)
    below = _series(denominator, "denominator", at_least=2)
    if len(above) != len(below):
        raise ValueError(
            f"numerator and denominator differ in length: {len(above)} and {len(below)}"
        )
    mean = float(above.sum()) / float(below.sum())
    num = len(above)
    spread = math.sqrt(float(((above - mean * below) ** 2).sum()) / (num * (num - 1)))
    standard_error = spread / float(below.mean())
    return Estimate(
        mean=mean,
        half_width=_student_t(_confidence(confidence), num - 1) * standard_error,
        standard_error=standard_error,
        confidence=confidence,
        num_samples=num,
        method="ratio of replications",
    )


def _student_t(confidence: float, degrees: int) -> float:
    """Half-width of the central interval of Student's t, in standard errors."""
    return float(stdtrit(degrees, 0.5 + 0.5 * confidence))


def _ratio(
    above: NDArray[np.float64], below: NDArray[np.float64], confidence: float, method: str
) -> Estimate:
    """Sum over sum, from batches that are joined while neighbours hang together."""
    mean = float(above.sum()) / float(below.sum())
    while True:
        excess = above - mean * below
        num = len(excess)
        lag1 = _lag1(excess)
        is_correlated = lag1 > 1.645 / math.sqrt(num)  # one-sided 5 % test
        if not is_correlated or num // 2 < _FEWEST_BATCHES:
            break
        odd = num % 2
        above = above[odd:].reshape(-1, 2).sum(axis=1)
        below = below[odd:].reshape(-1, 2).sum(axis=1)
    spread = math.sqrt(float((excess**2).sum()) / (num * (num - 1)))
    standard_error = spread / float(below.mean())
    warning = None
    if is_correlated:
        warning = (
            f"{num} batches still hang together (lag-1 correlation {lag1:.2f}): "
            "the interval is too narrow, run longer"
        )
    return Estimate(
        mean=mean,
        half_width=_student_t(confidence, num - 1) * standard_error,
        standard_error=standard_error,
        confidence=confidence,
        num_samples=num,
        method=method,
        lag1=lag1,
        warning=warning,
    )


def _lag1(values: NDArray[np.float64]) -> float:
    """Correlation of neighbours; 0 for a constant series."""
    centred = values - values.mean()
    scale = float((centred**2).sum())
    return float((centred[1:] * centred[:-1]).sum()) / scale if scale > 0.0 else 0.0


def _batch_sums(values: NDArray[np.float64], num_batches: int) -> NDArray[np.float64]:
    size = len(values) // num_batches
    kept = values[len(values) - size * num_batches :]
    sums: NDArray[np.float64] = kept.reshape(num_batches, size).sum(axis=1)
    return sums


def _series(values: ArrayLike, name: str, *, at_least: int) -> NDArray[np.float64]:
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1 or len(series) < at_least:
        raise ValueError(f"{name} must have at least {at_least} values, found {series.size}")
    if not bool(np.isfinite(series).all()):
        raise ValueError(f"{name} must be finite, found NaN or infinity")
    return series


def _batches(num_batches: int) -> int:
    if num_batches < _FEWEST_BATCHES:
        raise ValueError(f"num_batches must be >= {_FEWEST_BATCHES}, found {num_batches!r}")
    return num_batches


def _confidence(confidence: float) -> float:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be in (0, 1), found {confidence!r}")
    return confidence
