"""Predictions of one bundle at each level of theory, over any ratios.

A level is a law of the worker load; semantics are what waiting does with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models import barrier, pingpong
from models.bundle import Bundle
from models.cold_start import horizon_load
from models.constraints import tpot_s
from models.level_trust import trust_warnings
from models.mean_field import (
    mean_attention_s,
    mean_field_cycle_s,
    optimum,
    stage_lines,
    throughput,
)
from models.order_statistics import FloatArray, WorkerLoadLaw
from models.slot_load import SlotMoments, slot_moments
from models.worker_load import exact_law, gaussian_law, pearson3_law
from traces.lengths import LengthPairs

LEVELS = ("mean_field", "gaussian", "pearson3", "exact")

SEARCH_POINTS = 33
SEARCH_ROUNDS = 2
SEARCH_LATTICE = 8192

CycleTimes = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPrediction:
    """What one level of theory says about every ratio.

    Attributes:
        level: ``mean_field``, ``gaussian``, ``pearson3`` or ``exact``.
        ratios: [n] int64, r as asked.
        cycle_s: [n] expected time of one microbatch period in one layer.
        throughput_per_instance: [n] X, tokens per second, layer and unit of price.
        attention_idle: [n] share of the cycle the mean attention worker waits.
        ffn_idle: [n] share of the cycle the FFN server waits.
        barrier_overhead: [n] cycle over that of mean loads, minus 1.
        tpot_s: [n] expected time per output token over all layers.
        r: Best of ``ratios``; the smaller of equals.
        r_real: Best real ratio. For ``mean_field`` over all r > 0 (may be infinite); else
            between the neighbours of ``r`` among ``ratios``.
        regime: Stage that takes longest at ``r``.
        warnings: Where this level should not be trusted.
    """

    level: str
    ratios: NDArray[np.int64]
    cycle_s: FloatArray
    throughput_per_instance: FloatArray
    attention_idle: FloatArray
    ffn_idle: FloatArray
    barrier_overhead: FloatArray
    tpot_s: FloatArray
    r: int
    r_real: float
    regime: str
    warnings: tuple[str, ...] = ()


def predict(
    lengths: LengthPairs,
    bundle: Bundle,
    ratios: Sequence[int] | NDArray[np.int64],
    *,
    level: str,
    load: WorkerLoadLaw | None = None,
    moments: SlotMoments | None = None,
    horizon_steps: int | None = None,
) -> LevelPrediction:
    """One level's prediction over ``ratios``.

    Args:
        lengths: Joint law of (P, D).
        bundle: Latency model, B, semantics, prices.
        ratios: [n] whole r >= 1.
        level: One of ``LEVELS``.
        load: ``exact_law(lengths, B)`` where the caller has it already.
        moments: ``slot_moments(lengths)`` where the caller has them already.
        horizon_steps: For a run of that many steps that starts with fresh requests in every slot:
            loads are shifted to the mean over those steps. None: the stationary load.

    Raises:
        ValueError: For an unknown level or ratios that are not whole and >= 1.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, found {level!r}")
    whole = _checked_ratios(ratios)
    moments = slot_moments(lengths) if moments is None else moments
    if level == "exact" and load is None:
        load = exact_law(lengths, bundle.batch_per_worker)
    if horizon_steps is not None:
        moments, load = _over_horizon(lengths, bundle, moments, load, horizon_steps)
    law = _worker_law(level, bundle, moments, load)
    cycle = _cycle_times(level, bundle, moments, law)
    real = whole.astype(np.float64)
    cycle_s = cycle(real)
    mean_s = mean_field_cycle_s(bundle, moments.theta_tokens, real)
    ffn_s = stage_lines(bundle, 0.0)[2].at(real)
    x = throughput(bundle, real, cycle_s)
    at = _first_best(whole, x)
    r = int(whole[at])
    attention_s = mean_attention_s(bundle, moments.theta_tokens)
    return LevelPrediction(
        level=level,
        ratios=whole,
        cycle_s=cycle_s,
        throughput_per_instance=x,
        attention_idle=np.maximum(0.0, 1.0 - attention_s / cycle_s),
        ffn_idle=np.maximum(0.0, 1.0 - ffn_s / cycle_s),
        barrier_overhead=np.maximum(0.0, cycle_s / mean_s - 1.0),
        tpot_s=tpot_s(bundle, cycle_s),
        r=r,
        r_real=_real_optimum(level, bundle, moments, whole, r, _search_times(bundle, law, cycle)),
        regime=_regime(level, bundle, moments, law, r),
        warnings=trust_warnings(level, moments, bundle.batch_per_worker),
    )


