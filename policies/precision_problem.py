"""One question to the precision planner, checked, and the report on its answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.orders import PrecisionPlan
from policies.precision_select import Cut
from policies.precision_tables import BlockTables, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Which widths are allowed, what they harm, and the bytes above the floors.

    Attributes:
        tables: Bytes and damage of the blocks.
        floor: [num_blocks] lowest level of each block.
        cap: [num_blocks] highest level of each block.
        multiplier: [num_blocks] of each block's damage.
        harm: [num_blocks, num_levels] damage times multiplier.
        budget_bytes: Bytes all blocks may hold.
        room: Bytes left when all are at their floors; negative when even these do not fit.
    """

    tables: BlockTables
    floor: Ints
    cap: Ints
    multiplier: Floats
    harm: Floats
    budget_bytes: int
    room: int

    def total(self, level: Ints) -> float:
        """Damage of all blocks at these levels."""
        return float(self.harm[np.arange(len(level)), level].sum())


def problem(
    tables: BlockTables,
    budget_bytes: int,
    floor_level: Ints | None,
    cap_level: Ints | None,
    multiplier: Floats | None,
) -> Problem:
    """The question with its defaults filled in: floors 0, caps at the top, multipliers 1.

    Raises:
        ValueError: If an array has the wrong length or a value out of range.
    """
    n, top = tables.num_blocks, tables.top_level
    floor = np.zeros(n, np.int64) if floor_level is None else _levels("floor_level", floor_level, n)
    cap = np.full(n, top) if cap_level is None else _levels("cap_level", cap_level, n)
    weight = np.ones(n) if multiplier is None else np.ascontiguousarray(multiplier, np.float64)
    if weight.shape != (n,):
        raise ValueError(f"multiplier must have {n:,} entries, found shape {list(weight.shape)}")
    _require("floor_level", (floor >= 0) & (floor <= top), floor, f"within 0..{top}")
    _require("cap_level", (cap >= floor) & (cap <= top), cap, f"from its floor to {top}")
    _require("multiplier", (weight >= 0) & np.isfinite(weight), weight, "finite and >= 0")
    budget = int(budget_bytes)
    return Problem(
        tables=tables,
        floor=floor,
        cap=cap,
        multiplier=weight,
        harm=tables.damage * weight[:, None],
        budget_bytes=budget,
        room=budget - held_bytes(tables, floor),
    )


def _levels(name: str, levels: Ints, num_blocks: int) -> Ints:
    found = np.asarray(levels)
    if found.shape != (num_blocks,) or found.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be {num_blocks:,} integers, found {found.dtype} {list(found.shape)}"
        )
    return np.ascontiguousarray(found, dtype=np.int64)


def _require(
    name: str, holds: NDArray[np.bool_], values: NDArray[np.generic], allowed: str
) -> None:
    if not holds.all():
        block = int(np.argmin(holds))
        raise ValueError(f"{name} of block {block} must be {allowed}, found {values[block]}")


def bytes_at(tables: BlockTables, level: Ints) -> Ints:
    """[num_blocks] bytes of each block at its level."""
    held: Ints = tables.bytes_[np.arange(len(level)), level]
    return held


def held_bytes(tables: BlockTables, level: Ints) -> int:
    """Bytes of all blocks at these levels."""
    return int(bytes_at(tables, level).sum())


def answer(asked: Problem, level: Ints, cut: Cut, *, proved: bool = False) -> PrecisionPlan:
    """A plan with its bound: the damage of the cut less what its unused bytes could save at most.

    Args:
        asked: The question; its floors fit.
        level: [num_blocks] the plan.
        cut: The threshold plan of the same question.
        proved: Whether no plan has less damage.
    """
    damage = asked.total(level)
    # rounding of the sums may put the bound a hair above a plan that meets it
    bound = min(damage, max(0.0, asked.total(cut.level) - cut.price * cut.room))
    return _plan(asked.tables, level, damage, bound, proved or damage <= bound, 0)


def at_floors(asked: Problem) -> PrecisionPlan:
    """Everything at its floor, and how many bytes even that lacks."""
    damage = asked.total(asked.floor)
    return _plan(asked.tables, asked.floor, damage, damage, True, -asked.room)


def _plan(
    tables: BlockTables, level: Ints, damage: float, bound: float, optimal: bool, short: int
) -> PrecisionPlan:
    over = damage / bound - 1.0 if bound > 0.0 else (0.0 if damage <= 0.0 else float("inf"))
    return PrecisionPlan(
        level=level,
        bits=np.asarray(tables.bits, dtype=np.int64)[level],
        bytes_=held_bytes(tables, level),
        damage=damage,
        lp_bound=bound,
        gap=over,
        is_optimal=optimal,
        bytes_short=short,
    )
