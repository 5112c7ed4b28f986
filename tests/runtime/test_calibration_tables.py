"""Tables fitted to a block's outputs: against dense least squares, and never worse than before."""

import numpy as np
import pytest

from models.quality import conditional_second_moment, output_error
from runtime.calibration_tables import fitted_table
from runtime.nested_kmeans import quantize_rows

ROWS, COLUMNS = 6, 96


def problem(seed: int, mean: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, correlated inputs with a mean, and their second moment."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_t(4, (ROWS, COLUMNS))
    mixing = rng.standard_normal((COLUMNS, COLUMNS)) / np.sqrt(COLUMNS) + 0.5 * np.eye(COLUMNS)
    inputs = rng.standard_normal((800, COLUMNS)) @ mixing + mean * rng.standard_normal(COLUMNS)
    return weights, inputs, conditional_second_moment(inputs, np.ones(800))


def rows_of(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return np.take_along_axis(table, codes.astype(np.intp), axis=1)


def dense_least_squares(weights: np.ndarray, codes: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """[N] smallest (w - C t) H (w - C t)^T over t, by the pseudo-inverse."""
    root = np.linalg.cholesky(moment)
    errors = []
    for w, code in zip(weights, codes, strict=True):
        cells = np.eye(int(codes.max()) + 1)[code]
        t = np.linalg.lstsq(root.T @ cells, root.T @ w, rcond=None)[0]
        errors.append(float(((root.T @ (w - cells @ t)) ** 2).sum()))
    return np.array(errors)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_enough_steps_reach_the_least_squares_solution(bits: int) -> None:
    weights, _, moment = problem(bits)
    nested = quantize_rows(weights, np.diagonal(moment).copy())
    codes = nested.codes >> (8 - bits)
    table = fitted_table(weights, codes, nested.tables[bits], moment, iterations=60, unbiased=False)
    found = output_error(weights, rows_of(table, codes), moment, 1.0)
    best = float(dense_least_squares(weights, codes, moment).sum())
    start = output_error(weights, nested.reconstruct(bits), moment, 1.0)
    assert best < 0.9 * start
    assert best * (1 - 1e-4) <= found <= best + 0.02 * (start - best)


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_the_error_falls_with_every_step(bits: int) -> None:
    weights, _, moment = problem(20 + bits)
    nested = quantize_rows(weights, np.diagonal(moment).copy())
    codes = nested.codes >> (8 - bits)
    errors = []
    for steps in (0, 1, 2, 4, 6):
        table = fitted_table(
            weights, codes, nested.tables[bits], moment, iterations=steps, unbiased=False
        )
        errors.append(output_error(weights, rows_of(table, codes), moment, 1.0))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.85 * errors[0]


@pytest.mark.parametrize("iterations", [0, 4])
@pytest.mark.parametrize("bits", [2, 3])
def test_the_output_has_slope_one_on_the_exact_output(bits: int, iterations: int) -> None:
    weights, inputs, moment = problem(7)
    nested = quantize_rows(weights, np.diagonal(moment).copy())
    codes = nested.codes >> (8 - bits)
    table = fitted_table(weights, codes, nested.tables[bits], moment, iterations=iterations)
    exact, found = inputs @ weights.T, inputs @ rows_of(table, codes).T
    slope = (exact * found).sum(0) / (exact**2).sum(0)
    np.testing.assert_allclose(slope, 1.0, rtol=1e-4)
    plain = inputs @ nested.reconstruct(bits).T
    assert ((exact * plain).sum(0) / (exact**2).sum(0)).mean() < 0.99


def test_weighted_centroids_are_already_optimal_for_a_diagonal_moment() -> None:
    weights, _, moment = problem(3)
    diagonal = np.diagonal(moment).copy()
    nested = quantize_rows(weights, diagonal)
    for bits in (2, 4):
        codes = nested.codes >> (8 - bits)
        for given in (diagonal, np.diag(diagonal)):
            table = fitted_table(weights, codes, nested.tables[bits], given, unbiased=False)
            np.testing.assert_allclose(
                rows_of(table, codes), nested.reconstruct(bits), rtol=1e-3, atol=1e-4
            )


def test_rows_without_inputs_or_weights_keep_their_table() -> None:
    weights, _, moment = problem(4)
    weights[2] = 0.0
    nested = quantize_rows(weights)
    codes = nested.codes >> 5
    for given in (np.zeros((COLUMNS, COLUMNS)), np.zeros(COLUMNS)):
        table = fitted_table(weights, codes, nested.tables[3], given)
        np.testing.assert_allclose(table, nested.tables[3], rtol=1e-6)
    table = fitted_table(weights, codes, nested.tables[3], moment)
    np.testing.assert_array_equal(rows_of(table, codes)[2], 0.0)
    assert np.isfinite(table).all()


def test_rows_are_fitted_by_themselves() -> None:
    weights, _, moment = problem(5)
    nested = quantize_rows(weights)
    codes = nested.codes >> 6
    whole = fitted_table(weights, codes, nested.tables[2], moment)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = fitted_table(weights[one], codes[one], nested.tables[2][one], moment)
        np.testing.assert_allclose(alone, whole[one], rtol=1e-3, atol=1e-4)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weights, _, moment = problem(6)
    nested = quantize_rows(weights)
    with pytest.raises(ValueError, match="do not fit"):
        fitted_table(weights, nested.codes[:2], nested.tables[8], moment)
    with pytest.raises(ValueError, match="moment must be"):
        fitted_table(weights, nested.codes, nested.tables[8], moment[:5])
