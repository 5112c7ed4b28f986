"""The cut of the precision planner: which hull steps come before the bytes run out.

Steps are taken by falling damage saved per byte. Nothing is sorted but the few steps around the
cut: the bits of positive floats order like integers, so a histogram of bytes over the leading bits
finds the digit the cut falls into.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.precision_tables import BlockTables, Floats, Ints, hull_steps

_DIGIT_BITS = 13


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The plan of the threshold, before slack is used.

    Attributes:
        level: [num_blocks] int64.
        price: Damage per byte of the first step left out; 0 when none was.
        room: Bytes left before that step.
    """

    level: Ints
    price: float
    room: int


def cut_numpy(
    tables: BlockTables, multiplier: Floats, floor_level: Ints, cap_level: Ints, room: int
) -> Cut:
    """The cut in plain numpy; the oracle of the compiled one.

    Args:
        tables: Bytes, damage, hulls.
        multiplier: [num_blocks] >= 0, of the damage.
        floor_level: [num_blocks].
        cap_level: [num_blocks] >= floor_level.
        room: Bytes to spend above the floors, >= 0.
    """
    num_blocks, num_levels = tables.bytes_.shape
    next_level, ratio = tables.next_level, tables.ratio
    capped = np.flatnonzero(cap_level < num_levels - 1)
    if len(capped):
        next_level, ratio = next_level.copy(), ratio.copy()
        next_level[capped], ratio[capped] = hull_steps(
            tables.bytes_[capped], tables.damage[capped], cap_level[capped]
        )
    step_ratio, step_bytes = _chains(tables.bytes_, next_level, ratio, multiplier, floor_level)
    keys = step_ratio.view(np.int64)
    if int(step_bytes.sum()) <= room:
        critical, price, left = -1, 0.0, room - int(step_bytes.sum())
    else:
        critical, left = _critical_step(keys, step_bytes, room)
        price = float(step_ratio[critical])
    steps = np.arange(len(keys))
    taken = keys > 0
    if critical >= 0:
        key = keys[critical]
        taken &= (keys > key) | ((keys == key) & (steps < critical))
    grid = taken.reshape(num_blocks, num_levels)
    reached = np.where(grid, next_level, floor_level[:, None])
    return Cut(reached.max(axis=1), price, left)


def _chains(
    bytes_: Ints, next_level: Ints, ratio: Floats, multiplier: Floats, floor_level: Ints
) -> tuple[Floats, Ints]:
    """Steps of every block from its floor up, as flat arrays; a block's ratios never rise."""
    num_blocks, num_levels = bytes_.shape
    blocks = np.arange(num_blocks)
    step_ratio = np.zeros((num_blocks, num_levels))
    step_bytes = np.zeros((num_blocks, num_levels), dtype=np.int64)
    level = floor_level.copy()
    above = np.full(num_blocks, np.inf)
    with np.errstate(invalid="ignore"):  # 0 x inf: a block of no weight has no step
        weighted = np.nan_to_num(multiplier[:, None] * ratio, nan=0.0, posinf=np.inf)
    for _ in range(num_levels):
        vertex = next_level[blocks, level]
        above = np.minimum(above, weighted[blocks, level])
        above[vertex == level] = 0.0
        on = above > 0.0
        if not on.any():
            break
        step_ratio[blocks[on], level[on]] = above[on]
        step_bytes[blocks[on], level[on]] = (
            bytes_[blocks[on], vertex[on]] - bytes_[blocks[on], level[on]]
        )
        level = np.where(on, vertex, level)
    return step_ratio.reshape(-1), step_bytes.reshape(-1)


def _critical_step(keys: Ints, step_bytes: Ints, room: int) -> tuple[int, int]:
    """The first step, by falling key and rising number, that ``room`` has no bytes for."""
    digit = keys >> (63 - _DIGIT_BITS)
    weight = np.bincount(digit, weights=step_bytes, minlength=1 << _DIGIT_BITS)
    spent = np.cumsum(weight[::-1])  # whole numbers below 2**53: exact
    passed = int(np.searchsorted(spent, room, side="right"))
    room -= int(spent[passed - 1]) if passed else 0
    members = np.flatnonzero((digit == len(weight) - 1 - passed) & (keys > 0))
    order = members[np.argsort(-keys[members], kind="stable")]
    spent_here = np.cumsum(step_bytes[order])
    fits = int(np.searchsorted(spent_here, room, side="right"))
    return int(order[fits]), room - (int(spent_here[fits - 1]) if fits else 0)
