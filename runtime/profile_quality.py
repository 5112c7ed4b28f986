"""How well fits describe what was measured, and when they mean nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.calibration_file import Calibration
from models.engine_profile import FitQuality
from models.roofline_fit import RooflineFit
from models.stage_fit import StageFit

Floats = NDArray[np.float64]

LEAST_R2: Final = 0.5
MOST_MEDIAN_ERROR: Final = 0.25
MOST_TRANSFER_ERROR: Final = 0.5


def problems(calibration: Calibration) -> list[str]:
    """What makes the numbers meaningless, if anything does."""
    assert calibration.engine is not None  # it has been made here
    found = []
    for name, fit in calibration.engine.fits.items():
        is_transfer = fit.unit == "bytes"
        most = MOST_TRANSFER_ERROR if is_transfer else MOST_MEDIAN_ERROR
        if fit.median_relative_error > most:
            found.append(
                f"{name}: the fit is off by {100 * fit.median_relative_error:.0f} % in the median, "
                f"at most {100 * most:.0f} % is sound"
            )
        elif fit.r2 < LEAST_R2 and not is_transfer:
            found.append(f"{name}: R2 is {fit.r2:.2f}, at least {LEAST_R2} is sound")
    for stage, line in calibration.fits.items():
        if line.slope_s == 0.0:
            found.append(f"{stage} stage: {line.warning}")
    return found


def quality_of(fitted: Floats, measured: Floats, load: Floats, unit: str) -> FitQuality:
    """Of fitted seconds [n] against measured ones, over a load [n] counted in ``unit``."""
    off = np.abs(fitted / measured - 1.0)
    residual, around = measured - fitted, measured - measured.mean()
    total = float(around @ around)
    return FitQuality(
        points=len(measured),
        r2=1.0 - float(residual @ residual) / total if total > 0.0 else 1.0,
        median_relative_error=float(np.median(off)),
        max_relative_error=float(off.max()),
        unit=unit,
        min=float(load.min()),
        max=float(load.max()),
    )


def roofline_quality(fit: RooflineFit) -> FitQuality:
    """Of a roofline, with a warning where only one roof was met."""
    warning = None
    if not fit.is_compute_bound:
        warning = "no measured step was bound by arithmetic; larger ones may be"
    elif not fit.is_memory_bound:
        warning = "no measured step was bound by memory"
    return FitQuality(
        points=fit.points,
        r2=fit.r2,
        median_relative_error=fit.median_relative_error,
        max_relative_error=fit.max_relative_error,
        unit="tokens",
        min=fit.min_tokens,
        max=fit.max_tokens,
        warning=warning,
    )


def line_quality(line: StageFit, load: Floats, seconds: Floats) -> FitQuality:
    """Of a line in bytes, with its own warning."""
    quality = quality_of(line.slope_s * load + line.intercept_s, seconds, load, "bytes")
    return replace(quality, warning=line.warning)
