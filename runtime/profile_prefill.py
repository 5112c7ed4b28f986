"""Prefill of one sequence as the prefix cache's cost model has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.engine_profile import FitQuality, PrefillMeasured, StepMeasured
from models.llm_parameters import count_parameters
from models.llm_shape import AttentionShape, LlmShape
from models.prefix_costs import PrefillCost
from models.roofline_fit import MIN_POINTS, fit_roofline

WEIGHT_BYTES = 2
LEAST_MFU = 0.01


def fit_prefill(
    shape: LlmShape, steps: Sequence[StepMeasured], peak_flops_per_s: float
) -> tuple[PrefillMeasured | None, FitQuality | None]:
    """Rate of arithmetic and fixed seconds from steps of one sequence with several new tokens.

    Returns:
        None, None where fewer than three such steps were measured, or time does not grow.
    """
    chosen = [step for step in steps if step.sequences == 1 and step.added > 1]
    if len(chosen) < MIN_POINTS:
        return None, None
    counts = count_parameters(shape)
    first = shape.layers[0].attention
    heads, head_dim = (
        (first.num_heads, first.head_dim) if isinstance(first, AttentionShape) else (0, 0)
    )
    cost = PrefillCost(
        parameters=counts.active,
        layers=len(shape.layers),
        heads=heads,
        head_dim=head_dim,
        weight_bytes=WEIGHT_BYTES * counts.total,
        flops_per_s=1.0,
        mfu=1.0,
        memory_bytes_per_s=1.0,
    )
    flops = np.array([cost.compute_s(step.added, step.held) for step in chosen])
    seconds = np.array([step.seconds for step in chosen])
    tokens = np.array([float(step.added) for step in chosen])
    weights = np.full(len(chosen), float(WEIGHT_BYTES * counts.total))
    try:
        fit = fit_roofline(weights, flops, seconds, tokens)
    except ValueError:
        return None, None
    quality = FitQuality(
        points=fit.points,
        r2=fit.r2,
        median_relative_error=fit.median_relative_error,
        max_relative_error=fit.max_relative_error,
        unit="tokens",
        min=fit.min_tokens,
        max=fit.max_tokens,
        warning=None if fit.is_compute_bound else "no measured prompt was bound by arithmetic",
    )
    mfu = min(1.0, max(LEAST_MFU, fit.flops_per_s / peak_flops_per_s))
    measured = PrefillMeasured(mfu=mfu, forward_s=fit.fixed_s, memory_bytes_per_s=fit.bytes_per_s)
    return measured, quality
