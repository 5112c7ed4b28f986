"""From measured seconds to a calibration: fits in the twin's own bytes and operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.calibration_file import Calibration
from models.engine_profile import (
    EngineProfile,
    FitQuality,
    Provenance,
    StepMeasured,
    StepRatesMeasured,
    TierMeasured,
)
from models.hardware_settings import FULL_BITS, OwnDevice
from models.llm_shape import LlmShape
from models.roofline_fit import RooflineFit, fit_roofline
from models.stage_fit import StageFit, fit_stage
from models.step_counts import StepCounts
from runtime.profile_clock import ProfileError
from runtime.profile_loads import loads_of, reference_bits, values_of
from runtime.profile_prefill import fit_prefill
from runtime.profile_quality import line_quality, quality_of, roofline_quality
from runtime.profile_stages import fit_stages
from runtime.profile_tiers import TierTimes

Floats = NDArray[np.float64]

LEAST_SHARE: Final = 1e-3
"""Of ``[hardware]``; below it a part is not limited by what its fit says."""
RATES: Final = 400
CACHE_GAIN: Final = 20.0
"""Reading is at most so many times faster than a large copy; beyond, it is not what takes time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """Everything that was measured.

    Attributes:
        shape: Of the model.
        kv_value_bytes: Of a cached number.
        steps: Medians.
        overhead: (sequences, seconds) of a step less its forward pass.
        copy_bytes_per_s, flops_per_s, memory_bytes: Of the machine.
        job_bytes, job_s: [n] page copies beside the computation.
        tiers: Place -> its times.
        provenance: Of all.
        name: Of the calibration.
    """

    shape: LlmShape
    kv_value_bytes: int
    steps: Sequence[StepMeasured]
    overhead: Sequence[tuple[int, float]]
    copy_bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    job_bytes: Floats
    job_s: Floats
    provenance: Provenance
    name: str
    tiers: Mapping[str, TierTimes] = field(default_factory=dict)


