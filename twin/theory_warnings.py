"""What a reader of the closed forms must know beside the numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from models.calibration_file import Calibration
from models.stage_fit import WARN_RELATIVE_ERROR
from models.workload_settings import ParetoLengths

if TYPE_CHECKING:
    from twin.theory import Theory

BALANCING = ("least_token_load", "power_of_two")


def theory_warnings(theory: Theory) -> list[str]:
    """What a reader of the numbers must know."""
    warnings = list(theory.moments.warnings)
    warnings += [f"trace: {note}" for note in theory.workload.notes]
    warnings += _cut_tail(theory)
    settings = theory.scenario.attention_ffn
    if "r_max" in theory.decision.binding:
        warnings.append(
            f"the best ratio found is the largest one allowed (r_max = {theory.limits.r_max}); "
            "a larger r_max may be better"
        )
    if (
        settings.max_tpot_s is not None
        and theory.deciding.tpot_s[theory.r - 1] > settings.max_tpot_s
    ):
        warnings.append(
            f"r = {theory.r} was given but needs {theory.deciding.tpot_s[theory.r - 1]:.4g} s per "
            f"output token, above max_tpot_s = {settings.max_tpot_s:g}"
        )
    routing = theory.scenario.routing.attention_worker
    if theory.scenario.run.mode == "saturated" and routing != "random":
        warnings.append(
            f"theory assumes random refill of free slots; {routing} "
            + ("does better by design" if routing in BALANCING else "differs by design")
        )
    calibration = theory.calibration
    if settings.num_layers is None and calibration is not None and calibration.num_layers == 1:
        warnings.append(
            f"{calibration.name}: calibrated for one layer and num_layers is not given: tokens per "
            "second and TPOT are those of one layer (set attention_ffn.num_layers)"
        )
    if calibration is None and settings.num_layers is None:
        warnings.append(
            "num_layers is not given: tokens per second and TPOT are those of one layer "
            "(set attention_ffn.num_layers)"
        )
    warnings += calibration_warnings(theory)
    return warnings


def _cut_tail(theory: Theory) -> list[str]:
    """Where a power law ends before the cap that was asked for."""
    law = theory.scenario.workload.lengths
    if not isinstance(law, ParetoLengths):
        return []
    longest = int(theory.workload.lengths.output_tokens.max())
    if longest >= law.cap_tokens:
        return []
    return [
        f"pareto: the law is cut into quantiles and ends at {longest:,} output tokens; longer "
        f"requests are left out, and cap_tokens = {law.cap_tokens:,} has no effect"
    ]


def kv_warning(theory: Theory, fullest_tokens: float) -> list[str]:
    """What the twin met where a KV capacity is set: its workers do not run out of memory.

    Args:
        theory: Gives capacity and microbatches.
        fullest_tokens: Largest load of one worker in one microbatch during the simulation.
    """
    capacity = theory.limits.kv_capacity_tokens
    if capacity is None:
        return []
    held = theory.bundle.microbatches * fullest_tokens
    verdict = "above it, without preempting" if held > capacity else "within it"
    return [
        f"kv_capacity_tokens = {capacity:,} limits B; simulated workers do not enforce it: the "
        f"fullest held up to {held:,.0f} tokens, {verdict}"
    ]


def calibration_warnings(theory: Theory) -> list[str]:
    """Stages that fit badly, and loads and batches of this run that were never measured."""
    from models.calibration import outside_range

    calibration = theory.calibration
    if calibration is None:
        return []
    batch = theory.bundle.batch_per_worker
    spread = 3.0 * theory.moments.nu_tokens * math.sqrt(batch)
    mean = batch * theory.moments.theta_tokens
    asked = {
        "attention": np.asarray([max(0.0, mean - spread), mean + spread]),
        "ffn": np.asarray([float(theory.r * batch)]),
    }
    found = fit_warnings(calibration)
    for stage, values in asked.items():
        share = outside_range(calibration, stage, values)
        if share is None:
            found.append(f"{calibration.name}: no calibrated range known for {stage}")
        elif share > 0:
            found.append(
                f"{calibration.name}: {stage} is used outside its calibrated range "
                f"(this run: {_span(values)} tokens)"
            )
    return found


def fit_warnings(calibration: Calibration) -> list[str]:
    """Stages whose measured times are not a line in their load."""
    found = []
    for stage, fit in calibration.fits.items():
        if fit.warning:
            found.append(f"{calibration.name}: {stage}: {fit.warning}")
        elif fit.max_relative_error > WARN_RELATIVE_ERROR:
            found.append(
                f"{calibration.name}: {stage}: the line is off by up to "
                f"{100.0 * fit.max_relative_error:.0f} % from what was measured"
            )
    return found


def _span(values: NDArray[np.float64]) -> str:
    low, high = f"{values.min():,.0f}", f"{values.max():,.0f}"
    return low if low == high else f"{low} to {high}"
