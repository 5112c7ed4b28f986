"""The precision planner: time, gap to the linear bound, damage against uniform widths.

    nice python benchmarks/planner.py [--data DIR] [--out FILE.json]

Instances are whole models: bytes from the shapes with tables and pages of 32 KiB; damage from the
errors of nested k-means on Gaussian rows times log-normal layers (sigma 0.7) and blocks (0.75) and
Dirichlet(0.5) expert mass; noise of 0.05 (near-convex curves) or 0.6 (not convex) on every width.
The last sections take expert counts measured on Qwen3-30B-A3B and OLMoE from DIR.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.llm_catalog import load_llm
from models.plane_bytes import DEFAULT_PAGE_BYTES, pages_of, plane_bytes, table_bytes
from models.routing_mass import mass_multipliers
from models.streams import stream
from policies.catalog import PRECISION, precision_planner
from policies.orders import PrecisionPlan
from policies.precision import PrecisionPolicy
from policies.precision_moves import Movable, exchanges
from policies.precision_plan import HullPlanner, compiled_loops, threshold_cut
from policies.precision_problem import bytes_at, held_bytes, problem
from policies.precision_state import PrecisionState
from policies.precision_tables import BlockTables, block_tables
from traces.whole_file import write_whole

RESULTS = Path(__file__).parent / "results" / "planner.json"
DATA = Path(
    os.environ.get("SERVING_TWIN_DATA", Path(__file__).parent.parent.parent / "shared/data")
)
FAMILIES = ("qwen1.5-moe-a2.7b", "gemma-4-26b-a4b", "mixtral-8x7b", "qwen3-30b-a3b")
ALL_BITS = tuple(range(2, 9))
# Relative error of nested k-means, seed 3, on Gaussian rows of 2,048 at 2..8 bits.
NESTED_ERROR = dict(
    zip(ALL_BITS, (1.19e-1, 3.39e-2, 9.08e-3, 2.27e-3, 5.43e-4, 1.22e-4, 2.6e-5), strict=True)
)
BUDGET_BITS = (2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
REPETITIONS = 15
SEEDS = 4


def sizes(name: str, bits: Sequence[int] = ALL_BITS) -> np.ndarray:
    """[num_blocks, num_levels] bytes of a model's blocks, (layer, expert, gate_up | down).

    Resident are the planes and the tables of the widths up to the block's own.
    """
    shape = load_llm(name)
    rows = []
    for moe in shape.moe_layers:
        hidden, inner = shape.hidden_size, moe.intermediate_size
        one = [
            [pages_at(*block, q, bits) for q in bits]
            for block in ((2 * inner, hidden), (hidden, inner))
        ]
        rows.append(np.tile(one, (moe.num_experts, 1)))
    return np.concatenate(rows) * DEFAULT_PAGE_BYTES


def pages_at(rows: int, columns: int, q: int, bits: Sequence[int]) -> int:
    """Pages of a block at q bits that may be held at ``bits`` only."""
    streams = [plane_bytes(rows, columns)] * q + [table_bytes(rows, b) for b in bits if b <= q]
    return sum(pages_of(stream_bytes, DEFAULT_PAGE_BYTES) for stream_bytes in streams)


def budget_of(held: np.ndarray, bits: float) -> int:
    """Bytes at which the blocks hold so many bits on average, between two uniform widths."""
    return int(np.interp(bits, ALL_BITS, held.sum(axis=0)))


def scales(name: str, seed: int) -> np.ndarray:
    """[num_blocks] sensitivity without expert mass: layers and blocks."""
    shape = load_llm(name).moe_layers
    rng = stream(seed, f"planner benchmark {name}")
    experts = shape[0].num_experts
    layer = np.exp(0.7 * rng.standard_normal(len(shape))).repeat(2 * experts)
    return layer * np.exp(0.75 * rng.standard_normal(len(layer)))


def instance(name: str, noise: float, seed: int, bits: Sequence[int] = ALL_BITS) -> BlockTables:
    """A whole model with synthetic damage; the same damage for every set of widths."""
    shape = load_llm(name).moe_layers
    rng = stream(seed, f"planner damage {name} {noise}")
    mass = rng.dirichlet(np.full(shape[0].num_experts, 0.5), len(shape)).repeat(2)
    error = np.array(list(NESTED_ERROR.values())) * np.exp(
        noise * rng.standard_normal((len(mass), len(ALL_BITS)))
    )
    damage = (scales(name, seed) * mass)[:, None] * error
    return block_tables(sizes(name, bits), damage[:, [q - 2 for q in bits]], bits)


def timed_ms(run: Callable[[], object], repetitions: int = REPETITIONS) -> dict[str, float]:
    """Median and range of CPU milliseconds."""
    run()
    found = []
    for _ in range(repetitions):
        begin = time.process_time()
        run()
        found.append(1e3 * (time.process_time() - begin))
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def heap_greedy(tables: BlockTables, budget: int) -> None:
    """The rule as usually written: a heap of every block's next step, in plain Python."""
    held, damage = tables.bytes_.tolist(), tables.damage.tolist()
    level = [tables.top_level] * len(held)
    excess = sum(row[-1] for row in held) - budget

    def entry(i: int) -> tuple[float, int]:
        j = level[i]
        return (damage[i][j - 1] - damage[i][j]) / (held[i][j] - held[i][j - 1]), i

    heap = [entry(i) for i in range(len(held))]
    heapq.heapify(heap)
    while excess > 0:
        _, i = heapq.heappop(heap)
        excess -= held[i][level[i]] - held[i][level[i] - 1]
        level[i] -= 1
        if level[i]:
            heapq.heappush(heap, entry(i))


