"""Plans to compare with: the greedy rule and one width for all.

Both report the linear bound of the same question, so their gaps compare with the hull planner's.
"""

from __future__ import annotations

import numpy as np

from policies.orders import PrecisionPlan
from policies.precision_plan import Engine, compiled_loops, threshold_cut
from policies.precision_problem import Problem, answer, at_floors, bytes_at, held_bytes, problem
from policies.precision_tables import BlockTables, Floats, Ints


class GreedyPlanner:
    """From the top, one width at a time, the step of least damage per byte saved, until it fits.

    The rule of PagedWeight. A step that is cheap but lies below a dear one is seen too late.
    """

    def __init__(self, engine: Engine = "auto") -> None:
        self._loops = compiled_loops(engine)

    def plan(
        self,
        tables: BlockTables,
        budget_bytes: int,
        *,
        floor_level: Ints | None = None,
        cap_level: Ints | None = None,
        multiplier: Floats | None = None,
    ) -> PrecisionPlan:
        """See ``PrecisionPlanner.plan``."""
        asked = problem(tables, budget_bytes, floor_level, cap_level, multiplier)
        if asked.room < 0:
            return at_floors(asked)
        return answer(asked, _greedy_levels(asked), threshold_cut(self._loops, asked))


class UniformPlanner:
    """One width for all blocks, within each one's floor and cap: the widest that fits."""

    def __init__(self, engine: Engine = "auto") -> None:
        self._loops = compiled_loops(engine)

    def plan(
        self,
        tables: BlockTables,
        budget_bytes: int,
        *,
        floor_level: Ints | None = None,
        cap_level: Ints | None = None,
        multiplier: Floats | None = None,
    ) -> PrecisionPlan:
        """See ``PrecisionPlanner.plan``."""
        asked = problem(tables, budget_bytes, floor_level, cap_level, multiplier)
        if asked.room < 0:
            return at_floors(asked)
        level = _clipped(asked, _widest_level(asked))
        return answer(asked, level, threshold_cut(self._loops, asked))


class UniformRemainderPlanner:
    """One width for all; the bytes left over raise blocks by one width in the order of their ids.

    Up to the first that does not fit. It knows no damage: a uniform plan of fractional width.
    """

    def __init__(self, engine: Engine = "auto") -> None:
        self._loops = compiled_loops(engine)

    def plan(
        self,
        tables: BlockTables,
        budget_bytes: int,
        *,
        floor_level: Ints | None = None,
        cap_level: Ints | None = None,
        multiplier: Floats | None = None,
    ) -> PrecisionPlan:
        """See ``PrecisionPlanner.plan``."""
        asked = problem(tables, budget_bytes, floor_level, cap_level, multiplier)
        if asked.room < 0:
            return at_floors(asked)
        width = _widest_level(asked)
        level, wider = _clipped(asked, width), _clipped(asked, min(width + 1, tables.top_level))
        cost = np.cumsum(bytes_at(tables, wider) - bytes_at(tables, level))
        fits = cost <= asked.budget_bytes - held_bytes(tables, level)
        return answer(asked, np.where(fits, wider, level), threshold_cut(self._loops, asked))


def _clipped(asked: Problem, level: int) -> Ints:
    clipped: Ints = np.clip(level, asked.floor, asked.cap)
    return clipped


def _widest_level(asked: Problem) -> int:
    for level in range(asked.tables.top_level, 0, -1):
        if held_bytes(asked.tables, _clipped(asked, level)) <= asked.budget_bytes:
            return level
    return 0


def _greedy_levels(asked: Problem) -> Ints:
    """Levels after the shortest run of steps, in greedy order, that saves enough.

    A heap of next steps gives out the steps of a block in turn, a cheap one right after the dear
    one above it. So its order is that of the largest ratio met on the way down; ties by block.
    """
    excess = held_bytes(asked.tables, asked.cap) - asked.budget_bytes
    if excess <= 0:
        return asked.cap
    steps = np.arange(asked.tables.top_level, 0, -1)  # the level a step leaves, top first
    added = asked.harm[:, steps - 1] - asked.harm[:, steps]
    saved = asked.tables.bytes_[:, steps] - asked.tables.bytes_[:, steps - 1]
    ratio: Floats = np.full(added.shape, np.inf)
    np.divide(added, saved, out=ratio, where=saved > 0)
    legal = (steps > asked.floor[:, None]) & (steps <= asked.cap[:, None])
    ratio = np.maximum.accumulate(np.where(legal, ratio, -np.inf), axis=1)
    block, step = np.nonzero(legal)
    order = np.lexsort((step, block, ratio[block, step]))
    num_steps = 1 + int(np.searchsorted(np.cumsum(saved[block, step][order]), excess))
    return asked.cap - np.bincount(block[order[:num_steps]], minlength=len(asked.cap))
