"""The closed forms for a scenario: four levels of theory and the ratio to deploy."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.attention_ffn import (
    LEVELS,
    LevelPrediction,
    SlotMoments,
    WorkerLoadLaw,
    exact_law,
    predict,
    predict_all,
    slot_moments,
)
from models.bundle import Bundle
from models.calibration import Calibration, load_calibration
from models.scenario import Scenario
from policies.catalog import PROVISIONING
from policies.provisioning import ProvisionBundle, ProvisioningLimits, automatic_r_max
from traces.decisions import DecisionLog
from twin.workload import ResolvedWorkload, workload_summary

DEFAULT_CALIBRATION = "deepseek-v3-ascend-910c"


@dataclass(frozen=True, slots=True, kw_only=True)
class Theory:
    """Everything that needs no simulation.

    Attributes:
        scenario, workload: The question.
        calibration: Where the coefficients came from; None when the scenario gives them itself.
        bundle: The bundle with B resolved.
        limits: Constraints, with r_max resolved.
        moments: Slot load of the workload.
        load: Law of one worker's token load.
        ratios: 1..r_max.
        levels: Level name -> prediction over ``ratios``.
        decision: The provisioning policy's order.
        r: The ratio in use: the scenario's, or the decision's where it says ``auto``.
    """

    scenario: Scenario
    workload: ResolvedWorkload
    calibration: Calibration | None
    bundle: Bundle
    limits: ProvisioningLimits
    moments: SlotMoments
    load: WorkerLoadLaw
    ratios: NDArray[np.int64]
    levels: dict[str, LevelPrediction]
    decision: ProvisionBundle
    r: int

    @property
    def deciding(self) -> LevelPrediction:
        """The level of theory that decides in this scenario."""
        return self.levels[self.scenario.attention_ffn.level]

    def at(self, level: str, name: str, r: int) -> float:
        """One value of a level's curve at ratio r."""
        return float(getattr(self.levels[level], name)[r - 1])


def solve_theory(
    scenario: Scenario, workload: ResolvedWorkload, log: DecisionLog | None = None
) -> Theory:
    """Moments, four levels and the provisioning decision.

    Raises:
        InfeasibleError: If the constraints cannot be met.
        CalibrationError: If the named calibration cannot be loaded.
    """
    settings = scenario.attention_ffn
    calibration = None
    if settings.coefficients is not None:
        coefficients, num_layers = settings.coefficients.in_seconds(), 1
    else:
        calibration = load_calibration(settings.calibration or DEFAULT_CALIBRATION)
        coefficients, num_layers = calibration.coefficients, calibration.num_layers
    choose_batch = settings.batch_per_worker == "auto"
    batch = 1 if isinstance(settings.batch_per_worker, str) else settings.batch_per_worker
    bundle = scenario.bundle(coefficients, num_layers, batch)
    limits = ProvisioningLimits(
        r_max=None if isinstance(settings.r_max, str) else settings.r_max,
        max_tpot_s=settings.max_tpot_s,
        kv_capacity_tokens=settings.kv_capacity_tokens,
        kv_safety_z=settings.kv_safety_z,
    )
    policy = PROVISIONING[settings.level]()
    decision = policy.decide(workload.lengths, bundle, limits, choose_batch=choose_batch, now=0.0)
    if log is not None:
        log.policies["provisioning"] = {"kind": "provisioning", "name": settings.level}
        log.record(
            "provisioning",
            "decide",
            {
                "lengths": workload.lengths,
                "bundle": bundle,
                "limits": limits,
                "choose_batch": choose_batch,
            },
            decision,
            now=0.0,
        )
    bundle = dataclasses.replace(bundle, batch_per_worker=decision.batch_per_worker)
    r = decision.attention_per_ffn if isinstance(settings.r, str) else settings.r
    r_max = limits.r_max or max(automatic_r_max(workload.lengths, bundle), r)
    limits = dataclasses.replace(limits, r_max=r_max)
    ratios = np.arange(1, r_max + 1)
    load = exact_law(workload.lengths, bundle.batch_per_worker)
    return Theory(
        scenario=scenario,
        workload=workload,
        calibration=calibration,
        bundle=bundle,
        limits=limits,
        moments=slot_moments(workload.lengths),
        load=load,
        ratios=ratios,
        levels=predict_all(workload.lengths, bundle, ratios, load=load),
        decision=decision,
        r=r,
    )


def theory_summary(theory: Theory) -> dict[str, Any]:
    """JSON-ready answer of the closed forms; times in seconds, loads in tokens."""
    moments = theory.moments
    return {
        "workload": workload_summary(theory.workload),
        "theta_tokens": moments.theta_tokens,
        "theta_se": moments.theta_se,
        "nu_tokens": moments.nu_tokens,
        "skew": moments.skew,
        "theta_if_independent": moments.theta_if_independent,
        "bundle": bundle_summary(theory),
        "ratios": theory.ratios.tolist(),
        "levels": {name: _level_summary(theory, name) for name in LEVELS},
        "recommendation": recommendation_summary(theory),
        "other_semantics": _other_semantics(theory),
        "kv": _kv_summary(theory),
        "warnings": theory_warnings(theory),
    }


