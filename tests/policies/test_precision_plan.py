"""The planner against brute force, dynamic programming, HiGHS, and values from elsewhere."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from models.plane_bytes import block_pages
from models.streams import stream
from policies.catalog import PRECISION, precision_planner
from policies.precision_core import Core, core_of, core_search
from policies.precision_plan import HullPlanner
from policies.precision_problem import held_bytes
from policies.precision_tables import BlockTables, block_tables

CASES = json.loads(
    (Path(__file__).resolve().parent.parent / "golden" / "pagedweight_cases.json").read_text()
)["planner"]
TABLES = block_tables(CASES["bytes"], CASES["damage"], [2, 3, 4, 5])
ENGINES = ("compiled", "numpy")

# Shapes [N, K] of gate_up and down, layers, experts.
FAMILIES = {
    "Qwen1.5-MoE": (24, 60, (2816, 2048), (2048, 1408)),
    "Gemma-4": (30, 128, (1408, 2816), (2816, 704)),
    "Mixtral": (32, 8, (28672, 4096), (4096, 14336)),
    "128 x 48": (48, 128, (1536, 2048), (2048, 768)),
}
# Relative error of nested k-means (seed 3) on Gaussian rows at 2..8 bits.
NESTED_ERROR = np.array([1.19e-1, 3.39e-2, 9.08e-3, 2.27e-3, 5.43e-4, 1.22e-4, 2.6e-5])


def family(name: str, noise: float, seed: int) -> BlockTables:
    """Log-normal layers and blocks, Dirichlet expert mass, 32 KiB pages, tables included."""
    layers, experts, gate_up, down = FAMILIES[name]
    rng = stream(seed, f"family {name} {noise}")
    blocks = layers * experts * 2
    mass = rng.dirichlet(np.full(experts, 0.5), layers).repeat(2)
    scale = np.exp(0.7 * rng.standard_normal(layers)).repeat(2 * experts) * mass
    scale *= np.exp(0.75 * rng.standard_normal(blocks))
    damage = scale[:, None] * NESTED_ERROR * np.exp(noise * rng.standard_normal((blocks, 7)))
    held = [
        [32768 * block_pages(*shape, bits, page_bytes=32768) for bits in range(2, 9)]
        for shape in (gate_up, down)
    ]
    return block_tables(np.tile(held, (blocks // 2, 1)), damage, range(2, 9))


def brute_force(tables: BlockTables, budget: int, floor: list[int]) -> float:
    levels = range(len(tables.bits))
    return min(
        sum(tables.damage[i, j] for i, j in enumerate(choice))
        for choice in itertools.product(*(levels[f:] for f in floor))
        if sum(tables.bytes_[i, j] for i, j in enumerate(choice)) <= budget
    )


@pytest.fixture(params=ENGINES)
def hull(request: pytest.FixtureRequest) -> HullPlanner:
    return HullPlanner(request.param)


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: f"{case['target']} bytes")
def test_the_optimum_and_the_linear_bound_of_known_cases_are_met(hull, case):
    plan = hull.plan(TABLES, case["target"])
    assert plan.bytes_ <= case["target"]
    assert plan.lp_bound == pytest.approx(case["lp_bound"], rel=1e-12)
    assert plan.damage == pytest.approx(case["optimum"], rel=1e-12)
    assert plan.damage <= case["hull_repair"] + 1e-12
    assert plan.damage == pytest.approx(brute_force(TABLES, case["target"], [0] * 6), rel=1e-12)
    assert plan.is_optimal
    assert plan.gap == pytest.approx(plan.damage / plan.lp_bound - 1)
    assert plan.bits.tolist() == [2 + level for level in plan.level.tolist()]


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: f"{case['target']} bytes")
def test_plain_greedy_gives_the_known_damage(case):
    plan = precision_planner("greedy").plan(TABLES, case["target"])
    assert plan.damage == pytest.approx(case["greedy"], rel=1e-12)
    assert plan.lp_bound == pytest.approx(case["lp_bound"], rel=1e-12)


def test_a_floor_inside_a_pooled_run_still_gives_the_optimum(hull):
    known = CASES["with_floor"]
    plan = hull.plan(TABLES, known["target"], floor_level=np.array(known["floor"]))
    assert plan.damage == pytest.approx(known["optimum"], rel=1e-12)
    assert (plan.level >= known["floor"]).all()
    # 12 -> 11 -> 2: level 1 lies inside the pooled run 0 -> 2 and is the floor
    pooled = block_tables([[3, 4, 6, 8]], [[12.0, 11.0, 2.0, 1.0]], [2, 3, 4, 5])
    assert pooled.next_level[0].tolist() == [2, 2, 3, 3]
    assert hull.plan(pooled, 5, floor_level=np.array([1])).level.tolist() == [1]
    assert hull.plan(pooled, 6, floor_level=np.array([1])).level.tolist() == [2]


@pytest.mark.parametrize("name", PRECISION)
def test_an_infeasible_target_answers_with_the_floors_and_what_lacks(name):
    plan = precision_planner(name).plan(TABLES, int(CASES["infeasible_below"]) - 3)
    assert plan.level.tolist() == [0] * 6
    assert (plan.bytes_, plan.bytes_short) == (14, 3)
    assert precision_planner(name).plan(TABLES, 14).bytes_short == 0


def random_problem(seed: int) -> tuple[BlockTables, int, dict[str, np.ndarray]]:
    """Small odd instances: equal ratios, zero damage and zero weight, steps of no bytes, caps."""
    rng = stream(seed, "random knapsack")
    blocks, levels = int(rng.integers(1, 50)), int(rng.integers(1, 6))
    held = np.cumsum(rng.integers(0, [9, 100_000][seed % 2], (blocks, levels)), axis=1)
    damage = rng.integers(0, 12, (blocks, levels)) if seed % 3 else rng.random((blocks, levels))
    if seed % 4:
        damage = np.sort(damage, axis=1)[:, ::-1]
    tables = block_tables(held, damage, range(2, 2 + levels))
    floor = rng.integers(0, levels, blocks) if seed % 2 else np.zeros(blocks, dtype=np.int64)
    cap = rng.integers(floor, levels) if seed % 5 else np.full(blocks, levels - 1)
    limits = {
        "floor_level": floor,
        "cap_level": cap,
        "multiplier": rng.choice([0.0, 1 / 16, 0.3, 1.0, 2.0], blocks),
    }
    least = held_bytes(tables, floor)
    return tables, int(least + rng.random() * (held_bytes(tables, cap) - least)), limits


def highs(tables: BlockTables, budget: int, limits: dict[str, np.ndarray], *, whole: bool) -> float:
    """Least damage of the knapsack, or of its linear relaxation, by HiGHS."""
    blocks, levels = tables.damage.shape
    level = np.arange(levels)
    allowed = (level >= limits["floor_level"][:, None]) & (level <= limits["cap_level"][:, None])
    rows = np.vstack([np.kron(np.eye(blocks), np.ones(levels)), tables.bytes_.ravel()])
    found = milp(
        (tables.damage * limits["multiplier"][:, None]).ravel(),
        constraints=LinearConstraint(
            rows, np.append(np.ones(blocks), -np.inf), np.append(np.ones(blocks), budget)
        ),
        bounds=Bounds(0, allowed.astype(float).ravel()),
        integrality=np.full(blocks * levels, int(whole)),
        options={"mip_rel_gap": 0.0},
    )
    assert found.status == 0
    return float(found.fun)


@pytest.mark.parametrize("seed", range(60))
def test_optimum_and_bound_equal_those_of_an_integer_programming_solver(seed):
    tables, budget, limits = random_problem(seed)
    plan = HullPlanner("compiled").plan(tables, budget, **limits)
    assert plan.lp_bound == pytest.approx(highs(tables, budget, limits, whole=False), abs=1e-9)
    optimum = highs(tables, budget, limits, whole=True)
    if plan.is_optimal:
        assert plan.damage == pytest.approx(optimum, rel=1e-7, abs=1e-9)
    assert plan.damage >= optimum * (1 - 1e-7) - 1e-9


def exact_by_dynamic_programming(tables: BlockTables, budget_pages: int, page: int) -> float:
    """Least damage for each number of pages, block by block."""
    best = np.full(budget_pages + 1, np.inf)
    best[0] = 0.0
    for held, damage in zip(tables.bytes_ // page, tables.damage, strict=True):
        extended = np.full_like(best, np.inf)
        for pages, harm in zip(held.tolist(), damage.tolist(), strict=True):
            if pages <= budget_pages:
                shifted = best[: len(best) - pages] + harm
                extended[pages:] = np.minimum(extended[pages:], shifted)
        best = extended
    return float(best.min())


@pytest.mark.parametrize("noise", [0.05, 0.6])
@pytest.mark.parametrize("bits", [2.7, 3.5, 5.0])
def test_eighty_blocks_are_planned_as_well_as_by_exact_dynamic_programming(hull, noise, bits):
    whole = family("Qwen1.5-MoE", noise, seed=3)
    few = block_tables(whole.bytes_[:80], whole.damage[:80], whole.bits)
    page = 32768
    pages = int(few.bytes_[:, 0].sum() * bits / 2) // page
    plan = hull.plan(few, pages * page)
    exact = exact_by_dynamic_programming(few, pages, page)
    assert plan.damage == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("noise", [0.05, 0.6])
def test_plans_of_whole_models_are_proved_optimal_and_near_the_linear_bound(name, noise):
    planner, greedy = HullPlanner("compiled"), precision_planner("greedy")
    gaps, greedy_gaps = [], []
    for seed, bits in itertools.product(range(2), (2.5, 3.0, 3.5, 4.0, 5.0)):
        tables = family(name, noise, seed)
        budget = int(tables.bytes_[:, 0].sum() * bits / 2)
        plan = planner.plan(tables, budget)
        assert plan.bytes_ <= budget
        assert plan.is_optimal
        gaps.append(plan.gap)
        greedy_gaps.append(greedy.plan(tables, budget).gap)
    # 512 blocks of 7 and 14 MiB leave gaps that no plan can close
    assert np.mean(gaps) <= (0.001 if name == "Mixtral" else 1e-5)
    assert max(gaps) <= (0.002 if name == "Mixtral" else 1e-4)
    assert all(g <= h + 1e-12 for g, h in zip(gaps, greedy_gaps, strict=True))
    if noise > 0.5:
        assert max(greedy_gaps) > 0.02


@pytest.mark.parametrize("seed", range(60))
def test_both_engines_give_the_same_plan(seed):
    tables, budget, limits = random_problem(seed)
    # small limits make the search stop early and drop states, in both at the same place
    effort = {"max_states": 5, "max_work": 300} if seed % 2 else {}
    a, b = (HullPlanner(engine, **effort).plan(tables, budget, **limits) for engine in ENGINES)
    assert a.level.tolist() == b.level.tolist()
    assert (a.damage, a.lp_bound, a.is_optimal) == (b.damage, b.lp_bound, b.is_optimal)


@pytest.mark.parametrize("name", FAMILIES)
def test_both_engines_give_the_same_plan_of_a_whole_model(name):
    tables = family(name, 0.6, seed=11)
    multiplier = stream(2, name).lognormal(size=tables.num_blocks)
    floor = stream(3, name).integers(0, 3, tables.num_blocks)
    cap = np.maximum(floor, stream(4, name).integers(1, 7, tables.num_blocks))
    limits = {"floor_level": floor, "cap_level": cap, "multiplier": multiplier}
    budget = (held_bytes(tables, floor) + held_bytes(tables, cap)) // 2
    a, b = (HullPlanner(engine).plan(tables, budget, **limits) for engine in ENGINES)
    assert a.level.tolist() == b.level.tolist()
    assert (a.damage, a.lp_bound, a.is_optimal) == (b.damage, b.lp_bound, b.is_optimal)


def test_a_search_cut_short_says_so_and_keeps_the_best_found(hull):
    rng = stream(1, "hard knapsack")
    held = np.cumsum(rng.integers(10_000_000, 20_000_000, (40, 3)), axis=1)
    # damage almost in step with bytes: the hardest kind
    damage = (held[:, -1:] - held) / 1e6 + rng.random((40, 3)) * 1e-3
    tables = block_tables(held, damage, [2, 3, 4])
    budget = int(held[:, 1].sum()) + 1_234_567
    engine = "numpy" if hull._loops is None else "compiled"
    hasty = HullPlanner(engine, max_states=8, max_work=500).plan(tables, budget)
    assert not hasty.is_optimal
    assert hasty.bytes_ <= budget
    assert hasty.damage >= hull.plan(tables, budget).damage >= hasty.lp_bound


def test_equal_blocks_are_raised_in_the_order_of_their_ids(hull):
    tables = block_tables([[1, 2, 3]] * 6, [[5.0, 3.0, 1.0]] * 6, [2, 3, 4])
    assert hull.plan(tables, 10).level.tolist() == [2, 2, 0, 0, 0, 0]


def test_nothing_is_spent_on_a_step_that_saves_no_damage(hull):
    tables = block_tables([[1, 2], [1, 2]], [[0.0, 0.0], [3.0, 0.0]], [2, 3])
    plan = hull.plan(tables, 100)
    assert plan.level.tolist() == [0, 1]
    assert (plan.damage, plan.gap, plan.bytes_) == (0.0, 0.0, 3)


def test_a_wider_width_of_more_damage_is_never_chosen(hull):
    tables = block_tables([[1, 2, 3]], [[5.0, 6.0, 7.0]], [2, 3, 4])
    assert hull.plan(tables, 3).level.tolist() == [0]


BAD_TABLES: dict[str, tuple[Callable[[], BlockTables], str]] = {
    "not finite": (
        lambda: block_tables([[1, 2]], [[1.0, np.nan]], [2, 3]),
        "damage of block 0 at 3 bits must be finite",
    ),
    "negative": (
        lambda: block_tables([[1, 2], [1, 2]], [[1.0, 0], [1.0, -2.0]], [2, 3]),
        "damage of block 1 at 3 bits must be finite and >= 0, found -2.0",
    ),
    "fewer bytes": (
        lambda: block_tables([[4, 2]], [[1.0, 0.0]], [2, 3]),
        "bytes_ of block 0 at 3 bits must be at least that of the width below, found 2",
    ),
    "half a byte": (
        lambda: block_tables([[1.5, 2]], [[1.0, 0.0]], [2, 3]),
        "bytes_ of block 0 at 2 bits must be a whole number, found 1.5",
    ),
    "widths": (lambda: block_tables([[1, 2]], [[1.0, 0.0]], [3, 3]), "bits must be ascending"),
    "shape": (lambda: block_tables([[1, 2]], [[1.0]], [2, 3]), r"damage must be \[num_blocks, 2\]"),
    "blocks": (
        lambda: block_tables([[1, 2]], [[1.0, 0]] * 2, [2, 3]),
        "1 blocks, but damage has 2",
    ),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_that_make_no_sense_are_refused_by_block_and_width(name):
    build, said = BAD_TABLES[name]
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.parametrize("name", PRECISION)
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"floor_level": np.array([0, 0, 0, 4, 0, 0])}, "floor_level of block 3 must be within"),
        ({"cap_level": np.array([3, -1, 3, 3, 3, 3])}, "cap_level of block 1 must be from its"),
        ({"multiplier": np.array([1, 1, 1, 1, np.inf, 1])}, "multiplier of block 4 must be finite"),
        ({"multiplier": np.ones(5)}, "multiplier must have 6 entries"),
        ({"floor_level": np.zeros(6)}, "floor_level must be 6 integers, found float64"),
    ],
)
def test_limits_out_of_range_are_refused_by_block(name, limits, said):
    with pytest.raises(ValueError, match=said):
        precision_planner(name).plan(TABLES, 20, **limits)


def test_an_unknown_planner_or_engine_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"must be one of hull, greedy, .*found 'magic'"):
        precision_planner("magic")
    with pytest.raises(ValueError, match="engine must be auto, compiled or numpy"):
        HullPlanner("fast")  # type: ignore[arg-type]


def test_the_core_search_finds_a_pair_that_no_single_move_replaces():
    # 10 bytes unused at price 1: two moves of 5 bytes lose 1 in all, one of 9 loses 4
    core = Core(
        block_cost=np.array([0.5, 0.5, 3.0]),
        first_move=np.array([0, 1, 2, 3]),
        move_cost=np.array([0.5, 0.5, 3.0]),
        move_bytes=np.array([5, 5, 9]),
        move_block=np.array([0, 1, 2]),
        move_level=np.array([1, 1, 1]),
    )
    moves, proved, _ = core_search(core, 1.0, 10, 100, 1000)
    assert (sorted(moves.tolist()), proved) == ([0, 1], True)


def test_a_core_of_too_many_moves_keeps_the_cheapest_and_says_what_it_left_out():
    reduced = np.array([[np.inf, 0.3, 0.9], [0.1, np.inf, 0.3], [0.3, 0.2, np.inf]])
    held = np.array([[1, 2, 3]] * 3)
    level = np.array([0, 1, 2])
    whole, left_out = core_of(reduced, held, level, 0.9, 6)
    assert (len(whole.move_cost), left_out) == (6, np.inf)
    assert whole.block_cost.tolist() == [0.1, 0.2, 0.3]
    core, left_out = core_of(reduced, held, level, 0.9, 3)
    assert sorted(core.move_cost.tolist()) == [0.1, 0.2, 0.3]
    assert left_out == 0.3
    moves = list(zip(core.move_block.tolist(), core.move_level.tolist(), strict=True))
    assert moves == [(1, 0), (2, 1), (0, 1)]
    assert core.move_bytes.tolist() == [-1, -1, 1]


@pytest.mark.parametrize("name", ["Mixtral", "Qwen1.5-MoE"])
@pytest.mark.parametrize("share", [0.3, 0.5123])
def test_equal_blocks_by_the_thousand_are_planned_as_well_as_by_counting_them(name, share):
    """Two kinds of blocks, all equal: the optimum by HiGHS over how many hold which width."""
    held = family(name, 0.05, 0).bytes_
    tables = block_tables(held, np.tile(NESTED_ERROR, (len(held), 1)), range(2, 9))
    budget = int(held[:, 0].sum() * (1 - share) + held[:, -1].sum() * share)
    of_kind = np.repeat(np.eye(2), 7, axis=1)
    counted = milp(
        np.tile(NESTED_ERROR, 2),
        constraints=LinearConstraint(
            np.vstack([of_kind, held[:2].ravel() / 32768]),
            [len(held) / 2, len(held) / 2, -np.inf],
            [len(held) / 2, len(held) / 2, budget // 32768],
        ),
        integrality=np.ones(14),
        options={"mip_rel_gap": 1e-9},
    )
    assert HullPlanner("compiled").plan(tables, budget).damage == pytest.approx(
        counted.fun, rel=1e-8
    )