def calibration_of(measured: Measured) -> Calibration:
    """Fit everything.

    Raises:
        ProfileError: If a part cannot be fitted at all, naming it.
    """
    counts = StepCounts(measured.shape, kv_value_bytes=measured.kv_value_bytes)
    reference = reference_bits(measured.steps)
    steps = [step for step in measured.steps if step.bits == reference]
    loads = loads_of(counts, steps)
    ones = np.ones(len(steps))
    attention = _roofline(
        "attention",
        loads.kv_bytes,
        loads.attention_flops,
        values_of(steps, "attention_s"),
        loads.tokens,
    )
    dense_s = (
        values_of(steps, "seconds")
        - values_of(steps, "attention_s")
        - values_of(steps, "experts_s")
    )
    dense = _roofline("dense", ones * counts.dense_bytes, loads.dense_flops, dense_s, loads.tokens)
    fits = {"attention": attention, "dense": dense}
    widths: dict[int, float] = {}
    if counts.expert_flops:
        experts = _roofline(
            "experts",
            loads.expert_bytes,
            loads.expert_flops,
            values_of(steps, "experts_s"),
            loads.tokens,
        )
        fits["experts"] = experts
        widths = _width_rates(counts, measured.steps, experts)
    peak_bytes, peak_flops = _peaks(measured, fits, widths)
    link = _line("copies", measured.job_bytes, measured.job_s)
    layers = len(measured.shape.layers)
    fixed_s = sum(fit.fixed_s for fit in fits.values())
    overhead_s = float(np.mean([seconds for _, seconds in measured.overhead]))
    rates = StepRatesMeasured(
        dense_share=_share(dense.bytes_per_s, peak_bytes),
        attention_share=_share(attention.bytes_per_s, peak_bytes),
        compute_share=_share(dense.flops_per_s, peak_flops),
        attention_compute_share=_share(attention.flops_per_s, peak_flops),
        expert_compute_share=(
            _share(fits["experts"].flops_per_s, peak_flops) if "experts" in fits else None
        ),
        bandwidth_share={
            str(bits or FULL_BITS): _share(rate, peak_bytes) for bits, rate in widths.items()
        },
        launch_us=1e6 * fixed_s / layers,
        launches_per_layer=1.0,
        step_overhead_us=1e6 * overhead_s,
        copy_latency_us=1e6 * link.intercept_s,
    )
    qualities = {name: roofline_quality(fit) for name, fit in fits.items()}
    qualities |= _whole_steps(counts, measured.steps, rates, peak_bytes, peak_flops, layers)
    qualities["copies"] = line_quality(link, measured.job_bytes, measured.job_s)
    prefill, prefill_quality = fit_prefill(measured.shape, steps, peak_flops)
    if prefill is not None and prefill_quality is not None:
        qualities["prefill"] = prefill_quality
        peak_flops = max(peak_flops, prefill.mfu * peak_flops)
    tiers = {}
    for name, times in measured.tiers.items():
        tiers[name], quality = _tier(name, times)
        qualities |= quality
    profile = EngineProfile(
        device=OwnDevice(
            name=f"{measured.provenance.cpu}, {measured.provenance.threads} thread(s)",
            memory_bytes=measured.memory_bytes,
            copy_bytes_per_s=peak_bytes,
            link_bytes_per_s=_rate(link),
            flops_per_s=peak_flops,
            source="measured by runtime profile",
        ),
        rates=rates,
        prefill=prefill,
        tiers=tiers,
        fits=qualities,
        provenance=measured.provenance,
        steps=tuple(measured.steps),
    )
    coefficients, stages, notes = fit_stages(steps, layers)
    return Calibration(
        name=measured.name,
        coefficients=coefficients,
        num_layers=layers,
        device=profile.device.name,
        model=measured.shape.name,
        source=f"runtime profile, {measured.provenance.clock} time",
        fits=stages,
        notes=(*notes, *_notes(measured, reference)),
        engine=profile,
    )


def _roofline(
    part: str, num_bytes: Floats, flops: Floats, seconds: Floats, tokens: Floats
) -> RooflineFit:
    try:
        return fit_roofline(num_bytes, flops, seconds, tokens)
    except ValueError as error:
        raise ProfileError(f"{part}: cannot be fitted: {error}") from error


def _width_rates(
    counts: StepCounts, steps: Sequence[StepMeasured], experts: RooflineFit
) -> dict[int, float]:
    """Width -> bytes per second, with the fixed part and the arithmetic of the reference width."""
    found = {}
    for bits in sorted({step.bits for step in steps}):
        here = [step for step in steps if step.bits == bits]
        loads, seconds = loads_of(counts, here), values_of(here, "experts_s")
        compute_s = loads.expert_flops / experts.flops_per_s
        guess = loads.expert_bytes / seconds
        rates = np.geomspace(float(guess.min()) / 2.0, float(guess.max()) * 20.0, RATES)
        fitted = experts.fixed_s + np.maximum(loads.expert_bytes / rates[:, None], compute_s)
        error = ((fitted / seconds - 1.0) ** 2).sum(axis=1)
        found[bits] = float(rates[int(np.argmin(error))])
    return found


def _peaks(
    measured: Measured, fits: Mapping[str, RooflineFit], widths: Mapping[int, float]
) -> tuple[float, float]:
    """The device's bytes and operations per second: no part that binds is faster than it.

    Weights that lie in a processor's caches are read faster than a large copy goes.
    """
    bytes_per_s = [measured.copy_bytes_per_s, *widths.values()]
    flops_per_s = [measured.flops_per_s]
    for fit in fits.values():
        if fit.is_memory_bound and fit.bytes_per_s < CACHE_GAIN * measured.copy_bytes_per_s:
            bytes_per_s.append(fit.bytes_per_s)
        if fit.is_compute_bound:
            flops_per_s.append(fit.flops_per_s)
    return max(bytes_per_s), max(flops_per_s)