def sorted_cut(tables: BlockTables, budget: int) -> None:
    """The threshold by a full sort of all hull steps, in numpy."""
    ratio = tables.ratio.ravel()
    step_bytes = np.take_along_axis(tables.bytes_, tables.next_level, axis=1) - tables.bytes_
    order = np.argsort(-ratio, kind="stable")
    np.searchsorted(np.cumsum(step_bytes.ravel()[order]), budget)


def times(name: str) -> dict[str, Any]:
    """CPU time of the cut alone and of whole plans, beside the time to read the tables once."""
    tables = instance(name, 0.6, 0)
    budget = budget_of(tables.bytes_, 3.5)
    asked = problem(tables, budget, None, None, np.ones(tables.num_blocks))
    loops = compiled_loops("compiled")
    fast, plain, greedy = HullPlanner("compiled"), HullPlanner("numpy"), precision_planner("greedy")
    weight = stream(0, "multiplier").lognormal(size=tables.num_blocks)
    caps = np.full(tables.num_blocks, tables.top_level - 1)
    read = (tables.bytes_, tables.damage, tables.ratio, tables.next_level)
    floor = timed_ms(lambda: [np.add.reduce(table, axis=None) for table in read])
    found = {
        "blocks": tables.num_blocks,
        "floor: tables read once": floor,
        "cut, compiled": timed_ms(lambda: threshold_cut(loops, asked)),
        "cut, numpy": timed_ms(lambda: threshold_cut(None, asked)),
        "cut by a full sort, numpy": timed_ms(lambda: sorted_cut(tables, budget)),
        "hull plan, compiled": timed_ms(lambda: fast.plan(tables, budget, multiplier=weight)),
        "hull plan with caps, compiled": timed_ms(
            lambda: fast.plan(tables, budget, multiplier=weight, cap_level=caps)
        ),
        "hull plan, numpy": timed_ms(lambda: plain.plan(tables, budget, multiplier=weight)),
        "greedy plan, numpy": timed_ms(lambda: greedy.plan(tables, budget, multiplier=weight)),
        "greedy by a Python heap": timed_ms(lambda: heap_greedy(tables, budget), 3),
    }
    found["hull plan over floor"] = found["hull plan, compiled"]["median"] / floor["median"]
    return found


def decision_times(name: str = FAMILIES[-1]) -> dict[str, Any]:
    """CPU time of one call of the whole policy, by what it decides."""
    tables = instance(name, 0.05, 0)
    plan = HullPlanner().plan(tables, budget_of(tables.bytes_, 3.5))
    weights = plan.bytes_ // DEFAULT_PAGE_BYTES
    arena, blocks = int(weights / 0.8), tables.num_blocks
    state = PrecisionState(
        step=0,
        bits=plan.bits,
        desired_bits=plan.bits,
        hot_floor_bits=np.full(blocks, 2),
        pinned=np.zeros(blocks, dtype=bool),
        retry_step=np.zeros(blocks, dtype=np.int64),
        mass_multiplier=stream(0, "mass").lognormal(0.0, 0.1, blocks),
        prompt_multiplier=np.ones(blocks),
        kv_pages=arena - weights - arena // 10,
        forecast_pages=0,
        copying_bytes=0,
    )
    short = replace(state, kv_pages=arena - weights)
    found = {}
    for label, told, now in (
        ("nothing due", state, 0.0),
        ("shrink", short, 0.0),
        ("exchange", state, 9.0),
    ):

        def decide(told: PrecisionState = told, now: float = now) -> str:
            policy = PrecisionPolicy(tables, arena_pages=arena, page_bytes=DEFAULT_PAGE_BYTES)
            return policy.decide(told, now=now).reason

        assert decide() == ("none" if label == "nothing due" else label)
        found[f"{label}, {blocks} blocks"] = timed_ms(decide)
    return found