def predict_all(
    lengths: LengthPairs,
    bundle: Bundle,
    ratios: Sequence[int] | NDArray[np.int64],
    *,
    load: WorkerLoadLaw | None = None,
    horizon_steps: int | None = None,
) -> dict[str, LevelPrediction]:
    """All four levels over the same ratios, in the order of ``LEVELS``; see ``predict``."""
    moments = slot_moments(lengths)
    load = exact_law(lengths, bundle.batch_per_worker) if load is None else load
    return {
        level: predict(
            lengths,
            bundle,
            ratios,
            level=level,
            load=load,
            moments=moments,
            horizon_steps=horizon_steps,
        )
        for level in LEVELS
    }


def beyond_ratios(
    lengths: LengthPairs,
    bundle: Bundle,
    found: LevelPrediction,
    *,
    r_limit: int,
    load: WorkerLoadLaw | None = None,
    moments: SlotMoments | None = None,
) -> LevelPrediction:
    """The level's prediction around its optimum, where that may lie beyond the ratios asked for.

    Args:
        lengths, bundle: As ``found`` was made from.
        found: A prediction over 1..n.
        r_limit: Largest ratio to search; the mean field, which needs no search, knows no limit.
        load, moments: See ``predict``.

    Returns:
        ``found`` itself where its best ratio is not its last one, or no larger ratio is better.
    """
    moments = slot_moments(lengths) if moments is None else moments
    last = int(found.ratios.max())
    if found.r < last or (found.level == "mean_field" and math.isinf(found.r_real)):
        return found
    if found.level == "mean_field":
        r = optimum(bundle, moments.theta_tokens).r
        if r <= last:
            return found
        return predict(lengths, bundle, [r], level=found.level, moments=moments)
    wider = found
    while wider.r == last < r_limit:
        ratios = np.arange(last, min(2 * last, r_limit) + 1)
        last = int(ratios[-1])
        wider = predict(lengths, bundle, ratios, level=found.level, load=load, moments=moments)
    return found if wider.r == found.r else wider


