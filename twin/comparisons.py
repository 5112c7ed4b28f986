"""Which of two or many settings is better, and when the runs cannot tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

Setting = TypeVar("Setting", int, float, str)
Verdict = Literal["a", "b", "cannot tell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """a minus b, from runs in pairs.

    Attributes:
        mean: Mean of a - b.
        half_width: Of its confidence interval.
        standard_error: Of the mean.
        confidence: Nominal coverage.
        num_pairs: Pairs.
        verdict: Which is larger: ``a`` or ``b``, or ``cannot tell`` where 0 is in the interval.
        variance_ratio: Variance the difference would have from independent runs, over that of the
            pairs: what common random numbers gained. Infinity where the pairs differ by a constant.
    """

    mean: float
    half_width: float
    standard_error: float
    confidence: float
    num_pairs: int
    verdict: Verdict
    variance_ratio: float


def paired_difference(a: ArrayLike, b: ArrayLike, *, confidence: float = 0.95) -> Difference:
    """Compare two settings run under the same random numbers.

    Args:
        a: [k] one number a replication; k >= 2.
        b: [k] of the other setting, same replications in the same order.
        confidence: In (0, 1).

    Raises:
        ValueError: If the lengths differ, or are below 2, or a number is not finite.
    """
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if left.ndim != 1 or left.shape != right.shape or len(left) < 2:
        raise ValueError(
            f"a and b must have the same length, at least 2, found {left.size} and {right.size}"
        )
    if not bool(np.isfinite(left).all() and np.isfinite(right).all()):
        raise ValueError("a and b must be finite, found NaN or infinity")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be in (0, 1), found {confidence!r}")
    difference = left - right
    variance = float(difference.var(ddof=1))
    apart = float(left.var(ddof=1) + right.var(ddof=1))
    mean = float(difference.mean())
    standard_error = math.sqrt(variance / len(difference))
    half_width = float(stdtrit(len(difference) - 1, 0.5 + 0.5 * confidence)) * standard_error
    verdict: Verdict = "cannot tell"
    if abs(mean) > half_width:
        verdict = "a" if mean > 0.0 else "b"
    return Difference(
        mean=mean,
        half_width=half_width,
        standard_error=standard_error,
        confidence=confidence,
        num_pairs=len(difference),
        verdict=verdict,
        variance_ratio=apart / variance if variance > 0.0 else math.inf,
    )


def not_worse_than_best(
    values_by_setting: Mapping[Setting, ArrayLike],
    *,
    best: Setting | None = None,
    confidence: float = 0.95,
) -> tuple[Setting, ...]:
    """Settings that the runs cannot tell from the best one.

    Each is compared with the best by a one-sided paired t test under Holm's step-down rule, over
    the replications that both have. A given setting that is in truth as good as any is left out
    with a chance of about ``1 - confidence`` or less. That one of several equally good ones is left
    out is likelier, because the best is picked by luck among them.

    Args:
        values_by_setting: Setting -> [k] larger-is-better numbers, one a replication, the same
            replications in the same order; k may differ between settings.
        best: The setting to compare with; None: the one with the largest mean.
        confidence: In (0, 1).

    Returns:
        The settings, in the mapping's order; the best is among them.

    Raises:
        ValueError: If there is no setting, or ``best`` is none of them, or see
            ``paired_difference``.

    Source:
        Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    if not values_by_setting:
        raise ValueError("values_by_setting must have at least one setting, found none")
    values = {key: np.asarray(one, dtype=np.float64) for key, one in values_by_setting.items()}
    if best is None:
        best = max(values, key=lambda setting: float(values[setting].mean()))
    if best not in values:
        raise ValueError(f"best must be one of the settings, found {best!r}")
    chance: dict[Setting, float] = {}
    for setting, other in values.items():
        if setting != best:
            shared = min(len(values[best]), len(other))
            gap = paired_difference(values[best][:shared], other[:shared], confidence=confidence)
            chance[setting] = _chance_of_gap(gap)
    worse: set[Setting] = set()
    for rank, setting in enumerate(sorted(chance, key=lambda setting: chance[setting])):
        if chance[setting] > (1.0 - confidence) / (len(chance) - rank):
            break
        worse.add(setting)
    return tuple(setting for setting in values if setting not in worse)


def _chance_of_gap(gap: Difference) -> float:
    """How likely a gap this large is if there were none."""
    if gap.standard_error == 0.0:
        return 1.0 if gap.mean == 0.0 else 0.0
    return float(stdtr(gap.num_pairs - 1, -gap.mean / gap.standard_error))
