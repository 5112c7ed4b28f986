"""Tables of unit gain: what they promise, against regressions on drawn inputs."""

import numpy as np
import pytest

from runtime.nested_kmeans import NestedRows, quantize_rows
from runtime.row_gain import with_row_gain


@pytest.fixture
def rows():
    rng = np.random.default_rng(3)
    weights = rng.standard_t(5, (12, 96))
    mixing = rng.standard_normal((96, 96)) * rng.lognormal(0, 0.7, 96)
    moment = mixing @ mixing.T / 96
    return weights, moment, quantize_rows(weights, np.diagonal(moment).copy())


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
@pytest.mark.parametrize("form", ["full", "diagonal", "identity"])
def test_outputs_regress_on_exact_outputs_with_slope_one(rows, bits, form):
    weights, moment, nested = rows
    given = {"full": moment, "diagonal": np.diagonal(moment).copy(), "identity": None}[form]
    spread = {"full": moment, "diagonal": np.diag(np.diagonal(moment)), "identity": np.eye(96)}[
        form
    ]
    inputs = np.random.default_rng(4).standard_normal((200_000, 96)) @ np.linalg.cholesky(spread).T
    exact = inputs @ weights.T
    served = inputs @ with_row_gain(weights, nested, given).reconstruct(bits).T
    slope = (exact * served).sum(0) / (exact**2).sum(0)
    np.testing.assert_allclose(slope, 1.0, atol=4e-3)


@pytest.mark.parametrize("bits", [2, 3])
def test_plain_centroids_shrink_by_their_relative_error(rows, bits):
    weights, moment, nested = rows
    diagonal = np.diagonal(moment)
    served = nested.reconstruct(bits)
    error = ((weights - served) ** 2 * diagonal).sum(1) / (weights**2 * diagonal).sum(1)
    scaled = with_row_gain(weights, nested, diagonal.copy())
    gain = scaled.tables[bits].max(1) / nested.tables[bits].max(1)
    np.testing.assert_allclose(gain, 1 / (1 - error), rtol=1e-9)
    after = ((weights - scaled.reconstruct(bits)) ** 2 * diagonal).sum(1)
    np.testing.assert_allclose(
        after / (weights**2 * diagonal).sum(1), error / (1 - error), rtol=1e-9
    )


def test_codes_stay_and_a_row_without_inputs_keeps_its_table(rows):
    weights, _, nested = rows
    scaled = with_row_gain(weights, nested, np.zeros(96))
    assert scaled.codes is nested.codes
    for bits, table in nested.tables.items():
        np.testing.assert_array_equal(scaled.tables[bits], table)


def test_a_gain_beyond_reason_is_left_alone():
    weights = np.array([[1.0, -1.0, 1.0, -1.001]])
    nested = NestedRows(np.zeros((1, 4), np.uint8), {1: np.array([[-0.25, 7.0]])})
    scaled = with_row_gain(weights, nested, None)
    np.testing.assert_array_equal(scaled.tables[1], nested.tables[1])
