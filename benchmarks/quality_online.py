"""What online signals are worth: plans for one kind of text at a time.

The plan is made from an offline calibration (of all kinds of text, or of one kind that is *not*
served), then corrected by what the served kind's prompts show: routing mass, prompt heads. The
prompts are held-out text that is not judged; the judged text comes after. "Bits fixed at start" is
the plan of the calibration alone: no movement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from quality_model import BITS, Increase, MixedPrecisionModel, sequence_losses
from quality_plans import planned

from models.prompt_heads import FeatureMap, PromptHeads, damage_targets, fit_feature_map
from models.prompt_heads import fit_prompt_heads as fit_heads
from models.routing_mass import RoutingMass, floor_bits, mass_multipliers
from runtime.calibration_prompts import PromptStatistics, prompt_statistics
from runtime.calibration_stats import CalibrationStats

REFERENCE_BITS = 3
HALF_LIFE_TOKENS = 1024.0


@dataclass(frozen=True)
class Calibrated:
    """An offline calibration, its damage table and heads fitted on prompts of the same text."""

    stats: CalibrationStats
    damage: np.ndarray
    feature_map: FeatureMap
    heads: PromptHeads


def observed_prompts(
    mixed: MixedPrecisionModel, stats: CalibrationStats, prompts: list[torch.Tensor]
) -> PromptStatistics:
    """Statistics of single prompts with damage at the reference width."""
    mixed.hold(16)
    level = BITS.index(REFERENCE_BITS)
    errors = [
        mixed.weights(b) - mixed.rows[b].reconstruct(BITS[level]).astype(np.float32)
        for b in range(mixed.num_blocks)
    ]
    rows = [stats.row_weight(*mixed.place(b)) for b in range(mixed.num_blocks)]
    return prompt_statistics(
        mixed.model,
        mixed.layers,
        prompts,
        weight_error=lambda b: errors[b],
        row_weight=lambda b: rows[b],
    )


def fit_on_prompts(seen: PromptStatistics, features: int = 16) -> tuple[FeatureMap, PromptHeads]:
    """Heads on the prompts' damages against the damage over all of them."""
    mass = np.repeat(seen.squared_gate_sum.reshape(len(seen.tokens), -1), 2, axis=1)
    known = np.where(np.isfinite(seen.damage), seen.damage, 0.0)
    total = (mass * known).sum(0) / np.maximum(mass.sum(0), 1e-30)
    targets = damage_targets(seen.damage, np.where(total > 0, total, 1.0))
    raw = seen.raw_features()
    feature_map = fit_feature_map(raw, features)
    return feature_map, fit_heads(feature_map(raw), targets)


def mass_now(stats: CalibrationStats, prompts: PromptStatistics) -> RoutingMass:
    """Routing mass after the served prompts, started from the calibration's."""
    layers, experts = stats.layers, stats.experts
    start = tuple(
        np.array([[get(layer, e) for e in range(experts)] for layer in range(layers)])
        for get in (stats.first_mass, stats.mass)
    )
    mass = RoutingMass(layers, experts, half_life_tokens=HALF_LIFE_TOKENS, start=start)
    for p, tokens in enumerate(prompts.tokens):
        for layer in range(layers):
            mass.observe_sums(
                layer, prompts.gate_sum[p, layer], prompts.squared_gate_sum[p, layer], int(tokens)
            )
    return mass


def corrections(
    calibrated: Calibrated, prompts: PromptStatistics
) -> dict[str, dict[str, np.ndarray | None]]:
    """Arguments of the planner for every set of online signals."""
    stats = calibrated.stats
    mass = mass_now(stats, prompts)
    layers, experts = range(stats.layers), range(stats.experts)
    then = np.array([[stats.mass(layer, e) for e in experts] for layer in layers])
    by_mass = np.repeat(mass_multipliers(mass.m2, then).ravel(), 2)
    features = calibrated.feature_map(prompts.raw_features())
    by_prompt = calibrated.heads.multipliers(features, np.ones(len(features)))
    return {
        "bits fixed at start": {},
        "routing mass": {"multiplier": by_mass},
        "prompt heads": {"multiplier": by_prompt},
        "routing mass and prompt heads": {"multiplier": by_mass * by_prompt},
        "routing mass and hot floors": {
            "multiplier": by_mass,
            "floor_bits": np.repeat(floor_bits(mass.m1, hot_bits=3).ravel(), 2),
        },
    }


def per_kind(
    mixed: MixedPrecisionModel,
    table: np.ndarray,
    average_bits: float,
    kinds: dict[str, tuple[torch.Tensor, np.ndarray]],
    plan_for: Callable[[str], tuple[np.ndarray, dict[str, np.ndarray | None]]],
) -> Increase:
    """Loss over all kinds, each with the plan made for it.

    Args:
        mixed: The model.
        table: Bytes.
        average_bits: Budget.
        kinds: Name -> judged sequences and their losses at full precision.
        plan_for: Name -> damage table and further arguments of the planner.
    """
    losses, full = [], []
    for name, (text, base) in kinds.items():
        damage, arguments = plan_for(name)
        mixed.hold(planned(table, damage, average_bits, **arguments))
        losses.append(sequence_losses(mixed.model, text))
        full.append(base)
    return Increase(np.concatenate(losses), np.concatenate(full))