def _share(rate: float, peak: float) -> float:
    return min(1.0, max(LEAST_SHARE, rate / peak))


def _whole_steps(
    counts: StepCounts,
    steps: Sequence[StepMeasured],
    rates: StepRatesMeasured,
    peak_bytes: float,
    peak_flops: float,
    layers: int,
) -> dict[str, FitQuality]:
    """How far whole forward passes are from what the twin will make of the rates."""
    loads, measured = loads_of(counts, steps), values_of(steps, "seconds")
    compute = rates.compute_share * peak_flops
    dense = np.maximum(
        counts.dense_bytes / (rates.dense_share * peak_bytes), loads.dense_flops / compute
    )
    attention = np.maximum(
        loads.kv_bytes / (rates.attention_share * peak_bytes),
        loads.attention_flops / ((rates.attention_compute_share or 1.0) * peak_flops),
    )
    fitted = dense + attention + 1e-6 * rates.launch_us * layers
    if rates.expert_compute_share is not None:
        share = np.array([rates.bandwidth_share[str(step.bits or FULL_BITS)] for step in steps])
        fitted = fitted + np.maximum(
            loads.expert_bytes / (share * peak_bytes),
            loads.expert_flops / (rates.expert_compute_share * peak_flops),
        )
    decoding = np.array([step.added == 1 for step in steps])
    found = {"steps": quality_of(fitted, measured, loads.tokens, "tokens")}
    if decoding.any():
        found["decode steps"] = quality_of(
            fitted[decoding], measured[decoding], loads.tokens[decoding], "tokens"
        )
    return found


def _line(part: str, load: Floats, seconds: Floats) -> StageFit:
    try:
        return fit_stage(load, seconds, "bytes")
    except ValueError as error:
        raise ProfileError(f"{part}: cannot be fitted: {error}") from error


def _rate(line: StageFit) -> float:
    """Bytes per second; where time does not grow with bytes, that of the largest call."""
    if line.slope_s > 0.0:
        return 1.0 / line.slope_s
    return line.max_load / line.intercept_s


def _tier(name: str, times: TierTimes) -> tuple[TierMeasured, dict[str, FitQuality]]:
    load_bytes = np.array(times.load_bytes)
    load_s, save_s = np.array(times.load_s), np.array(times.save_s)
    load = _line(f"{name}: loads", load_bytes, load_s)
    save = _line(f"{name}: saves", load_bytes, save_s)
    tier = TierMeasured(
        load_bytes_per_s=_rate(load),
        save_bytes_per_s=_rate(save),
        load_request_s=load.intercept_s if load.slope_s > 0.0 else 0.0,
        save_request_s=save.intercept_s if save.slope_s > 0.0 else 0.0,
        lookup_s=times.lookup_s,
    )
    return tier, {
        f"{name} load": line_quality(load, load_bytes, load_s),
        f"{name} save": line_quality(save, load_bytes, save_s),
    }


def _notes(measured: Measured, reference: int) -> list[str]:
    notes = ["Nothing goes over a network between attention and FFN: transfers take no time."]
    if reference:
        notes.append(f"FFN seconds are those of experts at {reference} bits.")
    if measured.kv_value_bytes != 2:
        notes.append(
            f"Keys and values were {measured.kv_value_bytes} bytes a number: set "
            f"llm.kv_value_bytes = {measured.kv_value_bytes} in scenarios."
        )
    overhead = [seconds for _, seconds in measured.overhead]
    if max(overhead) > 1.5 * max(min(overhead), math.ulp(1.0)):
        least, most = 1e6 * min(overhead), 1e6 * max(overhead)
        notes.append(
            f"Scheduling and sampling took {least:.0f} to {most:.0f} us a step; their mean is used."
        )
    return notes
