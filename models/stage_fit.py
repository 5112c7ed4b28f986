"""A stage's time as a line in its load, fitted to measurements, and how well the line fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

MIN_DISTINCT_LOADS = 3
WARN_RELATIVE_ERROR = 0.10
CURVATURE_T = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFit:
    """seconds = slope * load + intercept, both >= 0, by least squares.

    Attributes:
        slope_s: Seconds per token.
        intercept_s: Seconds at no load.
        slope_se_s: Standard error of the slope; None where it was held at 0.
        intercept_se_s: Standard error of the intercept; None where it was held at 0.
        points: Measurements used.
        residual_std_s: Standard deviation of measured minus fitted seconds.
        max_relative_error: Largest abs(fitted / measured - 1).
        r2: Share of the variance of the measured times that the line explains.
        quantity: What the load counts: ``tokens`` (KV tokens read) or ``batch`` (tokens passed).
        min_load: Smallest load measured.
        max_load: Largest load measured.
        warning: Why the line should not be trusted, or None.
    """

    slope_s: float
    intercept_s: float
    slope_se_s: float | None
    intercept_se_s: float | None
    points: int
    residual_std_s: float
    max_relative_error: float
    r2: float
    quantity: str
    min_load: float
    max_load: float
    warning: str | None


def fit_stage(load: FloatArray, seconds: FloatArray, quantity: str) -> StageFit:
    """Least squares with non-negative slope and intercept.

    Args:
        load: [n] tokens or batch, >= 0.
        seconds: [n] measured time, > 0.
        quantity: ``tokens`` or ``batch``.

    Raises:
        ValueError: If fewer than three distinct loads were measured.
    """
    distinct = len(np.unique(load))
    if distinct < MIN_DISTINCT_LOADS:
        raise ValueError(
            f"{distinct} distinct {quantity} value(s), at least {MIN_DISTINCT_LOADS} are needed"
        )
    slope, intercept = _free_line(load, seconds)
    free_slope, free_intercept = slope > 0.0, intercept >= 0.0
    if not free_slope:
        slope, intercept = 0.0, float(seconds.mean())
    elif not free_intercept:
        slope, intercept = float(load @ seconds) / float(load @ load), 0.0
    is_two = free_slope and free_intercept
    fitted = slope * load + intercept
    residual = seconds - fitted
    freedom = len(load) - (2 if is_two else 1)
    variance = float(residual @ residual) / freedom
    slope_se, intercept_se = _standard_errors(load, variance, free_slope, is_two)
    worst = int(np.argmax(np.abs(fitted / seconds - 1.0)))
    max_error = abs(float(fitted[worst] / seconds[worst]) - 1.0)
    around_mean = seconds - seconds.mean()
    total = float(around_mean @ around_mean)
    warnings = _held_at_zero(free_slope, free_intercept)
    if max_error > WARN_RELATIVE_ERROR:
        warnings.append(_misfit(load, seconds, quantity, max_error, float(load[worst])))
    return StageFit(
        slope_s=slope,
        intercept_s=intercept,
        slope_se_s=slope_se,
        intercept_se_s=intercept_se,
        points=len(load),
        residual_std_s=math.sqrt(variance),
        max_relative_error=max_error,
        r2=1.0 - float(residual @ residual) / total if total > 0.0 else 1.0,
        quantity=quantity,
        min_load=float(load.min()),
        max_load=float(load.max()),
        warning="; ".join(warnings) or None,
    )


def curvature_t(load: FloatArray, seconds: FloatArray) -> float | None:
    """t statistic of a quadratic term added to the line; None where loads do not tell."""
    if len(load) < 4 or len(np.unique(load)) < 3:
        return None
    scaled = (load - load.mean()) / float(load.std())
    design = np.column_stack([np.ones(len(load)), scaled, scaled * scaled])
    coefficients = np.linalg.lstsq(design, seconds, rcond=None)[0]
    residual = seconds - design @ coefficients
    variance = float(residual @ residual) / (len(load) - 3)
    try:
        inverse = np.linalg.inv(design.T @ design)
    except np.linalg.LinAlgError:
        return None
    if not inverse[2, 2] > 0.0:
        return None
    spread = math.sqrt(variance * float(inverse[2, 2]))
    if spread <= 1e-15 * abs(float(coefficients[2])):
        return math.copysign(math.inf, float(coefficients[2]))
    return float(coefficients[2]) / spread


def _free_line(load: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    off = load - load.mean()
    slope = float(off @ seconds) / float(off @ off)
    return slope, float(seconds.mean()) - slope * float(load.mean())


def _standard_errors(
    load: FloatArray, variance: float, free_slope: bool, is_two: bool
) -> tuple[float | None, float | None]:
    n = len(load)
    if not free_slope:
        return None, math.sqrt(variance / n)
    if not is_two:
        return math.sqrt(variance / float(load @ load)), None
    off = load - load.mean()
    spread = float(off @ off)
    intercept_variance = variance * (1.0 / n + float(load.mean()) ** 2 / spread)
    return math.sqrt(variance / spread), math.sqrt(intercept_variance)


def _held_at_zero(free_slope: bool, free_intercept: bool) -> list[str]:
    if not free_slope:
        return ["measured time does not grow with load; slope held at 0"]
    if not free_intercept:
        return ["the line would be negative at no load; intercept held at 0"]
    return []


def _misfit(
    load: FloatArray, seconds: FloatArray, quantity: str, max_error: float, at: float
) -> str:
    t = curvature_t(load, seconds)
    where = f"off by up to {100.0 * max_error:.0f} % (at {quantity} = {at:g})"
    if t is not None and abs(t) > CURVATURE_T:
        bend = "bends upwards" if t > 0 else "flattens"
        return f"a line does not fit: measured time {bend} with {quantity}, {where}"
    return f"measurements scatter around the line: {where}"
