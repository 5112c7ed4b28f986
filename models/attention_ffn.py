"""How many attention workers per FFN server: one prediction at four levels of theory.

``mean_field`` gives every worker the mean load; ``gaussian`` is the paper's barrier with normal
loads; ``pearson3`` adds their skew; ``exact`` knows the whole law. This is the face of the theory:
callers import from here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from models.cold_start import (
    cold_start_load,
    geometric_horizon_load,
    horizon_load,
    settling_steps,
)
from models.constraints import kv_tokens_needed, largest_batch, ratios_within
from models.level_prediction import LEVELS, LevelPrediction, beyond_ratios, predict, predict_all
from models.level_trust import gaussian_trust, recommended_level
from models.live_slots import LoadEstimate, censored_load, census_load
from models.mean_field import MeanFieldOptimum, optimum
from models.order_statistics import WorkerLoadLaw, kappa
from models.pingpong import fixed_period
from models.slot_load import (
    HeavyTailError,
    SlotMoments,
    required_requests,
    required_steps,
    slot_moments,
)
from models.worker_load import exact_law

__all__ = [
    "LEVELS",
    "HeavyTailError",
    "LevelPrediction",
    "LoadEstimate",
    "MeanFieldOptimum",
    "SlotMoments",
    "WorkerLoadLaw",
    "beyond_ratios",
    "censored_load",
    "census_load",
    "cold_start_load",
    "exact_law",
    "fixed_period",
    "gaussian_trust",
    "geometric_horizon_load",
    "horizon_load",
    "kappa",
    "kv_tokens_needed",
    "largest_batch",
    "optimum",
    "predict",
    "predict_all",
    "ratios_within",
    "recommended_level",
    "regret",
    "regrets",
    "required_requests",
    "required_steps",
    "settling_steps",
    "slot_moments",
]


def regret(reference: LevelPrediction, r: int) -> float:
    """Share of throughput lost by deploying r instead of the reference's best ratio.

    Raises:
        ValueError: If r is not among the reference's ratios.
    """
    at = np.flatnonzero(reference.ratios == r)
    if len(at) == 0:
        raise ValueError(f"r = {r} is not among the {len(reference.ratios)} ratios predicted")
    x = reference.throughput_per_instance
    return max(0.0, 1.0 - float(x[at[0]]) / float(x.max()))


def regrets(predictions: Mapping[str, LevelPrediction]) -> dict[str, float]:
    """Level -> regret of its best ratio, measured with the exact level."""
    return {name: regret(predictions["exact"], found.r) for name, found in predictions.items()}
