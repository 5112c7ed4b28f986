"""The optimal ratio when every worker carries the mean load: crossings and peaks of lines.

Every stage of the cycle is a line in r, so 1 / X = (price of r) / (r B) * max of lines is convex:
the real optimum is unique, and the whole one is its floor or its ceiling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from models.bundle import Bundle
from models.order_statistics import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLine:
    """Time of one stage of a cycle as a line in r.

    Attributes:
        name: ``attention``, ``communication``, ``ffn``, or ``round_trip`` (a microbatch once
            around all stages, shared by the m in flight).
        slope_s: Seconds per attention worker.
        intercept_s: Seconds at r = 0.
    """

    name: str
    slope_s: float
    intercept_s: float

    def at(self, ratios: ArrayLike) -> FloatArray:
        """Seconds at each ratio."""
        r = np.asarray(ratios, dtype=np.float64)
        return np.asarray(self.slope_s * r + self.intercept_s, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanFieldOptimum:
    """The best ratio for constant loads.

    Attributes:
        r_attention: Where FFN time meets attention time; None where t_C depends on r.
        r_communication: Where FFN time meets transfer time; None where t_C depends on r.
        r_peak: Peak of the FFN-bound throughput; infinite where the FFN does not slow with r.
        r_real: Best real ratio; infinite where more workers always help.
        r: Best whole ratio of those allowed.
        regime: Stage that binds just below ``r_real``.
        cycle_s: Cycle time at ``r``.
        throughput_per_instance: X at ``r``.
    """

    r_attention: float | None
    r_communication: float | None
    r_peak: float
    r_real: float
    r: int
    regime: str
    cycle_s: float
    throughput_per_instance: float


def stage_lines(bundle: Bundle, attention_s: float) -> tuple[StageLine, ...]:
    """The stages of a cycle whose attention takes ``attention_s``, in order of the cycle.

    Source:
        arXiv 2601.21351 for the three stages of the barrier; the round trip of ``pingpong`` is
        derived in docs/theory.md.
    """
    c, batch = bundle.coefficients, bundle.batch_per_worker
    per_bundle = c.communication == "bundle"
    transfer_s = c.alpha_communication * batch
    communication = StageLine(
        name="communication",
        slope_s=transfer_s if per_bundle else 0.0,
        intercept_s=c.beta_communication + (0.0 if per_bundle else transfer_s),
    )
    ffn = StageLine(name="ffn", slope_s=c.alpha_ffn * batch, intercept_s=c.beta_ffn)
    attention = StageLine(name="attention", slope_s=0.0, intercept_s=attention_s)
    lines = (attention, communication, ffn)
    if bundle.semantics == "barrier":
        return lines
    one_way = one_way_line(bundle, communication)
    round_trip = StageLine(
        name="round_trip",
        slope_s=(ffn.slope_s + 2.0 * one_way.slope_s) / bundle.microbatches,
        intercept_s=(attention_s + ffn.intercept_s + 2.0 * one_way.intercept_s)
        / bundle.microbatches,
    )
    return (*lines, round_trip)


def one_way_line(bundle: Bundle, communication: StageLine) -> StageLine:
    """One-way latency of a transfer: as given, else half of the round trip."""
    if bundle.one_way_s is not None:
        return StageLine(name="one_way", slope_s=0.0, intercept_s=bundle.one_way_s)
    return StageLine(
        name="one_way",
        slope_s=0.5 * communication.slope_s,
        intercept_s=0.5 * communication.intercept_s,
    )


def mean_attention_s(bundle: Bundle, theta_tokens: float) -> float:
    """Attention seconds of a worker that carries the mean load B theta."""
    return bundle.coefficients.attention_s(bundle.batch_per_worker * theta_tokens)


def mean_field_cycle_s(bundle: Bundle, theta_tokens: float, ratios: ArrayLike) -> FloatArray:
    """[n] cycle time at each ratio when every worker carries B theta tokens."""
    lines = stage_lines(bundle, mean_attention_s(bundle, theta_tokens))
    return np.asarray(np.max([line.at(ratios) for line in lines], axis=0), dtype=np.float64)


def throughput(bundle: Bundle, ratios: ArrayLike, cycle_s: ArrayLike) -> FloatArray:
    """[n] X = r B / ((r w_A + w_F) tau): tokens per second, layer and unit of price."""
    r = np.asarray(ratios, dtype=np.float64)
    tau = np.asarray(cycle_s, dtype=np.float64)
    price = r * bundle.attention_price + bundle.ffn_price
    return np.asarray(r * bundle.batch_per_worker / (price * tau), dtype=np.float64)


def optimum(
    bundle: Bundle, theta_tokens: float, *, r_min: int = 1, r_max: int | None = None
) -> MeanFieldOptimum:
    """The best ratio for constant loads, real and whole.

    Args:
        bundle: Latency model and settings.
        theta_tokens: Mean slot load; pass a horizon's mean for a run that starts cold.
        r_min: Smallest whole ratio allowed, >= 1.
        r_max: Largest whole ratio allowed; None: no limit.

    Raises:
        ValueError: If the range is empty, or unlimited while more workers always help.

    Source:
        r_attention, r_communication, r_peak: arXiv 2601.21351 v1, theorem 4.4. Candidates of the
        general form: docs/theory.md.
    """
    if r_min < 1 or (r_max is not None and r_max < r_min):
        raise ValueError(f"ratios must satisfy 1 <= r_min <= r_max, found {r_min!r}, {r_max!r}")
    lines = stage_lines(bundle, mean_attention_s(bundle, theta_tokens))
    _, communication, ffn = lines[:3]
    r_real = _real_optimum(bundle, lines)
    if math.isinf(r_real) and r_max is None:
        raise ValueError("r_max is needed: no stage slows with r, so more workers always help")
    r = _whole_optimum(bundle, lines, r_real, r_min, r_max)
    cycle_s = max(float(line.at(r)) for line in lines)
    has_fixed_transfer = communication.slope_s == 0.0
    return MeanFieldOptimum(
        r_attention=_reaches(ffn, lines[0].intercept_s) if has_fixed_transfer else None,
        r_communication=_reaches(ffn, communication.intercept_s) if has_fixed_transfer else None,
        r_peak=_peak(bundle, ffn),
        r_real=r_real,
        r=r,
        regime=_binding(lines, r_real),
        cycle_s=cycle_s,
        throughput_per_instance=float(throughput(bundle, r, cycle_s)),
    )


def _real_optimum(bundle: Bundle, lines: tuple[StageLine, ...]) -> float:
    if all(line.slope_s == 0.0 for line in lines):
        return math.inf
    candidates = [_peak(bundle, line) for line in lines if line.slope_s > 0.0]
    for one, other in combinations(lines, 2):
        if one.slope_s != other.slope_s:
            slope = one.slope_s - other.slope_s
            candidates.append((other.intercept_s - one.intercept_s) / slope)
    possible = [r for r in candidates if 0.0 < r < math.inf]
    return min(possible, key=lambda r: _price_per_token(bundle, lines, r), default=0.0)


def _whole_optimum(
    bundle: Bundle, lines: tuple[StageLine, ...], r_real: float, r_min: int, r_max: int | None
) -> int:
    upper = math.inf if r_max is None else r_max
    nearest = min(max(r_real, r_min), upper)
    around = {int(min(max(whole, r_min), upper)) for whole in _around(nearest)}
    return min(sorted(around), key=lambda r: _price_per_token(bundle, lines, r))


def _around(r: float) -> tuple[int, int]:
    return math.floor(r), math.ceil(r)


def _price_per_token(bundle: Bundle, lines: tuple[StageLine, ...], r: float) -> float:
    """1 / X at ratio r > 0."""
    cycle_s = max(line.slope_s * r + line.intercept_s for line in lines)
    return bundle.price(r) * cycle_s / (r * bundle.batch_per_worker)


def _peak(bundle: Bundle, line: StageLine) -> float:
    """Where r / ((r w_A + w_F) (a r + b)) is largest."""
    if line.slope_s == 0.0:
        return math.inf
    return math.sqrt(line.intercept_s * bundle.ffn_price / (line.slope_s * bundle.attention_price))


def _reaches(line: StageLine, time_s: float) -> float:
    """Ratio at which the line takes ``time_s``; negative where it always takes longer."""
    if line.slope_s == 0.0:
        return math.inf if time_s >= line.intercept_s else -math.inf
    return (time_s - line.intercept_s) / line.slope_s


def _binding(lines: tuple[StageLine, ...], r_real: float) -> str:
    """Name of the slowest stage just below the optimum."""
    r = r_real * (1.0 - 1e-9) if math.isfinite(r_real) else 1.0
    return max(lines, key=lambda line: float(line.at(r))).name
