"""Interleaved rounds: every point once a round, so that a slow minute slows all points alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from models.engine_profile import StepMeasured
from runtime.profile_steps import StepPoint, StepSeconds

LEAST_ROUNDS: Final = 3
MOST_ROUNDS: Final = 200
FIELDS: Final = (
    "seconds",
    "attention_s",
    "experts_s",
    "attention_block_s",
    "ffn_s",
    "expert_bytes",
)


def measure_steps(
    points: Sequence[StepPoint],
    run: Callable[[StepPoint], StepSeconds],
    *,
    budget_s: float,
    least_rounds: int = LEAST_ROUNDS,
    now: Callable[[], float] = time.monotonic,
    show: Callable[[float, float], None] = lambda done, total: None,
) -> tuple[list[StepMeasured], int]:
    """Medians over rounds, and how many rounds there were.

    A first round warms caches up and is not counted. Rounds end with the budget, but not before
    ``least_rounds``; the order of points is another one in every round.

    Args:
        points: What to measure.
        run: One measurement.
        budget_s: Seconds of wall time for all.
        least_rounds: >= 1.
        now: Wall clock of the budget.
        show: Told seconds done and seconds in all.
    """
    found: dict[StepPoint, list[StepSeconds]] = {point: [] for point in points}
    order = np.random.default_rng(0)
    start_s = now()
    for point in points:
        run(point)
        show(min(now() - start_s, budget_s), budget_s)
    rounds = 0
    while rounds < MOST_ROUNDS and (rounds < least_rounds or now() - start_s < budget_s):
        for at in order.permutation(len(points)).tolist():
            found[points[at]].append(run(points[at]))
            show(min(now() - start_s, budget_s), budget_s)
        rounds += 1
    return [_median(point, samples) for point, samples in found.items()], rounds


def _median(point: StepPoint, samples: Sequence[StepSeconds]) -> StepMeasured:
    values = {name: np.array([getattr(one, name) for one in samples]) for name in FIELDS}
    low, middle, high = np.quantile(values["seconds"], (0.25, 0.5, 0.75)).tolist()
    return StepMeasured(
        sequences=point.sequences,
        added=point.added,
        held=point.held,
        bits=point.bits,
        spread=(high - low) / middle,
        **{name: float(np.median(values[name])) for name in FIELDS},
    )
