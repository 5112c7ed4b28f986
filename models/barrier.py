"""Expected cycle time where every cycle waits for the slowest attention worker.

tau = max(alpha_A max_j T_j + beta_A, t_C, t_F). With G = max(t_C, t_F) its mean is
G + alpha_A E[(max_j T_j - x)+], x the load at which attention takes G.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from models.bundle import Bundle
from models.mean_field import mean_attention_s, stage_lines
from models.order_statistics import FloatArray, WorkerLoadLaw, kappa, normal_excess


def other_stages_s(bundle: Bundle, ratios: ArrayLike) -> FloatArray:
    """[n] G = max(t_C, t_F): what a cycle lasts when attention is fast."""
    _, communication, ffn = stage_lines(bundle, 0.0)[:3]
    return np.maximum(communication.at(ratios), ffn.at(ratios))


def law_cycle_s(bundle: Bundle, law: WorkerLoadLaw, ratios: ArrayLike) -> FloatArray:
    """[n] expected cycle time for any law of the worker load.

    Args:
        bundle: Latency model and settings.
        law: Load of one worker: its B slots of one microbatch.
        ratios: [n] r > 0, need not be whole.
    """
    c = bundle.coefficients
    other = other_stages_s(bundle, ratios)
    if c.alpha_attention == 0.0:
        return np.maximum(other, c.beta_attention)
    threshold = (other - c.beta_attention) / c.alpha_attention
    return other + c.alpha_attention * law.expected_excess(threshold, ratios)


def law_cycle_sd_s(bundle: Bundle, law: WorkerLoadLaw, ratio: float) -> float:
    """Standard deviation of one cycle's time, for any law of the worker load.

    With g = max(alpha_A max T + beta_A, G): E[(g - G)^2] = alpha_A^2 int 2 (x - x_G)+ (1 - F^r) dx.

    Args:
        bundle: Latency model and settings.
        law: Load of one worker.
        ratio: r > 0.
    """
    alpha = bundle.coefficients.alpha_attention
    if alpha == 0.0:
        return 0.0
    other = float(other_stages_s(bundle, [ratio])[0])
    threshold = (other - bundle.coefficients.beta_attention) / alpha
    from_threshold = law.grid_tokens - max(threshold, law.start_tokens)
    lower = np.maximum(from_threshold, 0.0)
    upper = np.maximum(from_threshold + law.step_tokens, 0.0)
    above = 1.0 - law.cdf**ratio
    mean = float((upper - lower) @ above)
    square = float((upper * upper - lower * lower) @ above)
    return alpha * math.sqrt(max(0.0, square - mean * mean))


def gaussian_cycle_s(
    bundle: Bundle, theta_tokens: float, nu_tokens: float, ratios: ArrayLike
) -> FloatArray:
    """[n] expected cycle time for normal worker loads: G + sigma_A int_z0 (1 - Phi^r).

    Source:
        arXiv 2601.21351 v4: the maximum stays inside the expectation.
    """
    mean_s = mean_attention_s(bundle, theta_tokens)
    sigma_s = _attention_sd_s(bundle, nu_tokens)
    other = other_stages_s(bundle, ratios)
    if sigma_s == 0.0:
        return np.maximum(other, mean_s)
    return other + sigma_s * normal_excess((other - mean_s) / sigma_s, ratios)


def plug_in_cycle_s(
    bundle: Bundle, theta_tokens: float, nu_tokens: float, ratios: ArrayLike
) -> FloatArray:
    """[n] max(alpha_A E[max T] + beta_A, G) for normal worker loads.

    Cheaper than ``gaussian_cycle_s`` and too small near the crossing of attention and FFN, where
    it picks r too large.
    """
    r = np.asarray(ratios, dtype=np.float64)
    spread = np.asarray([kappa(x) for x in r.tolist()])
    slowest = mean_attention_s(bundle, theta_tokens) + _attention_sd_s(bundle, nu_tokens) * spread
    return np.maximum(slowest, other_stages_s(bundle, r))


def gaussian_expected_maximum(
    theta_tokens: float, nu_tokens: float, batch_per_worker: int, r: float
) -> float:
    """E[max of r worker loads] = B theta + kappa_r nu sqrt(B) for normal loads, in tokens."""
    spread = kappa(r) * nu_tokens * math.sqrt(batch_per_worker)
    return batch_per_worker * theta_tokens + spread


def _attention_sd_s(bundle: Bundle, nu_tokens: float) -> float:
    spread = nu_tokens * math.sqrt(bundle.batch_per_worker)
    return bundle.coefficients.alpha_attention * spread
