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
    beyond_ratios,
    exact_law,
    predict,
    predict_all,
    slot_moments,
)
from models.bundle import Bundle
from models.calibration import Calibration, load_calibration
from models.scenario import Scenario
from models.workload import ResolvedWorkload, workload_summary
from policies.catalog import PROVISIONING
from policies.provisioning import (
    MAX_AUTO_RATIO,
    ProvisionBundle,
    ProvisioningLimits,
    automatic_r_max,
    batch_limit_of,
)
from traces.decisions import DecisionLog
from twin.theory_warnings import theory_warnings

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
        optima: Level name -> prediction around its own best ratio: the one of ``levels``, or one
            over ratios beyond where ``ratios`` ends too early and its end was not asked for.
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
    optima: dict[str, LevelPrediction]
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
    given_r = None if isinstance(settings.r, str) else settings.r
    decision = policy.decide(
        workload.lengths, bundle, limits, choose_batch=choose_batch, given_r=given_r, now=0.0
    )
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
                "given_r": given_r,
            },
            decision,
            now=0.0,
        )
    bundle = dataclasses.replace(bundle, batch_per_worker=decision.batch_per_worker)
    r = decision.attention_per_ffn if given_r is None else given_r
    moments = slot_moments(workload.lengths)
    r_max = limits.r_max or max(automatic_r_max(workload.lengths, bundle, moments), r)
    r_limit = r_max if limits.r_max is not None else MAX_AUTO_RATIO
    limits = dataclasses.replace(limits, r_max=r_max)
    ratios = np.arange(1, r_max + 1)
    load = exact_law(workload.lengths, bundle.batch_per_worker)
    levels = predict_all(workload.lengths, bundle, ratios, load=load)
    optima = levels
    if r_limit > r_max:
        optima = {
            name: beyond_ratios(
                workload.lengths, bundle, level, r_limit=r_limit, load=load, moments=moments
            )
            for name, level in levels.items()
        }
    return Theory(
        scenario=scenario,
        workload=workload,
        calibration=calibration,
        bundle=bundle,
        limits=limits,
        moments=moments,
        load=load,
        ratios=ratios,
        levels=levels,
        optima=optima,
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
    level, optimum = theory.levels[name], theory.optima[name]
    at = int(np.flatnonzero(optimum.ratios == optimum.r)[0])
    layers = theory.bundle.num_layers
    return {
        "r": optimum.r,
        "r_real": optimum.r_real if math.isfinite(optimum.r_real) else None,
        "regime": optimum.regime,
        "cycle_s": float(optimum.cycle_s[at]),
        "throughput_per_instance": float(optimum.throughput_per_instance[at]),
        "tokens_per_s_per_instance": float(optimum.throughput_per_instance[at]) / layers,
        "tpot_s": float(optimum.tpot_s[at]),
        "attention_idle": float(optimum.attention_idle[at]),
        "ffn_idle": float(optimum.ffn_idle[at]),
        "regret": _level_regret(theory, optimum.r),
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


def _level_regret(theory: Theory, r: int) -> float:
    """Share of throughput lost at r by the exact level, r drawn or not."""
    exact, optimum = theory.levels["exact"], theory.optima["exact"]
    best = float(optimum.throughput_per_instance.max())
    if r <= len(theory.ratios):
        ours = float(exact.throughput_per_instance[r - 1])
    else:
        ours = float(
            predict(
                theory.workload.lengths,
                theory.bundle,
                [r],
                level="exact",
                load=theory.load,
                moments=theory.moments,
            ).throughput_per_instance[0]
        )
    return max(0.0, 1.0 - ours / best)


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
        "misses_limit_high": decision.misses_limit_high,
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
    """The best ratio within the limits if the microbatches were served the other way.

    ``r`` is None where that way cannot meet ``misses``, one of the limits.
    """
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
    answer = {
        "semantics": other.semantics,
        "microbatches": other.microbatches,
        "level": level,
        "r": None,
        "throughput_per_instance": None,
        "tpot_s": float(found.tpot_s.min()),
        "misses": None,
    }
    limit_s = theory.limits.max_tpot_s
    allowed = np.ones(len(found.ratios), np.bool_) if limit_s is None else found.tpot_s <= limit_s
    if other.batch_per_worker > batch_limit_of(theory.moments, other.microbatches, theory.limits):
        return answer | {"misses": "kv_capacity_tokens"}
    if not bool(allowed.any()):
        return answer | {"misses": "max_tpot_s"}
    at = int(np.argmax(np.where(allowed, found.throughput_per_instance, -np.inf)))
    return answer | {
        "r": int(found.ratios[at]),
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
