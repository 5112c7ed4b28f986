"""Prompt heads: leave-one-out against refitting, penalty choice, switching off, batches."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.prompt_heads import (
    LAMBDAS,
    MULTIPLIER_CLIP,
    PromptHeads,
    damage_targets,
    fit_feature_map,
    fit_prompt_heads,
    leave_one_out_residuals,
    raw_features,
)


def refit(features: np.ndarray, targets: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """Ridge with an unpenalised bias from the normal equations of [features, 1]."""
    n, d = features.shape
    design = np.column_stack([features, np.ones(n)])
    penalty = np.diag([ridge] * d + [0.0])
    solution = np.linalg.solve(design.T @ design + penalty, design.T @ targets)
    return solution[:d], solution[d]


def problem(seed: int, n: int = 14, d: int = 4, blocks: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((n, d)) + 0.7
    truth = rng.standard_normal((d, blocks))
    return features, features @ truth + rng.standard_normal((n, blocks)) + 2.0


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 100.0])
@given(seed=st.integers(0, 200))
def test_leave_one_out_is_what_refitting_without_each_prompt_gives(ridge: float, seed: int) -> None:
    features, targets = problem(seed)
    brute = np.empty_like(targets)
    for i in range(len(features)):
        others = np.arange(len(features)) != i
        weights, bias = refit(features[others], targets[others], ridge)
        brute[i] = targets[i] - (features[i] @ weights + bias)
    found = leave_one_out_residuals(features, targets, ridge)
    np.testing.assert_allclose(found, brute, rtol=1e-9, atol=1e-11)


def test_the_chosen_penalty_has_the_least_leave_one_out_error_of_all() -> None:
    features, targets = problem(1, n=20, d=9, blocks=12)
    heads = fit_prompt_heads(features, targets)
    for block in range(targets.shape[1]):
        errors = [
            float((leave_one_out_residuals(features, targets[:, [block]], x) ** 2).sum())
            for x in LAMBDAS
        ]
        assert heads.ridge[block] == LAMBDAS[int(np.argmin(errors))]
        spread = float(((targets[:, block] - targets[:, block].mean()) ** 2).sum())
        assert heads.leave_one_out_r2[block] == pytest.approx(1 - min(errors) / spread, rel=1e-9)


def test_a_head_predicts_as_the_normal_equations_do() -> None:
    features, targets = problem(2)
    targets *= 0.1
    heads = fit_prompt_heads(features, targets, lambdas=(0.1,))
    weights, bias = refit(features, targets, 0.1)
    assert heads.is_on.all()
    expected = np.clip(features @ weights + bias, -MULTIPLIER_CLIP, MULTIPLIER_CLIP)
    np.testing.assert_allclose(heads.log_multipliers(features), expected, rtol=1e-9)


def test_a_head_that_does_not_generalise_has_multiplier_exactly_one() -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((24, 3))
    learnable = features @ [[0.3], [-0.2], [0.1]]
    noise = rng.standard_normal((24, 40))
    heads = fit_prompt_heads(features, np.hstack([learnable, noise, np.full((24, 1), 0.5)]))
    assert heads.is_on[0]
    assert heads.leave_one_out_r2[0] > 0.99
    off = ~heads.is_on
    assert off[-1]
    assert off.sum() > 10
    np.testing.assert_array_equal(heads.is_on, heads.leave_one_out_r2 > 0.0)
    np.testing.assert_array_equal(heads.multipliers(features, np.ones(24))[off], 1.0)


def test_multipliers_are_clipped_to_a_factor_of_four() -> None:
    x = np.linspace(-1, 1, 9)[:, None]
    heads = fit_prompt_heads(x, 3.0 * x)
    found = np.exp(heads.log_multipliers([[5.0], [-5.0]]))
    np.testing.assert_allclose(found[:, 0], [4.0, 0.25], rtol=1e-12)


def heads_of(weights: list[list[float]]) -> PromptHeads:
    w = np.array(weights)
    blocks = w.shape[1]
    return PromptHeads(
        w, np.zeros(blocks), np.ones(blocks), np.ones(blocks), np.ones(blocks, dtype=bool)
    )


def test_a_batch_averages_logarithms_by_remaining_tokens() -> None:
    heads = heads_of([[1.0, -0.5]])
    found = heads.multipliers([[0.4], [-0.8]], [30.0, 10.0])
    mean = (30 * 0.4 - 10 * 0.8) / 40
    np.testing.assert_allclose(found, np.exp([mean, -0.5 * mean]), rtol=1e-12)
    np.testing.assert_allclose(
        heads.multipliers([[0.4], [-0.8]], [0.0, 0.0]), np.exp([-0.2, 0.1]), rtol=1e-12
    )
    np.testing.assert_array_equal(heads.multipliers(np.zeros((0, 1)), np.zeros(0)), 1.0)


def test_targets_are_clipped_log_ratios_and_unknown_ones_are_zero() -> None:
    prompt = [[2.0, 0.0, np.nan, 1e9], [0.5, 3.0, 1.0, 1e-9]]
    found = damage_targets(prompt, [1.0, 3.0, 2.0, 1.0])
    expected = [[np.log(2), 0, 0, 3.0], [-np.log(2), 0, -np.log(2), -3.0]]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_raw_features_stand_side_by_side() -> None:
    hidden = [[1.0, 2.0], [3.0, 4.0]]
    shares = np.array([[[0.25, 0.75]], [[1.0, 0.0]]])
    found = raw_features(hidden, shares, [1, np.e])
    np.testing.assert_allclose(found, [[1, 2, 0.5, 0.75**0.5, 0], [3, 4, 1, 0, 1]], rtol=1e-12)


def test_components_are_uncorrelated_of_unit_variance_and_ignore_constants() -> None:
    rng = np.random.default_rng(4)
    raw = rng.standard_normal((50, 6)) @ rng.standard_normal((6, 6)) * 10.0 + 3.0
    raw = np.column_stack([raw, np.full(50, 7.0)])
    to_features = fit_feature_map(raw, 4)
    features = to_features(raw)
    assert features.shape == (50, 4)
    np.testing.assert_allclose(features.T @ features / 50, np.eye(4), atol=1e-10)
    moved = raw.copy()
    moved[:, 6] = 1e6
    np.testing.assert_allclose(to_features(moved), features, rtol=1e-9)


def test_no_more_components_than_the_data_have_directions() -> None:
    rng = np.random.default_rng(4)
    flat = rng.standard_normal((30, 2)) @ rng.standard_normal((2, 8))
    assert fit_feature_map(flat, 16)(flat).shape == (30, 2)
    assert fit_feature_map(rng.standard_normal((5, 40)), 16).components.shape == (40, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_feature_map(np.ones((2, 3))), "n >= 3"),
        (lambda: fit_feature_map(np.ones((4, 3))), "same features"),
        (lambda: fit_prompt_heads(np.ones((4, 3)), np.ones((5, 1))), r"features \[n, d\]"),
        (lambda: fit_prompt_heads(np.ones((4, 3)), np.ones((4, 1)), lambdas=(0.0,)), "lambdas"),
        (lambda: damage_targets([[1.0]], [0.0]), "global damages"),
        (lambda: raw_features([[1.0]], [[-0.1]], [3]), "shares"),
        (lambda: raw_features([[1.0]], [[0.1]], [0]), "prompt_tokens"),
        (lambda: raw_features([[1.0]], [[0.1]], [3, 4]), "as many lengths"),
        (lambda: heads_of([[1.0]]).multipliers([[1.0]], [-1.0]), "remaining_tokens"),
        (lambda: heads_of([[1.0]]).multipliers([[1.0]], [1.0, 2.0]), "as many weights"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
