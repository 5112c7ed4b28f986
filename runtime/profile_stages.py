"""Attention and FFN of one layer as lines in their load: the coefficients of ``twin run``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.bundle import LatencyCoefficients
from models.engine_profile import StepMeasured
from models.stage_fit import StageFit, fit_stage
from runtime.profile_clock import ProfileError

Floats = NDArray[np.float64]


def fit_stages(
    steps: Sequence[StepMeasured], layers: int
) -> tuple[LatencyCoefficients, dict[str, StageFit], list[str]]:
    """Coefficients, their fits, and what a user should know.

    Attention seconds depend on the tokens of KV that are read and, through projections and norms,
    on the batch. A worker's batch is fixed in the twin, so the line in tokens is fitted to seconds
    brought to one batch, the geometric mean of those measured.

    Raises:
        ProfileError: If there are too few decode steps for a line.
    """
    decode = [step for step in steps if step.added == 1]
    batch = np.array([float(step.sequences) for step in decode])
    tokens = np.array([float(step.sequences * (step.held + 1)) for step in decode])
    attention = np.array([step.attention_block_s for step in decode]) / layers
    ffn = np.array([step.ffn_s for step in decode]) / layers
    if len(decode) < 4:
        raise ProfileError(f"attention: {len(decode)} decode step(s), at least 4 are needed")
    at_batch = float(np.exp(np.log(batch).mean()))
    by_batch = _batch_slope(tokens, batch, attention)
    corrected = np.maximum(attention - by_batch * (batch - at_batch), 1e-3 * attention)
    try:
        fits = {
            "attention": fit_stage(tokens, corrected, "tokens"),
            "ffn": fit_stage(batch, ffn, "batch"),
        }
    except ValueError as error:
        raise ProfileError(f"attention and FFN stages: {error}") from error
    coefficients = LatencyCoefficients(
        alpha_attention=fits["attention"].slope_s,
        beta_attention=fits["attention"].intercept_s,
        alpha_ffn=fits["ffn"].slope_s,
        beta_ffn=fits["ffn"].intercept_s,
    )
    note = f"Attention seconds are those of a batch of {at_batch:.1f} sequences a worker"
    if by_batch > 0.0:
        note += f"; each sequence more or less is {1e6 * by_batch:.3g} us a layer"
    return coefficients, fits, [note + "."]


def _batch_slope(
    tokens: Floats,
    batch: Floats,
    seconds: Floats,
) -> float:
    """Seconds of one more sequence at equal tokens, >= 0; least squares, residuals relative."""
    design = np.column_stack([np.ones(len(tokens)), tokens, batch]) / seconds[:, None]
    scale = np.abs(design).max(axis=0)
    found = np.linalg.lstsq(design / scale, np.ones(len(tokens)), rcond=None)[0] / scale
    return max(0.0, float(found[2])) if found[1] > 0.0 else 0.0
