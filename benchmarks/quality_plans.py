"""Widths for every block at a budget of bytes: planners, uniform mixtures, and their bytes."""

from __future__ import annotations

import numpy as np
from quality_model import BITS, Increase, MixedPrecisionModel, sequence_losses

from policies.catalog import PRECISION
from policies.precision_tables import block_tables


def budget(table: np.ndarray, average_bits: float) -> int:
    """Bytes of a uniform mixture of the two whole widths around the average."""
    low = int(average_bits)
    share = average_bits - low
    column = BITS.index(low)
    total = table[:, column].sum()
    if share:
        total = (1 - share) * total + share * table[:, column + 1].sum()
    return round(total)


def planned(
    table: np.ndarray,
    damage: np.ndarray,
    average_bits: float,
    *,
    planner: str = "hull",
    multiplier: np.ndarray | None = None,
    floor_bits: np.ndarray | None = None,
) -> np.ndarray:
    """[blocks] widths of a planner within the budget of the average width."""
    floor = None if floor_bits is None else np.searchsorted(BITS, floor_bits).astype(np.int64)
    tables = block_tables(table, damage, BITS)
    plan = PRECISION[planner]("auto").plan(
        tables, budget(table, average_bits), floor_level=floor, multiplier=multiplier
    )
    return np.asarray(plan.bits)


def uniform_mixture(table: np.ndarray, average_bits: float, seed: int | None) -> np.ndarray:
    """[blocks] the lower whole width, raised by one in random order (None: by block id) while
    the budget lasts."""
    low = int(average_bits)
    column = BITS.index(low)
    bits = np.full(len(table), low)
    left = budget(table, average_bits) - int(table[:, column].sum())
    if left <= 0:
        return bits
    blocks = np.arange(len(table))
    order = blocks if seed is None else np.random.default_rng(seed).permutation(blocks)
    cost = table[:, column + 1] - table[:, column]
    for block in order:
        if cost[block] <= left:
            bits[block] += 1
            left -= int(cost[block])
    return bits


def measure(mixed: MixedPrecisionModel, bits: np.ndarray | int, text, full: np.ndarray) -> Increase:
    """Loss with these widths, against full precision."""
    mixed.hold(bits)
    return Increase(sequence_losses(mixed.model, text), full)


def measure_uniform(
    mixed: MixedPrecisionModel, table: np.ndarray, average_bits: float, text, full: np.ndarray
) -> tuple[Increase, list[float]]:
    """Uniform width; a fractional one is the mean over four mixtures, whose increases are given.

    The mixtures' losses are averaged sequence by sequence.
    """
    seeds = (None,) if average_bits == int(average_bits) else (None, 1, 2, 3)
    found = [measure(mixed, uniform_mixture(table, average_bits, s), text, full) for s in seeds]
    mean = np.mean([x.losses for x in found], axis=0)
    return Increase(mean, full), [x.perplexity_increase for x in found]
