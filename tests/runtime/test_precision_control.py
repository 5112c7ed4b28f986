"""What the precision policy is told of the traffic, and what widths are said to cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.routing_mass import RoutingMass, floor_bits, mass_multipliers
from policies.precision_tables import block_tables
from runtime.precision_control import PrecisionControl

LAYERS, EXPERTS, CHOSEN, TOKENS = 2, 4, 2, 30
BLOCKS = 2 * LAYERS * EXPERTS
LEVELS = (2, 3, 4)


def control(bits: Any = 3, **given: Any) -> PrecisionControl:
    """Over a table at rest whose blocks have these widths."""
    widths = np.broadcast_to(np.asarray(bits, np.int64), BLOCKS).copy()
    mover: Any = SimpleNamespace(
        tables=SimpleNamespace(num_blocks=BLOCKS, bits=widths.astype(np.uint8)),
        table=SimpleNamespace(
            bits=widths,
            desired=widths,
            parts=SimpleNamespace(pages=np.ones((BLOCKS, 3), np.int64)),
            states=SimpleNamespace(state=np.zeros((BLOCKS, 3), np.int8)),
            faults=SimpleNamespace(
                pinned=np.zeros(BLOCKS, np.bool_), retry_step=np.zeros(BLOCKS, np.int64)
            ),
        ),
    )
    arena: Any = SimpleNamespace(page_bytes=1024, ledger=SimpleNamespace(held_pages=lambda _: 5))
    policy: Any = None
    return PrecisionControl(policy, mover, arena, layers=LAYERS, experts=EXPERTS, **given)


def routing(rng: np.random.Generator, tokens: int = TOKENS) -> tuple[Any, Any]:
    """[tokens, CHOSEN] experts, the first ones more often, and their gate weights."""
    scores = rng.random((tokens, EXPERTS)) + np.array([1.0, 0.4, 0.1, 0.0])
    index = np.argsort(-scores, axis=1)[:, :CHOSEN].astype(np.int32)
    return index, rng.random((tokens, CHOSEN)).astype(np.float32)


def calibrated() -> tuple[Any, Any]:
    return np.full((LAYERS, EXPERTS), 0.25), np.full((LAYERS, EXPERTS), 0.1)


def test_traffic_weighs_both_matrices_of_an_expert_against_its_calibration() -> None:
    rng = np.random.default_rng(1)
    told = control(calibrated_mass=calibrated(), hot_coverage=0.6, hot_bits=4)
    alone = RoutingMass(LAYERS, EXPERTS, start=calibrated())
    for _ in range(20):
        seen = [routing(rng) for _ in range(LAYERS)]
        for layer in (1, 0):  # whichever reports first
            told.observe(layer, *seen[layer])
        for layer in range(LAYERS):
            alone.observe(layer, *seen[layer])
    state = told.state(3, 7)
    wanted = mass_multipliers(alone.m2, calibrated()[1])
    assert state.mass_multiplier.reshape(LAYERS, EXPERTS, 2)[..., 0] == pytest.approx(wanted)
    assert state.mass_multiplier.reshape(LAYERS, EXPERTS, 2)[..., 1] == pytest.approx(wanted)
    assert wanted[:, 0].min() > 1.0 > wanted[:, 3].max()
    floors = floor_bits(alone.m1, coverage=0.6, hot_bits=4)
    assert state.hot_floor_bits.tolist() == np.repeat(floors.ravel(), 2).tolist()
    assert state.hot_floor_bits.max() == 4
    assert (state.step, state.forecast_pages, state.kv_pages) == (3, 7, 5)


def test_without_a_calibration_traffic_makes_experts_hot_but_weighs_none() -> None:
    rng = np.random.default_rng(2)
    told = control(hot_coverage=0.6, hot_bits=4)
    assert told.state(0, 0).hot_floor_bits.max() < 4  # nothing seen yet
    for layer in range(LAYERS):
        told.observe(layer, *routing(rng))
    state = told.state(1, 0)
    assert state.mass_multiplier.tolist() == [1.0] * BLOCKS
    assert 0 < (state.hot_floor_bits == 4).sum() < BLOCKS


def test_a_step_that_failed_half_way_counts_nothing() -> None:
    rng = np.random.default_rng(3)
    told, other = control(), control()
    failed, seen = routing(rng), [routing(rng) for _ in range(LAYERS)]
    told.observe(0, *failed)
    for layer in range(LAYERS):
        told.observe(layer, *seen[layer])
        other.observe(layer, *seen[layer])
    assert told.mass.m1.tolist() == other.mass.m1.tolist()
    assert other.mass.m1.any()


def test_gates_that_are_no_numbers_count_as_none() -> None:
    rng = np.random.default_rng(4)
    told, other = control(), control()
    for layer in range(LAYERS):
        index, gate = routing(rng)
        gate[3] = np.nan
        told.observe(layer, index, gate)
        other.observe(layer, index, np.nan_to_num(gate, nan=0.0))
    assert np.isfinite(told.mass.m2).all()
    assert told.mass.m2.tolist() == other.mass.m2.tolist()


def test_a_last_layer_of_fewer_tokens_counts_those() -> None:
    rng = np.random.default_rng(5)
    told, alone = control(), RoutingMass(LAYERS, EXPERTS)
    for layer, tokens in ((0, TOKENS), (1, 4)):
        seen = routing(rng, tokens)
        told.observe(layer, *seen)
        alone.observe(layer, *seen)
    assert told.mass.m1.tolist() == alone.m1.tolist()


def test_quality_is_that_of_the_widths_in_use() -> None:
    rng = np.random.default_rng(6)
    damage = np.sort(rng.random((BLOCKS, len(LEVELS))), axis=1)[:, ::-1]
    rows = [[1024, 2048, 4096]] * BLOCKS
    bits = rng.choice(LEVELS, BLOCKS)
    weights = rng.integers(1, 9, BLOCKS)
    told = control(bits, tables=block_tables(rows, damage, LEVELS), block_weights=weights)
    mean_bits, found = told.quality()
    assert mean_bits == pytest.approx((bits * weights).sum() / weights.sum())
    assert found == pytest.approx(sum(damage[i, bits[i] - 2] for i in range(BLOCKS)))
    assert told.damage_at(3) == pytest.approx(damage[:, 1].sum())
    assert told.damage_at(8) == pytest.approx(damage[:, 2].sum())
    assert control(bits).quality() == (pytest.approx(bits.mean()), 0.0)
    assert control(bits).damage_at(3) == 0.0


def test_blocks_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers of 4 experts have 16 blocks, the mover has 12"):
        other: Any = SimpleNamespace(tables=SimpleNamespace(num_blocks=12))
        PrecisionControl(None, other, None, layers=LAYERS, experts=EXPERTS)  # type: ignore[arg-type]
