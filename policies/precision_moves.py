"""Which blocks move: a plan's difference to the widths held, cut to what the link carries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.orders import BitWidths, PrecisionOrders
from policies.precision_plan import Engine, PrecisionPlanner, with_damage
from policies.precision_problem import bytes_at, held_bytes
from policies.precision_tables import BlockTables, Floats, Ints

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Movable:
    """The widths held and where each block may go.

    Attributes:
        held: [num_blocks] levels held or being raised to.
        floor: [num_blocks] levels routing does not want a block to go below; may exceed ``held``.
        may_fall: [num_blocks] bool.
        may_rise: [num_blocks] bool.
        multiplier: [num_blocks] of each block's damage.
    """

    held: Ints
    floor: Ints
    may_fall: Mask
    may_rise: Mask
    multiplier: Floats

    @property
    def lowest(self) -> Ints:
        """[num_blocks] levels that drops may lead to."""
        return np.where(self.may_fall, np.minimum(self.floor, self.held), self.held)

    @property
    def below_floor(self) -> Mask:
        """[num_blocks] blocks that are to rise before all others."""
        return self.may_rise & (self.held < self.floor)


def drops(
    planner: PrecisionPlanner, tables: BlockTables, movable: Movable, budget_bytes: int
) -> tuple[Ints, int]:
    """Levels after the least harmful drops that reach the budget, and the bytes that lack."""
    if (movable.lowest == movable.held).all():
        return movable.held, max(0, held_bytes(tables, movable.held) - budget_bytes)
    plan = planner.plan(
        tables,
        budget_bytes,
        floor_level=movable.lowest,
        cap_level=movable.held,
        multiplier=movable.multiplier,
    )
    return plan.level, plan.bytes_short


def raises(
    planner: PrecisionPlanner, tables: BlockTables, movable: Movable, extra_bytes: int
) -> Ints:
    """Levels after the best raises of at most ``extra_bytes``; blocks below their floors first."""
    budget = held_bytes(tables, movable.held) + extra_bytes
    urgent = np.where(movable.below_floor, movable.floor, movable.held)
    if held_bytes(tables, urgent) > budget:
        low, high = movable.held, urgent
    else:
        low, high = urgent, np.where(movable.may_rise, tables.top_level, movable.held)
    plan = planner.plan(
        tables, budget, floor_level=low, cap_level=high, multiplier=movable.multiplier
    )
    return plan.level


def exchanges(
    planner: PrecisionPlanner,
    tables: BlockTables,
    movable: Movable,
    *,
    margin: float,
    link_bytes: int,
    engine: Engine,
) -> Ints:
    """Levels after raises paid for by drops: equal bytes, more than 1 + margin times the damage.

    Damage beyond that of the width a block holds is weighed 1 + margin times. The plan under that
    measure leaves a block where it is unless moving it is worth the margin.

    Args:
        planner: Plans under the measure.
        tables: Bytes and damage.
        movable: Widths held.
        margin: eta, >= 0.
        link_bytes: Most bytes the raises may copy; the best per byte come first.
        engine: Of the hulls.
    """
    held = movable.held
    at_held = np.take_along_axis(tables.damage, held[:, None], axis=1)
    worse = np.maximum(tables.damage - at_held, 0.0)
    measure = with_damage(tables, tables.damage + margin * worse, engine)
    budget = held_bytes(tables, held)
    low = np.where(movable.below_floor, movable.floor, movable.lowest)
    if held_bytes(tables, low) > budget:
        low = movable.lowest
    high = np.where(movable.may_rise, tables.top_level, held)
    plan = planner.plan(
        measure, budget, floor_level=low, cap_level=high, multiplier=movable.multiplier
    )
    level = plan.level
    order = raise_order(tables, movable, level)
    copied = np.cumsum(bytes_at(tables, level)[order] - bytes_at(tables, held)[order])
    if len(order) and copied[-1] > link_bytes:
        level = _paid_by_drops(planner, tables, movable, level, order[copied <= link_bytes], budget)
    is_worth = _saved(tables, movable, level) > (1.0 + margin) * _added(tables, movable, level)
    rises_to_floor = (level > held) & movable.below_floor
    return level if is_worth or rises_to_floor.any() else held


def _paid_by_drops(
    planner: PrecisionPlanner,
    tables: BlockTables,
    movable: Movable,
    level: Ints,
    chosen: Ints,
    budget: int,
) -> Ints:
    """The chosen raises, and the least harmful drops that pay for them; nothing if none can."""
    low, high = movable.lowest.copy(), movable.held.copy()
    low[chosen] = high[chosen] = level[chosen]
    plan = planner.plan(
        tables, budget, floor_level=low, cap_level=high, multiplier=movable.multiplier
    )
    return movable.held if plan.bytes_short else plan.level


def raise_order(tables: BlockTables, movable: Movable, level: Ints) -> Ints:
    """Blocks to be raised: those below their floors, then by falling damage saved per byte."""
    block = np.flatnonzero(level > movable.held)
    saved = _change(tables, movable, movable.held) - _change(tables, movable, level)
    cost = (bytes_at(tables, level) - bytes_at(tables, movable.held))[block]
    ratio = np.full(len(block), np.inf)
    np.divide(saved[block], cost, out=ratio, where=cost > 0)
    return block[np.lexsort((block, -ratio, ~movable.below_floor[block]))]


def orders(tables: BlockTables, movable: Movable, level: Ints, plan_id: int) -> PrecisionOrders:
    """Drops by block id and raises by urgency that lead from the widths held to ``level``."""
    bits = np.asarray(tables.bits, dtype=np.int64)
    down = np.flatnonzero(level < movable.held)
    up = raise_order(tables, movable, level)
    return PrecisionOrders(
        plan_id=plan_id,
        drops=BitWidths(down, bits[level[down]]),
        raises=BitWidths(up, bits[level[up]]),
    )


def _change(tables: BlockTables, movable: Movable, level: Ints) -> Floats:
    harm: Floats = tables.damage[np.arange(len(level)), level] * movable.multiplier
    return harm


def _saved(tables: BlockTables, movable: Movable, level: Ints) -> float:
    change = _change(tables, movable, movable.held) - _change(tables, movable, level)
    return float(change[level > movable.held].sum())


def _added(tables: BlockTables, movable: Movable, level: Ints) -> float:
    change = _change(tables, movable, level) - _change(tables, movable, movable.held)
    return float(change[level < movable.held].sum())
