"""Nested k-means against stored values, brute force over all cuts, and its own identities."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.nested_kmeans import RowError, quantize_rows, sorted_columns

CASES = json.loads(
    (Path(__file__).parents[1] / "golden" / "pagedweight_cases.json").read_text("utf-8")
)


def squared_error(values: np.ndarray, mass: np.ndarray) -> float:
    if mass.sum() == 0:
        return 0.0
    mean = (mass * values).sum() / mass.sum()
    return float((mass * (values - mean) ** 2).sum())


def best_cuts(values: np.ndarray, mass: np.ndarray, cells: int) -> float:
    """Least squared error of a sorted row in at most ``cells`` intervals: every choice tried."""
    size = len(values)
    inner = min(cells, size) - 1
    return min(
        sum(squared_error(values[a:b], mass[a:b]) for a, b in itertools.pairwise((0, *cuts, size)))
        for cuts in itertools.combinations(range(1, size), inner)
    )


def split_by_formula(values: np.ndarray, mass: np.ndarray) -> int:
    """The split of the definition: prefix sums from the first value, smallest best m."""
    if len(values) < 2:
        return len(values)
    masses = np.concatenate([[0.0], np.cumsum(mass)])
    sums = np.concatenate([[0.0], np.cumsum(mass * (values - values[0]))])
    gains = []
    for m in range(1, len(values)):
        left = sums[m] ** 2 / masses[m] if masses[m] > 0 else 0.0
        rest = masses[-1] - masses[m]
        gains.append(left + ((sums[-1] - sums[m]) ** 2 / rest if rest > 0 else 0.0))
    return 1 + int(np.argmax(np.array(gains) >= max(gains) * (1 - 1e-13)))


def relative_error(
    weights: np.ndarray, sensitivity: np.ndarray, reconstruction: np.ndarray
) -> float:
    lost = (sensitivity * (weights - reconstruction) ** 2).sum()
    return float(lost / (sensitivity * weights**2).sum())


@pytest.mark.parametrize("name", ["nested_row", "nested_row_seed3_merge2"])
def test_codes_and_tables_are_the_stored_ones(name: str) -> None:
    case: dict[str, Any] = CASES[name]
    rows = quantize_rows(
        np.array([case["row"]]),
        np.array(case["sensitivity"]),
        parent_bits=case["parent_bits"],
        seed_bits=case["seed_bits"],
        min_bits=case.get("qmin", case["seed_bits"]),
    )
    assert rows.codes[0].tolist() == case["codes"]
    assert sorted(rows.tables) == sorted(int(bits) for bits in case["luts"])
    for bits, table in case["luts"].items():
        np.testing.assert_allclose(rows.tables[int(bits)][0], table, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["error_gauss", "error_t4"])
def test_errors_are_the_stored_ones(name: str) -> None:
    case: dict[str, Any] = CASES[name]
    draws = np.random.default_rng(7)
    if name == "error_gauss":
        weights = draws.standard_normal((6, 512))
    else:
        weights = draws.standard_t(4, (6, 512))
    sensitivity = np.exp(draws.standard_normal((6, 512)))
    rows = quantize_rows(weights, sensitivity, seed_bits=2)
    for bits, stored in case["rel_weighted_error"].items():
        error = relative_error(weights, sensitivity, rows.reconstruct(int(bits)))
        assert error <= stored * (1 + 1e-9)
        if bits == "2":
            assert error == pytest.approx(stored, rel=1e-6)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_the_seed_is_the_best_of_all_cuts(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    seed_bits = data.draw(st.integers(1, 3))
    value = st.floats(-100, 100, width=32, allow_subnormal=False) | st.integers(-3, 3).map(float)
    values = data.draw(st.lists(value, min_size=size, max_size=size))
    mass = data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=size, max_size=size))
    weights = np.array([values])
    sensitivity = np.array([mass]) if any(mass) else np.ones((1, size))
    rows = quantize_rows(weights, np.array([mass]), seed_bits=seed_bits, min_bits=seed_bits)
    order = np.argsort(weights[0], kind="stable")
    best = best_cuts(weights[0][order], sensitivity[0][order], 1 << seed_bits)
    found = float((sensitivity * (weights - rows.reconstruct(seed_bits)) ** 2).sum())
    assert found == pytest.approx(best, rel=1e-9, abs=1e-9)


def quadratic_program(values: np.ndarray, mass: np.ndarray, cells: int) -> float:
    """Least squared error of a sorted row in at most ``cells`` intervals, every end and cut."""
    size = len(values)
    centred = values - np.average(values, weights=mass)
    masses = np.concatenate([[0.0], np.cumsum(mass)])
    sums = np.concatenate([[0.0], np.cumsum(mass * centred)])
    squares = np.concatenate([[0.0], np.cumsum(mass * centred**2)])
    span = masses[None] - masses[:, None]
    span[np.tril_indices(size + 1)] = 1.0  # no interval: not looked at
    cost = squares[None] - squares[:, None] - (sums[None] - sums[:, None]) ** 2 / span
    cost[np.tril_indices(size + 1, -1)] = np.inf
    best = cost[0]
    for _ in range(cells - 1):
        best = (best[:, None] + cost).min(axis=0)
    return float(best[-1])


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 90),
    st.integers(1, 5),
    st.sampled_from(["normal", "heavy", "clumps", "whole numbers"]),
)
def test_the_seed_is_that_of_the_quadratic_dynamic_program(
    seed: int, size: int, seed_bits: int, kind: str
) -> None:
    draws = np.random.default_rng(seed)
    values = {
        "normal": draws.standard_normal(size),
        "heavy": draws.standard_cauchy(size),
        "clumps": draws.integers(0, 9, size) + 0.01 * draws.standard_normal(size),
        "whole numbers": draws.integers(-9, 9, size).astype(float),
    }[kind]
    mass = np.exp(2 * draws.standard_normal(size))
    rows = quantize_rows(values[None], mass, seed_bits=seed_bits, min_bits=seed_bits)
    order = np.argsort(values)
    best = quadratic_program(values[order], mass[order], 1 << seed_bits)
    found = float((mass * (values - rows.reconstruct(seed_bits)[0]) ** 2).sum())
    scale = float((mass * (values - np.average(values, weights=mass)) ** 2).sum())
    assert found <= best * (1 + 1e-9) + 1e-11 * scale


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(4, 60))
def test_every_cell_is_split_at_the_first_best_place(seed: int, size: int) -> None:
    draws = np.random.default_rng(seed)
    weights = np.round(draws.standard_normal((1, size)), 1)  # repeated values
    mass = draws.integers(0, 3, (1, size)).astype(float)
    rows = quantize_rows(weights, mass, parent_bits=5, seed_bits=2)
    own = mass[0] if mass.any() else np.ones(size)
    order = np.argsort(weights[0], kind="stable")
    codes = rows.codes[0][order]
    for bits in range(2, 5):
        for cell in range(1 << bits):
            inside = order[codes >> (5 - bits) == cell]
            children = rows.codes[0][inside] >> (5 - bits - 1)
            m = int((children == 2 * cell).sum())
            assert m == split_by_formula(weights[0][inside], own[inside])


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 300),
    st.integers(1, 4),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
)
def test_a_step_costs_the_distance_between_reconstructions(
    seed: int, columns: int, seed_bits: int, unit: float
) -> None:
    """Pythagoras: |W - W_(q-1)|^2 = |W - W_q|^2 + |W_q - W_(q-1)|^2 in the weighted norm."""
    draws = np.random.default_rng(seed)
    weights = unit * (draws.standard_t(3, (3, columns)) + draws.integers(-5, 5))
    sensitivity = np.exp(3 * draws.standard_normal((3, columns))) * draws.integers(0, 2, (3, 1))
    rows = quantize_rows(weights, sensitivity, seed_bits=seed_bits, min_bits=1)
    mass = np.where(sensitivity.any(1, keepdims=True), sensitivity, 1.0)
    norm = (mass * (weights / unit) ** 2).sum()
    for bits in range(2, 9):
        wide, narrow = rows.reconstruct(bits) / unit, rows.reconstruct(bits - 1) / unit
        outer = (mass * (weights / unit - narrow) ** 2).sum()
        inner = (mass * (weights / unit - wide) ** 2).sum()
        step = (mass * (wide - narrow) ** 2).sum()
        assert abs(outer - inner - step) <= 1e-9 * outer + 1e-15 * norm


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_occupied_cells_ascend_and_all_stay_inside_the_row(seed: int, columns: int) -> None:
    weights = np.random.default_rng(seed).standard_normal((4, columns)).round(1)
    rows = quantize_rows(weights.astype(np.float32), min_bits=1)
    low, high = weights.min(1, keepdims=True), weights.max(1, keepdims=True)
    for bits, table in rows.tables.items():
        ascending = np.sort(rows.reconstruct(bits), axis=1)
        along_row = np.take_along_axis(rows.reconstruct(bits), weights.argsort(1), axis=1)
        np.testing.assert_array_equal(along_row, ascending)
        assert (table >= low - 1e-6).all() and (table <= high + 1e-6).all()


def test_fewer_distinct_values_than_cells_are_kept_exactly() -> None:
    weights = np.array([[1.5, -2.0, 1.5, 0.0, -2.0, 1.5, 0.0, 1.5, -2.0, 0.0, 1.5, 0.0]])
    rows = quantize_rows(weights)
    for bits in range(3, 9):
        np.testing.assert_array_equal(rows.reconstruct(bits), weights)


@pytest.mark.parametrize("value", [0.0, 3.25, -1e-20])
def test_a_constant_row_is_kept_exactly_at_every_width(value: float) -> None:
    rows = quantize_rows(np.full((2, 50), value))
    for bits, table in rows.tables.items():
        np.testing.assert_array_equal(table, value)
        np.testing.assert_array_equal(rows.reconstruct(bits), value)


def test_a_row_shorter_than_the_cells_is_kept_exactly() -> None:
    weights = np.array([[4.0, -1.0, 2.0], [0.5, 0.5, 0.25]])
    rows = quantize_rows(weights)
    for bits in range(2, 9):
        np.testing.assert_array_equal(rows.reconstruct(bits), weights)
        assert np.isfinite(rows.tables[bits]).all()


def test_a_row_without_sensitivity_is_clustered_with_ones() -> None:
    weights = np.random.default_rng(3).standard_normal((2, 100))
    sensitivity = np.stack([np.zeros(100), np.ones(100)])
    plain = quantize_rows(weights)
    rows = quantize_rows(weights, sensitivity)
    np.testing.assert_array_equal(rows.codes, plain.codes)


def test_a_cell_without_sensitivity_takes_its_plain_mean() -> None:
    weights = np.array([[0.0, 1.0, 10.0, 11.0, 12.0, 13.0]])
    sensitivity = np.array([0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    rows = quantize_rows(weights, sensitivity, parent_bits=2, seed_bits=2, min_bits=1)
    codes = rows.codes[0]
    for bits, table in rows.tables.items():
        for cell in set((codes >> (2 - bits)).tolist()):
            inside = codes >> (2 - bits) == cell
            mass = sensitivity[inside] if sensitivity[inside].any() else None
            expected = np.average(weights[0][inside], weights=mass)
            assert table[0, cell] == pytest.approx(expected, rel=1e-12)


def test_one_element_keeps_the_left_child_and_the_right_takes_the_parents_centroid() -> None:
    rows = quantize_rows(np.array([[2.5, -1.0]]), parent_bits=3, seed_bits=1, min_bits=1)
    assert rows.codes.tolist() == [[4, 0]]
    assert rows.tables[3].tolist() == [[-1.0] * 4 + [2.5] * 4]


def test_scaling_weights_or_sensitivities_changes_no_code() -> None:
    draws = np.random.default_rng(11)
    weights, sensitivity = draws.standard_normal((3, 200)), np.exp(draws.standard_normal((3, 200)))
    codes = quantize_rows(weights, sensitivity).codes
    np.testing.assert_array_equal(quantize_rows(weights * 2.0**200, sensitivity).codes, codes)
    np.testing.assert_array_equal(quantize_rows(weights, sensitivity * 2.0**-300).codes, codes)


def test_threads_give_the_same_result() -> None:
    weights = np.random.default_rng(5).standard_normal((37, 130)).astype(np.float32)
    one, three = quantize_rows(weights), quantize_rows(weights, threads=3)
    np.testing.assert_array_equal(one.codes, three.codes)
    for bits, table in one.tables.items():
        np.testing.assert_array_equal(table, three.tables[bits])


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_single_precision_rows_are_sorted_as_a_stable_sort_does(values: list[float]) -> None:
    row = np.array([values], np.float32)
    np.testing.assert_array_equal(sorted_columns(row)[0], np.argsort(row[0], kind="stable"))
    coarse = (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # as bfloat16 has it
    np.testing.assert_array_equal(sorted_columns(coarse)[0], np.argsort(coarse[0], kind="stable"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_names_its_row(bad: float) -> None:
    weights = np.zeros((4, 8), np.float32)
    weights[2, 5] = bad
    with pytest.raises(RowError, match="row 2, column 5") as refused:
        quantize_rows(weights)
    assert refused.value.row == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_a_sensitivity_that_is_no_weight_names_its_row(bad: float) -> None:
    sensitivity = np.ones((4, 8))
    sensitivity[3, 1] = bad
    with pytest.raises(RowError, match="sensitivity of row 3, column 1"):
        quantize_rows(np.zeros((4, 8)), sensitivity)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"parent_bits": 9}, "parent_bits: 9"),
        ({"parent_bits": 4, "seed_bits": 5}, "seed_bits: 5, need 1..4"),
        ({"min_bits": 0}, "min_bits: 0"),
        ({"threads": 0}, "threads: 0"),
        ({"sensitivity": np.ones(7)}, r"shape \(7,\), need \(8,\)"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_rows(np.zeros((4, 8)), **settings_)


@pytest.mark.parametrize("weights", [np.zeros(8), np.zeros((2, 0)), np.zeros((2, 8), np.int64)])
def test_weights_of_another_shape_or_dtype_are_refused(weights: np.ndarray) -> None:
    with pytest.raises(ValueError, match="weights: "):
        quantize_rows(weights)
