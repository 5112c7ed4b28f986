"""How many bits each weight block gets from a given number of bytes.

Minimise the sum of damage_i(q_i) subject to sum of bytes_i(q_i) <= budget and q_i >= floor_i: a
multiple-choice knapsack. The linear relaxation bounds every plan from below, so every plan reports
its own gap.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Literal, Protocol

import numpy as np

from policies.orders import PrecisionPlan
from policies.precision_core import Core, core_of, core_search, single_move_numpy
from policies.precision_problem import Problem, answer, at_floors, problem
from policies.precision_select import Cut, cut_numpy
from policies.precision_tables import BlockTables, Floats, Ints, hull_steps

Engine = Literal["auto", "compiled", "numpy"]

_MAX_CORE_MOVES = 4096


class PrecisionPlanner(Protocol):
    """Chooses a width for every weight block."""

    def plan(
        self,
        tables: BlockTables,
        budget_bytes: int,
        *,
        floor_level: Ints | None = None,
        cap_level: Ints | None = None,
        multiplier: Floats | None = None,
    ) -> PrecisionPlan:
        """A plan of at most ``budget_bytes``; all blocks at their floors if even these do not fit.

        The same input gives the same plan. Equal damage per byte: the lower block id first.

        Args:
            tables: Bytes and damage of the blocks.
            budget_bytes: Bytes all blocks may hold together.
            floor_level: [num_blocks] lowest level of each block; default 0.
            cap_level: [num_blocks] highest level of each block, >= its floor; default the top.
            multiplier: [num_blocks] of each block's damage, finite and >= 0; default 1.

        Raises:
            ValueError: If an array has the wrong length or a value out of range.
        """
        ...


class HullPlanner:
    """Threshold on the convex hulls, then an exact search around it for the last bytes.

    The threshold plan loses less than one step against the linear bound; the search closes what
    can be closed. It stops when the plan is proved optimal or after ``max_work`` states, which
    keeps 12,288 blocks within milliseconds. A step that saves no damage is not taken, so bytes may
    be left over.
    """

    def __init__(
        self, engine: Engine = "auto", *, max_states: int = 2048, max_work: int = 200_000
    ) -> None:
        self._loops = compiled_loops(engine)
        self._max_states, self._max_work = max_states, max_work

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
        cut = threshold_cut(self._loops, asked)
        level, proved = self._spend_room(asked, cut)
        return answer(asked, level, cut, proved=proved)

    def _spend_room(self, asked: Problem, cut: Cut) -> tuple[Ints, bool]:
        """Levels of the best plan around the cut, and whether no better one exists."""
        if cut.price * cut.room <= 0.0:
            return cut.level, True
        reduced = np.empty(asked.harm.shape)
        single = single_move_numpy if self._loops is None else self._loops.single_move
        least_loss = single(
            asked.tables.bytes_,
            asked.harm,
            cut.level,
            asked.floor,
            asked.cap,
            cut.price,
            cut.room,
            reduced,
        )
        core, left_out = core_of(
            reduced, asked.tables.bytes_, cut.level, least_loss, _MAX_CORE_MOVES
        )
        moves, proved = self._search(core, cut)
        level = cut.level.copy()
        level[core.move_block[moves]] = core.move_level[moves]
        return level, proved and core.loss(moves, cut.price, cut.room) <= left_out

    def _search(self, core: Core, cut: Cut) -> tuple[Ints, bool]:
        limits = (self._max_states, self._max_work)
        if self._loops is None:
            moves, proved, _ = core_search(core, cut.price, cut.room, *limits)
            return moves, proved
        room_for_moves = np.empty(len(core.block_cost), dtype=np.int64)
        num_moves, proved, _ = self._loops.core_states(
            core.block_cost,
            core.first_move,
            core.move_cost,
            core.move_bytes,
            cut.price,
            cut.room,
            *limits,
            room_for_moves,
        )
        return room_for_moves[:num_moves], bool(proved)


def compiled_loops(engine: Engine) -> Any:
    """The compiled inner loops, or None for the numpy path.

    ``auto`` takes the compiled ones where numba can be imported; the plans are the same.

    Raises:
        ValueError: If the engine has another name.
        ImportError: If ``compiled`` is asked for and numba cannot be imported.
    """
    if engine not in ("auto", "compiled", "numpy"):
        raise ValueError(f"engine must be auto, compiled or numpy, found {engine!r}")
    if engine == "numpy" or (engine == "auto" and importlib.util.find_spec("numba") is None):
        return None
    try:
        return importlib.import_module("policies.precision_compiled")
    except (ImportError, SystemError, OSError):  # numba is there, but broken
        if engine == "compiled":
            raise
        return None


def with_damage(tables: BlockTables, damage: Floats, engine: Engine = "auto") -> BlockTables:
    """The same blocks with other damage, and the hulls redone.

    Args:
        tables: The blocks.
        damage: [num_blocks, num_levels] finite, >= 0; not checked again.
        engine: See ``compiled_loops``.
    """
    loops = compiled_loops(engine)
    top = np.full(tables.num_blocks, tables.top_level)
    if loops is None:
        steps = hull_steps(tables.bytes_, damage, top)
    else:
        steps = (np.empty_like(tables.next_level), np.empty_like(tables.ratio))
        loops.hull_steps(tables.bytes_, damage, top, tables.top_level + 1, *steps)
    return BlockTables(tables.bits, tables.bytes_, damage, *steps)


def threshold_cut(loops: Any, asked: Problem) -> Cut:
    """The plan of the threshold and its linear bound, compiled or in numpy."""
    tables = asked.tables
    if loops is None:
        return cut_numpy(tables, asked.multiplier, asked.floor, asked.cap, asked.room)
    next_level, ratio = tables.next_level, tables.ratio
    if (asked.cap < tables.top_level).any():
        next_level, ratio = next_level.copy(), ratio.copy()
        loops.hull_steps(
            tables.bytes_, tables.damage, asked.cap, tables.top_level, next_level, ratio
        )
    step_ratio = np.zeros(tables.bytes_.size)
    step_bytes = np.zeros(tables.bytes_.size, dtype=np.int64)
    total = loops.chains(
        tables.bytes_, next_level, ratio, asked.multiplier, asked.floor, step_ratio, step_bytes
    )
    keys = step_ratio.view(np.int64)
    critical, left = -1, asked.room - total
    if left < 0:
        critical, left = loops.critical_step(keys, step_bytes, asked.room)
    key, price = (keys[critical], float(step_ratio[critical])) if critical >= 0 else (0, 0.0)
    level = np.empty(len(asked.floor), dtype=np.int64)
    loops.climb(next_level, keys, asked.floor, critical, key, level)
    return Cut(level, price, int(left))