def bundle_summary(theory: Theory) -> dict[str, Any]:
    """The bundle and where its coefficients came from."""
    bundle, calibration = theory.bundle, theory.calibration
    return {
        "calibration": None if calibration is None else calibration.name,
        "device": None if calibration is None else calibration.device,
        "model": None if calibration is None else calibration.model,
        "coefficients_s": dataclasses.asdict(bundle.coefficients),
        "batch_per_worker": bundle.batch_per_worker,
        "semantics": bundle.semantics,
        "microbatches": bundle.microbatches,
        "one_way_s": bundle.one_way_time_s(theory.r) if bundle.semantics == "pingpong" else None,
        "num_layers": bundle.num_layers,
        "attention_price": bundle.attention_price,
        "ffn_price": bundle.ffn_price,
    }


def _level_summary(theory: Theory, name: str) -> dict[str, Any]:
    level = theory.levels[name]
    exact = theory.levels["exact"].throughput_per_instance
    at = level.r - 1
    layers = theory.bundle.num_layers
    return {
        "r": level.r,
        "r_real": level.r_real if math.isfinite(level.r_real) else None,
        "regime": level.regime,
        "cycle_s": float(level.cycle_s[at]),
        "throughput_per_instance": float(level.throughput_per_instance[at]),
        "tokens_per_s_per_instance": float(level.throughput_per_instance[at]) / layers,
        "tpot_s": float(level.tpot_s[at]),
        "attention_idle": float(level.attention_idle[at]),
        "ffn_idle": float(level.ffn_idle[at]),
        "regret": max(0.0, float(1.0 - exact[at] / exact.max())),
        "curve": {
            field: [float(v) for v in getattr(level, field)]
            for field in (
                "cycle_s",
                "throughput_per_instance",
                "attention_idle",
                "ffn_idle",
                "barrier_overhead",
                "tpot_s",
            )
        },
    }


def recommendation_summary(theory: Theory) -> dict[str, Any]:
    """The ratio in use, the best one, and what the difference costs."""
    decision, level = theory.decision, theory.deciding
    curve = level.throughput_per_instance
    best = decision.attention_per_ffn
    summary: dict[str, Any] = {
        "r": theory.r,
        "is_given": not isinstance(theory.scenario.attention_ffn.r, str),
        "best_r": best,
        "is_sampled": theory.moments.theta_se is not None,
        "level": decision.level,
        "batch_per_worker": decision.batch_per_worker,
        "throughput_per_instance": theory.at(level.level, "throughput_per_instance", theory.r),
        "cycle_s": theory.at(level.level, "cycle_s", theory.r),
        "tpot_s": theory.at(level.level, "tpot_s", theory.r),
        "barrier_overhead": theory.at(level.level, "barrier_overhead", theory.r),
        "attention_idle": theory.at(level.level, "attention_idle", theory.r),
        "ffn_idle": theory.at(level.level, "ffn_idle", theory.r),
        "regret": max(0.0, float(1.0 - curve[theory.r - 1] / curve[best - 1])),
        "binding": list(decision.binding),
    }
    for name in (
        "r_low",
        "r_high",
        "regret_low",
        "regret_high",
        "regret_one_less",
        "regret_one_more",
    ):
        value = getattr(decision, name)
        summary[name] = None if isinstance(value, float) and math.isnan(value) else value
    return summary


def _other_semantics(theory: Theory) -> dict[str, Any]:
    """The best ratio if the bundle's microbatches were served the other way."""
    is_barrier = theory.bundle.semantics == "barrier"
    other = dataclasses.replace(
        theory.bundle,
        semantics="pingpong" if is_barrier else "barrier",
        microbatches=max(2, theory.bundle.microbatches),
        one_way_s=None,
    )
    level = theory.deciding.level
    found = predict(
        theory.workload.lengths,
        other,
        theory.ratios,
        level=level,
        moments=theory.moments,
        load=theory.load,
    )
    at = found.r - 1
    return {
        "semantics": other.semantics,
        "microbatches": other.microbatches,
        "level": level,
        "r": found.r,
        "throughput_per_instance": float(found.throughput_per_instance[at]),
        "tpot_s": float(found.tpot_s[at]),
    }


def _kv_summary(theory: Theory) -> dict[str, Any]:
    """KV tokens that one attention worker holds, with what is kept free."""
    slots = theory.bundle.microbatches * theory.bundle.batch_per_worker
    mean = slots * theory.moments.theta_tokens
    spread = math.sqrt(slots) * theory.moments.nu_tokens
    return {
        "mean_tokens_per_worker": mean,
        "z": theory.limits.kv_safety_z,
        "needed_tokens_per_worker": mean + theory.limits.kv_safety_z * spread,
        "capacity_tokens_per_worker": theory.limits.kv_capacity_tokens,
    }


def theory_warnings(theory: Theory) -> list[str]:
    """What a reader of the numbers must know."""
    warnings = list(theory.moments.warnings)
    warnings += [f"trace: {note}" for note in theory.workload.notes]
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
    if theory.calibration is None and settings.num_layers is None:
        warnings.append(
            "num_layers is not given: tokens per second and TPOT are those of one layer "
            "(set attention_ffn.num_layers)"
        )
    warnings += calibration_warnings(theory)
    return warnings


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
    """Loads and batches of this run that the calibration never saw."""
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
    found = []
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


def _span(values: NDArray[np.float64]) -> str:
    low, high = f"{values.min():,.0f}", f"{values.max():,.0f}"
    return low if low == high else f"{low} to {high}"