def gaps(name: str, noise: float) -> dict[str, Any]:
    """Loss against the linear bound, over budgets and seeds."""
    found: dict[str, list[float]] = {planner: [] for planner in PRECISION}
    proved = 0
    for seed in range(SEEDS):
        tables = instance(name, noise, seed)
        for bits in BUDGET_BITS:
            plans = _plans(tables, budget_of(tables.bytes_, bits))
            proved += plans["hull"].is_optimal
            for planner, plan in plans.items():
                found[planner].append(plan.gap)
    result: dict[str, Any] = {
        planner: {"mean": float(np.mean(some)), "most": max(some)}
        for planner, some in found.items()
    }
    return result | {"hull proved optimal": proved / (SEEDS * len(BUDGET_BITS))}


def _plans(tables: BlockTables, budget: int) -> dict[str, PrecisionPlan]:
    return {name: precision_planner(name).plan(tables, budget) for name in PRECISION}


def against_uniform(name: str) -> dict[str, Any]:
    """Damage of a uniform plan over the planned one, same bytes; fractions by block order."""
    found: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        tables = instance(name, 0.05, seed)
        for bits in BUDGET_BITS:
            plans = _plans(tables, budget_of(tables.bytes_, bits))
            ratio = plans["uniform_remainder"].damage / plans["hull"].damage
            found.setdefault(str(bits), []).append(ratio)
    return {bits: statistics.mean(some) for bits, some in found.items()}


def level_sets(name: str = FAMILIES[0]) -> dict[str, Any]:
    """Planned damage with fewer widths over that with all of 2..8, at equal bytes."""
    sets = {"2 3 4 6 8": (2, 3, 4, 6, 8), "2 4 8": (2, 4, 8), "3..8": (3, 4, 5, 6, 7, 8)}
    sets |= {"2..6": (2, 3, 4, 5, 6)}
    planner = HullPlanner()
    found: dict[str, Any] = {}
    for label, bits in sets.items():
        for budget_bits in (3.0, 3.1, 3.5, 4.0, 4.5, 5.0, 6.0):
            ratios = []
            for seed in range(SEEDS):
                full = instance(name, 0.05, seed)
                budget = budget_of(full.bytes_, budget_bits)
                plan = planner.plan(instance(name, 0.05, seed, bits), budget)
                if not plan.bytes_short:
                    ratios.append(plan.damage / planner.plan(full, budget).damage - 1.0)
            found.setdefault(label, {})[str(budget_bits)] = (
                statistics.mean(ratios) if ratios else "infeasible"
            )
    return found


