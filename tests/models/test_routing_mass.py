"""Moving routing mass, its multipliers and hot experts: reference values and laws."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.routing_mass import RoutingMass, floor_bits, hot_experts, mass_multipliers

GOLDEN = Path(__file__).parent.parent / "golden" / "pagedweight_cases.json"
CASE: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))["routing"]


def observed() -> RoutingMass:
    mass = RoutingMass(1, 4, half_life_tokens=CASE["half_life_tokens"])
    for step in CASE["steps"]:
        mass.observe(0, step["idx"], step["w"])
    return mass


def test_the_routing_case() -> None:
    mass = observed()
    np.testing.assert_allclose(mass.m1[0], CASE["m1"], rtol=1e-12)
    np.testing.assert_allclose(mass.m2[0], CASE["m2"], rtol=1e-12)


def test_the_floor_cases() -> None:
    m1 = observed().m1
    assert floor_bits(m1, coverage=0.5)[0].tolist() == CASE["floor_cov50"]
    assert floor_bits(m1, coverage=0.9)[0].tolist() == CASE["floor_cov90"]


def test_the_multiplier_case_with_its_clip() -> None:
    case = CASE["multiplier_vs"]
    found = mass_multipliers(observed().m2[0], case["calib"], gamma=case["gamma"])
    np.testing.assert_allclose(found, case["value"], rtol=1e-12)


def test_a_mass_is_halved_by_as_many_tokens_as_the_half_life() -> None:
    mass = RoutingMass(
        2, 3, half_life_tokens=64, start=(np.full((2, 3), 0.5), np.full((2, 3), 0.25))
    )
    for _ in range(64):
        mass.observe(1, [[0]], [[1.0]])
    np.testing.assert_allclose(mass.m1[1], [0.75, 0.25, 0.25], rtol=1e-12)
    np.testing.assert_allclose(mass.m2[1], [0.625, 0.125, 0.125], rtol=1e-12)
    np.testing.assert_array_equal(mass.m1[0], 0.5)


def test_steady_traffic_gives_its_own_means() -> None:
    mass = RoutingMass(1, 2, half_life_tokens=8)
    for _ in range(40):
        mass.observe(0, [[0, 1], [0, 1]], [[0.75, 0.25], [0.25, 0.75]])
    np.testing.assert_allclose(mass.m1[0], [0.5, 0.5], rtol=1e-3)
    np.testing.assert_allclose(mass.m2[0], [0.3125, 0.3125], rtol=1e-3)


@given(parts=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_like_tokens_count_the_same_however_they_are_cut_into_steps(parts: list[int]) -> None:
    whole, cut = (RoutingMass(1, 3, half_life_tokens=10) for _ in range(2))
    token = ([[2, 0]], [[0.8, 0.2]])
    total = sum(parts)
    whole.observe(0, token[0] * total, token[1] * total)
    for size in parts:
        cut.observe(0, token[0] * size, token[1] * size)
    np.testing.assert_allclose(cut.m2, whole.m2, rtol=1e-12)


def test_no_token_changes_nothing() -> None:
    mass = observed()
    before = mass.m2.copy()
    mass.observe(0, np.zeros((0, 2), dtype=int), np.zeros((0, 2)))
    np.testing.assert_array_equal(mass.m2, before)


@given(
    tenths=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    percent=st.sampled_from([0, 10, 25, 30, 50, 70, 75, 90, 100]),
    unit=st.sampled_from([1.0, 0.1, 0.01, 0.3, 1e-9]),
    kind=st.sampled_from([np.float64, np.float32]),
)
def test_the_hot_set_is_the_smallest_that_covers(
    tenths: list[int], percent: int, unit: float, kind: Any
) -> None:
    hot = hot_experts(np.array(tenths, dtype=kind) * kind(unit), percent / 100)
    whole = np.array(tenths)  # judged in whole numbers, where nothing is rounded
    wanted = percent * whole.sum()
    assert 100 * whole[hot].sum() >= wanted
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(whole)), size) for size in range(len(whole) + 1)
    )
    assert hot.sum() == min(len(s) for s in subsets if 100 * whole[list(s)].sum() >= wanted)


def test_exactly_half_in_decimals_is_half() -> None:
    hot = hot_experts([1.4, 0.4, 1.8, 0.4, 1.1, 1.5], 0.5)  # 1.8 + 1.5 = 6.6 / 2
    assert hot.tolist() == [False, False, True, False, False, True]


def test_an_expert_counts_however_small_its_mass_above_rounding() -> None:
    assert hot_experts([1.0, 1e-12, 0.0], 1.0).tolist() == [True, True, False]


def test_ties_go_to_the_lower_index_and_layers_are_apart() -> None:
    hot = hot_experts([[0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]], 0.5)
    assert hot.tolist() == [[True, True, False, False], [False] * 4]


def test_gamma_zero_switches_the_multiplier_off() -> None:
    np.testing.assert_array_equal(mass_multipliers([0.0, 3.0], [1.0, 0.0], gamma=0.0), 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RoutingMass(0, 4), "must be > 0"),
        (lambda: RoutingMass(1, 4, half_life_tokens=0.0), "must be > 0"),
        (lambda: RoutingMass(1, 4, start=(np.zeros(4), np.zeros(4))), r"two \[1, 4\]"),
        (lambda: RoutingMass(1, 4).observe(0, [[4]], [[1.0]]), "within 0..3"),
        (lambda: RoutingMass(1, 4).observe(0, [[1, 2]], [[1.0]]), r"\[T, k\]"),
        (lambda: hot_experts([1.0], 1.5), "coverage"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_all_layers_at_once_give_the_numbers_of_layer_by_layer():
    rng = np.random.default_rng(8)
    together, apart = RoutingMass(3, 5), RoutingMass(3, 5)
    for tokens in (1, 7, 0, 30):
        index = rng.integers(0, 5, (3, tokens, 2))
        gate = rng.random((3, tokens, 2))
        together.observe_layers(index, gate)
        for layer in range(3):
            apart.observe(layer, index[layer], gate[layer])
    np.testing.assert_array_equal(together.m1, apart.m1)
    np.testing.assert_array_equal(together.m2, apart.m2)
    with pytest.raises(ValueError, match=r"must be within 0\.\.4, found 0\.\.5"):
        together.observe_layers(np.array([[[0, 5]]] * 3), np.ones((3, 1, 2)))
    with pytest.raises(ValueError, match=r"must be \[3, T, k\]"):
        together.observe_layers(np.zeros((2, 1, 2), int), np.ones((2, 1, 2)))
