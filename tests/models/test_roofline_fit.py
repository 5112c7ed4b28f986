"""Rooflines whose numbers are known are found again, with and without noise."""

from __future__ import annotations

import numpy as np
import pytest

from models.roofline_fit import fit_roofline

BYTES_PER_S, FLOPS_PER_S, FIXED_S = 8e9, 60e9, 3e-4
TOKENS = np.array([1.0, 2, 4, 8, 16, 32, 64, 128, 256])


def _loads() -> tuple[np.ndarray, np.ndarray]:
    """Bytes that soon stop growing, operations that do not: memory binds, then arithmetic."""
    return 4e6 * (1.0 - 0.8**TOKENS), 2e6 * TOKENS


def _seconds() -> np.ndarray:
    num_bytes, flops = _loads()
    return FIXED_S + np.maximum(num_bytes / BYTES_PER_S, flops / FLOPS_PER_S)


def test_a_roofline_without_noise_is_found_again() -> None:
    fit = fit_roofline(*_loads(), _seconds(), TOKENS)
    assert fit.fixed_s == pytest.approx(FIXED_S, rel=0.03)
    assert fit.bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.03)
    assert fit.flops_per_s == pytest.approx(FLOPS_PER_S, rel=0.03)
    assert fit.is_memory_bound
    assert fit.is_compute_bound
    assert fit.max_relative_error < 0.01
    assert (fit.min_tokens, fit.max_tokens) == (1.0, 256.0)


@pytest.mark.parametrize("seed", range(5))
def test_five_percent_of_noise_moves_predictions_by_less_than_ten(seed: int) -> None:
    noise = np.exp(np.random.default_rng(seed).normal(0.0, 0.05, len(TOKENS)))
    fit = fit_roofline(*_loads(), _seconds() * noise, TOKENS)
    predicted = [fit.seconds(b, f) for b, f in zip(*_loads(), strict=True)]
    assert np.abs(np.array(predicted) / _seconds() - 1.0).max() < 0.10


def test_time_that_only_memory_takes_gives_a_least_rate_of_arithmetic() -> None:
    num_bytes, flops = np.array([1e6, 2e6, 4e6]), np.array([1e3, 2e3, 3e3])
    fit = fit_roofline(num_bytes, flops, num_bytes / 1e9, np.array([1.0, 2.0, 3.0]))
    assert fit.bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert not fit.is_compute_bound
    assert fit.flops_per_s <= 1e9 * (flops / num_bytes).max() * (1 + 1e-9)


def test_no_coefficient_is_negative_where_a_free_line_would_be() -> None:
    load = np.array([1.0, 2.0, 4.0])
    fit = fit_roofline(load, load, np.array([0.5, 2.0, 4.2]), load)
    assert fit.fixed_s == 0.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ([1.0, 1.0], "at least 3"),
        ([1.0, 0.0, 1.0], "seconds must be finite and > 0"),
        ([3.0, 2.0, 1.0], "does not grow"),
    ],
)
def test_what_cannot_be_fitted_is_said(seconds: list[float], words: str) -> None:
    load = np.arange(1.0, len(seconds) + 1.0)
    with pytest.raises(ValueError, match=words):
        fit_roofline(load, load, np.array(seconds), load)