def exchange_margins(name: str = FAMILIES[0], ticks: int = 25) -> dict[str, Any]:
    """Bytes raised a tick and damage over a fresh plan while expert masses drift, 3.5 bits."""
    tables = instance(name, 0.05, 0)
    planner, budget = HullPlanner(), budget_of(tables.bytes_, 3.5)
    experts = load_llm(name).moe_layers[0].num_experts
    found = {}
    for margin in (0.0, 0.1, 0.25, 0.5, 1.0):
        rng = stream(1, "drift")
        log_mass = np.zeros(tables.num_blocks // 2)
        level = planner.plan(tables, budget).level
        raised = fresh = harm = 0.0
        for _ in range(ticks):
            log_mass = 0.95 * log_mass + 0.1 * rng.standard_normal(len(log_mass))
            by_layer = np.exp(log_mass).reshape(-1, experts)
            weight = (by_layer / by_layer.mean(axis=1, keepdims=True)).ravel().repeat(2)
            plan = planner.plan(tables, budget, multiplier=weight)
            everywhere = np.ones(tables.num_blocks, dtype=bool)
            movable = Movable(level, np.zeros_like(level), everywhere, everywhere, weight)
            after = exchanges(
                planner, tables, movable, margin=margin, link_bytes=2**60, engine="auto"
            )
            more = bytes_at(tables, after) - bytes_at(tables, level)
            raised += float(np.maximum(more, 0).sum())
            level = after
            harm += float(tables.damage[np.arange(len(level)), level] @ weight)
            fresh += plan.damage
        found[str(margin)] = {"MB a tick": raised / ticks / 1e6, "damage over fresh": harm / fresh}
    return found


def measured_counts(data: Path) -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
    """Case -> model, [L, E] counts at calibration, [L, E] counts met."""
    cases = {}
    file = data / "moe-qwen3-30b-a3b" / "coactivation_qwen3-30b-a3b.json.gz"
    if file.exists():
        heat = [layer["heat"] for layer in json.loads(gzip.decompress(file.read_bytes()))["layers"]]
        met = np.array(heat, dtype=np.float64)
        cases["Qwen3-30B-A3B, nothing known of routing"] = ("qwen3-30b-a3b", met * 0 + 1, met)
    counts = {}
    for text in ("c4", "github", "wikipedia"):
        file = data / "moe-olmoe" / f"olmoe-expert_counts-{text}.json.gz"
        if file.exists():
            layers = json.loads(gzip.decompress(file.read_bytes()))
            counts[text] = np.array([[layer.get(str(e), 0) for e in range(64)] for layer in layers])
    for text in ("github", "wikipedia"):
        if "c4" in counts and text in counts:
            label = f"OLMoE layers 0, 7, 15: calibrated on c4, serving {text}"
            cases[label] = ("olmoe-1b-7b", counts["c4"].astype(float), counts[text].astype(float))
    return cases


def measured_routing(data: Path) -> dict[str, Any]:
    """Damage under measured expert load at 3.0 and 3.5 bits: who knows the load, who does not."""
    planner, found = HullPlanner(), {}
    for label, (name, calibrated, met) in measured_counts(data).items():
        then, now = (c / c.sum(axis=1, keepdims=True) for c in (calibrated, met))
        blocks = 2 * then.size
        scale = scales(name, 0)[:blocks] * then.ravel().repeat(2)
        damage = scale[:, None] * np.array(list(NESTED_ERROR.values()))
        tables = block_tables(sizes(name)[:blocks], damage, ALL_BITS)
        weight = (now.ravel() / np.maximum(then.ravel(), 1e-9)).repeat(2)
        told = mass_multipliers(now, then).ravel().repeat(2)
        for bits in (3.0, 3.5):
            budget = budget_of(tables.bytes_, bits)
            levels = {
                "uniform": precision_planner("uniform_remainder").plan(tables, budget).level,
                "planned, load as calibrated": planner.plan(tables, budget).level,
                "planned with routing multipliers": planner.plan(
                    tables, budget, multiplier=told
                ).level,
            }
            best = planner.plan(tables, budget, multiplier=weight)
            assert held_bytes(tables, best.level) <= budget
            rows = np.arange(blocks)
            found[f"{label}, {bits} bits"] = {
                who: float(tables.damage[rows, level] @ weight) / best.damage
                for who, level in levels.items()
            } | {"gap of the best": best.gap, "proved": best.is_optimal}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, one core",
        "CPU ms": {name: times(name) for name in FAMILIES},
        "CPU ms of a decision": decision_times(),
        "gap to the linear bound": {
            f"{name}, noise {noise}": gaps(name, noise)
            for name in FAMILIES
            for noise in (0.05, 0.6)
        },
        "uniform over planned damage": {name: against_uniform(name) for name in FAMILIES},
        "level sets, damage over all widths - 1": level_sets(),
        "exchange margin": exchange_margins(),
        "measured routing, damage over the best plan": measured_routing(options.data),
    }
    for title, section in results.items():
        print(f"\n{title}")
        for label, row in section.items() if isinstance(section, dict) else [("", section)]:
            print(f"  {label}: {_short(row)}")
    write_whole(options.out, (json.dumps(results, indent=1) + "\n").encode())


def _short(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        return f"{value['median']:.2f} ({value['least']:.2f}..{value['most']:.2f})"
    if isinstance(value, dict):
        return "; ".join(f"{key} {_short(entry)}" for key, entry in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
