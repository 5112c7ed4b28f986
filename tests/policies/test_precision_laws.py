"""Laws that every precision planner of the catalog obeys, whatever it prefers."""

import heapq
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import PRECISION, precision_planner
from policies.orders import PrecisionPlan
from policies.precision_problem import held_bytes
from policies.precision_tables import BlockTables, block_tables


@dataclass(frozen=True)
class Question:
    tables: BlockTables
    floor: np.ndarray
    cap: np.ndarray
    multiplier: np.ndarray
    budget: int

    def ask(self, name: str, budget: int | None = None) -> PrecisionPlan:
        return precision_planner(name).plan(
            self.tables,
            self.budget if budget is None else budget,
            floor_level=self.floor,
            cap_level=self.cap,
            multiplier=self.multiplier,
        )


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Falling damage of any curvature, floors, caps (equal to the floor: pinned), any budget."""
    blocks, levels = draw(st.integers(1, 9)), draw(st.integers(1, 5))

    def whole(low: int, high: int, count: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    held = np.cumsum(np.array(whole(0, 6, blocks * levels)).reshape(blocks, levels), axis=1)
    steps = np.array(whole(0, 30, blocks * levels), dtype=np.float64).reshape(blocks, levels)
    tables = block_tables(held, steps[:, ::-1].cumsum(axis=1)[:, ::-1], range(2, 2 + levels))
    a, b = (np.array(whole(0, levels - 1, blocks)) for _ in range(2))
    floor, cap = np.minimum(a, b), np.maximum(a, b)
    multiplier = np.array(
        draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 16.0]), min_size=blocks, max_size=blocks))
    )
    return Question(
        tables, floor, cap, multiplier, draw(st.integers(0, int(held[:, -1].sum()) + 2))
    )


@pytest.mark.parametrize("name", PRECISION)
class TestEveryPrecisionPlanner:
    @settings(max_examples=120, deadline=None)
    @given(question=questions())
    def test_stays_between_floors_and_caps_and_within_the_budget(
        self, name: str, question: Question
    ) -> None:
        plan = question.ask(name)
        assert plan.level.dtype == plan.bits.dtype == np.int64
        assert (plan.level >= question.floor).all()
        assert (plan.level <= question.cap).all()
        assert plan.bytes_ == held_bytes(question.tables, plan.level)
        least = held_bytes(question.tables, question.floor)
        assert plan.bytes_short == max(0, least - question.budget)
        if plan.bytes_short:
            assert plan.level.tolist() == question.floor.tolist()
        else:
            assert plan.bytes_ <= question.budget

    @settings(max_examples=60, deadline=None)
    @given(question=questions())
    def test_reports_the_damage_of_its_plan_and_a_bound_below_every_planner(
        self, name: str, question: Question
    ) -> None:
        plan = question.ask(name)
        rows = np.arange(question.tables.num_blocks)
        damage = question.tables.damage[rows, plan.level] @ question.multiplier
        assert plan.damage == pytest.approx(damage, abs=1e-9)
        for other in PRECISION:
            assert plan.lp_bound <= question.ask(other).damage + 1e-9
        if plan.is_optimal:
            assert plan.damage <= min(question.ask(other).damage for other in PRECISION) + 1e-9

    @settings(max_examples=60, deadline=None)
    @given(question=questions(), more=st.integers(1, 10))
    def test_does_no_more_damage_with_more_bytes(
        self, name: str, question: Question, more: int
    ) -> None:
        few, many = question.ask(name), question.ask(name, question.budget + more)
        assert many.damage <= few.damage + 1e-9
        assert many.lp_bound <= few.lp_bound + 1e-9

    @settings(max_examples=40, deadline=None)
    @given(question=questions())
    def test_gives_the_same_plan_again_and_changes_nothing_it_is_told(
        self, name: str, question: Question
    ) -> None:
        told = (question.floor, question.cap, question.multiplier, question.tables.damage)
        before = [array.copy() for array in told]
        first, second = question.ask(name), question.ask(name)
        assert first.level.tolist() == second.level.tolist()
        assert (first.damage, first.lp_bound) == (second.damage, second.lp_bound)
        for now, then in zip(told, before, strict=True):
            assert now.tolist() == then.tolist()

    @settings(max_examples=40, deadline=None)
    @given(question=questions())
    def test_gives_the_same_plan_with_and_without_numba(
        self, name: str, question: Question
    ) -> None:
        limits = {
            "floor_level": question.floor,
            "cap_level": question.cap,
            "multiplier": question.multiplier,
        }
        compiled, plain = (
            PRECISION[name](engine).plan(question.tables, question.budget, **limits)
            for engine in ("compiled", "numpy")
        )
        assert compiled.level.tolist() == plain.level.tolist()
        assert (compiled.damage, compiled.lp_bound) == (plain.damage, plain.lp_bound)

    def test_holds_everything_at_the_top_when_all_fits(self, name: str) -> None:
        tables = block_tables([[1, 2, 3]] * 4, [[3.0, 2.0, 0.5]] * 4, [2, 4, 8])
        plan = precision_planner(name).plan(tables, 12)
        assert plan.bits.tolist() == [8] * 4
        assert (plan.gap, plan.lp_bound, plan.is_optimal) == (0.0, 2.0, True)


@settings(max_examples=150, deadline=None)
@given(question=questions())
def test_greedy_takes_the_steps_a_heap_would_give_out(question):
    """Oracle: the rule as written, with a heap of each block's next step."""
    tables, level = question.tables, question.cap.copy()
    harm = tables.damage * question.multiplier[:, None]

    def push(block: int) -> None:
        at = level[block]
        if at > question.floor[block]:
            saved = tables.bytes_[block, at] - tables.bytes_[block, at - 1]
            added = harm[block, at - 1] - harm[block, at]
            heapq.heappush(heap, (added / saved if saved else float("inf"), block))

    heap: list[tuple[float, int]] = []
    for block in range(tables.num_blocks):
        push(block)
    while heap and held_bytes(tables, level) > question.budget:
        _, block = heapq.heappop(heap)
        level[block] -= 1
        push(block)
    assert question.ask("greedy").level.tolist() == level.tolist()


def test_uniform_holds_one_width_and_its_variant_raises_blocks_in_order():
    tables = block_tables([[2, 3, 4]] * 5, [[9.0, 3.0, 1.0]] * 5, [2, 3, 4])
    assert precision_planner("uniform").plan(tables, 18).bits.tolist() == [3] * 5
    assert precision_planner("uniform_remainder").plan(tables, 18).bits.tolist() == [4, 4, 4, 3, 3]