def _checked_ratios(ratios: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    given = np.asarray(ratios)
    if given.ndim != 1 or len(given) == 0:
        raise ValueError("ratios must be a list of at least one whole number >= 1")
    whole = given.astype(np.int64)
    if not np.array_equal(whole, given) or int(whole.min()) < 1:
        bad = next(x for x in given.tolist() if x != int(x) or x < 1)
        raise ValueError(f"ratios must be whole numbers >= 1, found {bad!r}")
    return whole


def _over_horizon(
    lengths: LengthPairs,
    bundle: Bundle,
    moments: SlotMoments,
    load: WorkerLoadLaw | None,
    num_steps: int,
) -> tuple[SlotMoments, WorkerLoadLaw | None]:
    """Moments and worker law around the mean load of a cold start's first steps."""
    theta = horizon_load(lengths, num_steps)
    shift = bundle.batch_per_worker * (theta - moments.theta_tokens)
    if load is not None:
        load = WorkerLoadLaw(
            start_tokens=load.start_tokens + shift,
            step_tokens=load.step_tokens,
            cdf=load.cdf,
            is_exact=False,
        )
    return dataclasses.replace(moments, theta_tokens=theta), load


def _worker_law(
    level: str, bundle: Bundle, moments: SlotMoments, load: WorkerLoadLaw | None
) -> WorkerLoadLaw | None:
    """Law of the worker load at this level; None where closed forms need no lattice."""
    batch = bundle.batch_per_worker
    mean, sd = batch * moments.theta_tokens, moments.nu_tokens * math.sqrt(batch)
    if level == "mean_field" or (level == "gaussian" and bundle.semantics == "barrier"):
        return None
    if level == "gaussian":
        return gaussian_law(mean, sd)
    if level == "pearson3":
        return pearson3_law(mean, sd, moments.skew / math.sqrt(batch))
    return load


def _cycle_times(
    level: str, bundle: Bundle, moments: SlotMoments, law: WorkerLoadLaw | None
) -> CycleTimes:
    """r -> expected cycle time, for real r."""
    theta, nu = moments.theta_tokens, moments.nu_tokens
    if level == "mean_field":
        return lambda r: mean_field_cycle_s(bundle, theta, r)
    if law is None:
        return lambda r: barrier.gaussian_cycle_s(bundle, theta, nu, r)
    if bundle.semantics == "barrier":
        return lambda r: barrier.law_cycle_s(bundle, law, r)
    return pingpong.PingPong(bundle, law).cycle_s


def _search_times(bundle: Bundle, law: WorkerLoadLaw | None, cycle: CycleTimes) -> CycleTimes:
    """Cycle times good enough to place the real optimum: the barrier's on a coarser lattice."""
    if law is None or bundle.semantics == "pingpong":
        return cycle
    coarse = law.coarsened(SEARCH_LATTICE)
    return lambda r: barrier.law_cycle_s(bundle, coarse, r)


def _first_best(ratios: NDArray[np.int64], x: FloatArray) -> int:
    """Index of the largest x; the smaller ratio of equals."""
    order = np.argsort(ratios, kind="stable")
    return int(order[int(np.argmax(x[order]))])


def _real_optimum(
    level: str,
    bundle: Bundle,
    moments: SlotMoments,
    ratios: NDArray[np.int64],
    r: int,
    cycle: CycleTimes,
) -> float:
    """Best real ratio next to the whole one, by a grid that is refined."""
    if level == "mean_field":
        return optimum(bundle, moments.theta_tokens, r_max=int(ratios.max())).r_real
    known = np.unique(ratios)
    at = int(np.searchsorted(known, r))
    low, high = float(known[max(0, at - 1)]), float(known[min(len(known) - 1, at + 1)])
    best = float(r)
    for _ in range(SEARCH_ROUNDS):
        if high - low <= 0.0:
            break
        grid = np.linspace(low, high, SEARCH_POINTS)
        best = float(grid[int(np.argmax(throughput(bundle, grid, cycle(grid))))])
        width = (high - low) / (SEARCH_POINTS - 1)
        low, high = max(low, best - width), min(high, best + width)
    return best


def _regime(
    level: str, bundle: Bundle, moments: SlotMoments, law: WorkerLoadLaw | None, r: int
) -> str:
    """Name of the stage that takes longest at r, attention at its expected slowest."""
    mean_s = slowest_s = mean_attention_s(bundle, moments.theta_tokens)
    batch = bundle.batch_per_worker
    if law is not None:
        slowest_s = bundle.coefficients.attention_s(float(law.expected_maximum([r])[0]))
    elif level == "gaussian":
        slowest = barrier.gaussian_expected_maximum(
            moments.theta_tokens, moments.nu_tokens, batch, r
        )
        slowest_s = bundle.coefficients.attention_s(slowest)
    time_by_name = {line.name: float(line.at(r)) for line in stage_lines(bundle, slowest_s)}
    if bundle.semantics == "pingpong":
        # A worker's m microbatches average out; the round trip waits for the slowest of them.
        spread_s = (slowest_s - mean_s) / math.sqrt(bundle.microbatches)
        time_by_name["attention"] = mean_s + spread_s
    return max(time_by_name, key=lambda name: time_by_name[name])
