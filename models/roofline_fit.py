"""Measured times as a roofline: a fixed part, and bytes or operations, whichever takes longer.

    seconds = fixed + max( bytes / (bytes per s),  operations / (operations per s) )

For a given number of bytes that take as long as one operation, that is a line through the points
(max(bytes, ratio * operations), seconds), so the ratio is searched and the line solved. Residuals
are relative: a step of 1 ms counts as much as one of 1 s.

Source:
    Roofline model: Williams, Waterman, Patterson, CACM 52 (2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_POINTS: Final = 3
RATIOS: Final = 400
EQUAL: Final = 1e-9
"""Relative spread below which loads are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineFit:
    """The fit, and how well it describes what was measured.

    Attributes:
        fixed_s: Seconds at no load, >= 0.
        bytes_per_s: > 0.
        flops_per_s: > 0. Where no point was bound by operations: the least rate that agrees
            with the points.
        points: Measurements used.
        is_memory_bound, is_compute_bound: Whether some point was bound by bytes, by operations.
        r2: Share of the variance of the measured times that is explained.
        median_relative_error, max_relative_error: Of abs(fitted / measured - 1).
        min_tokens, max_tokens: Range of tokens (or whatever load was varied) that was measured.
    """

    fixed_s: float
    bytes_per_s: float
    flops_per_s: float
    points: int
    is_memory_bound: bool
    is_compute_bound: bool
    r2: float
    median_relative_error: float
    max_relative_error: float
    min_tokens: float
    max_tokens: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """Seconds of so many bytes and operations."""
        return self.fixed_s + max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


def fit_roofline(
    num_bytes: Floats, flops: Floats, seconds: Floats, tokens: Floats, *, has_fixed: bool = True
) -> RooflineFit:
    """Least squares of relative residuals, no coefficient below 0.

    Args:
        num_bytes: [n] bytes read, > 0.
        flops: [n] operations, > 0.
        seconds: [n] measured, > 0.
        tokens: [n] load that is reported as range.
        has_fixed: Whether there may be a fixed part.

    Raises:
        ValueError: If there are fewer than three points, a number is not > 0, or time does not
            grow with load at all.
    """
    if len(seconds) < MIN_POINTS:
        raise ValueError(f"{len(seconds)} measurement(s), at least {MIN_POINTS} are needed")
    for name, values in (("bytes", num_bytes), ("operations", flops), ("seconds", seconds)):
        if not (np.isfinite(values) & (values > 0.0)).all():
            raise ValueError(f"{name} must be finite and > 0")
    intensity = num_bytes / flops
    low, high = float(intensity.min()), float(intensity.max())
    ratios = np.geomspace(low, high, RATIOS) if high > low * (1.0 + EQUAL) else np.array([low])
    best: tuple[float, float, float, float] | None = None
    for ratio in ratios.tolist():
        load = np.maximum(num_bytes, ratio * flops)
        fixed, slope = _line(load, seconds, has_fixed)
        if slope <= 0.0:
            continue
        residual = (fixed + slope * load) / seconds - 1.0
        error = float(residual @ residual)
        if best is None or error < best[0] * (1.0 - EQUAL):
            best = (error, ratio, fixed, slope)
    if best is None:
        raise ValueError("measured time does not grow with bytes or operations")
    _, ratio, fixed, slope = best
    load = np.maximum(num_bytes, ratio * flops)
    fitted = fixed + slope * load
    off = np.abs(fitted / seconds - 1.0)
    around_mean = seconds - seconds.mean()
    total = float(around_mean @ around_mean)
    residual = seconds - fitted
    return RooflineFit(
        fixed_s=fixed,
        bytes_per_s=1.0 / slope,
        flops_per_s=1.0 / (slope * ratio),
        points=len(seconds),
        is_memory_bound=bool((num_bytes >= ratio * flops * (1.0 - EQUAL)).any()),
        is_compute_bound=bool((ratio * flops > num_bytes * (1.0 + EQUAL)).any()),
        r2=1.0 - float(residual @ residual) / total if total > 0.0 else 1.0,
        median_relative_error=float(np.median(off)),
        max_relative_error=float(off.max()),
        min_tokens=float(tokens.min()),
        max_tokens=float(tokens.max()),
    )


def _line(load: Floats, seconds: Floats, has_fixed: bool) -> tuple[float, float]:
    """(intercept, slope), both >= 0, of relative least squares."""
    x, one = load / seconds, 1.0 / seconds
    through_zero = float(x.sum()) / float(x @ x)
    spread = float(load.max()) - float(load.min())
    if not has_fixed or spread <= EQUAL * float(load.max()):
        return 0.0, through_zero
    scale = float(load.max())  # keeps the two columns alike in size
    design = np.column_stack([one * float(seconds.max()), x * float(seconds.max()) / scale])
    target = np.full(len(seconds), 1.0)
    found = np.linalg.lstsq(design, target, rcond=None)[0]
    fixed = float(found[0]) * float(seconds.max())
    slope = float(found[1]) * float(seconds.max()) / scale
    if fixed < 0.0:
        return 0.0, through_zero
    return fixed, slope
