"""The mean-field optimum against scans over r, and the paper's theorem."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.bundle import Bundle, LatencyCoefficients
from models.mean_field import mean_field_cycle_s, optimum, stage_lines, throughput

POSITIVE = st.floats(0.01, 10.0)
BUNDLES = st.builds(
    lambda a, b, c, d, e, f, form, semantics, m, w: Bundle(
        coefficients=LatencyCoefficients(
            alpha_attention=a,
            beta_attention=b,
            alpha_ffn=c,
            beta_ffn=d,
            alpha_communication=e,
            beta_communication=f,
            communication=form,
        ),
        batch_per_worker=3,
        semantics=semantics,
        microbatches=m,
        attention_price=w,
    ),
    POSITIVE,
    POSITIVE,
    st.floats(0.01, 1.0),
    POSITIVE,
    st.floats(0.0, 1.0),
    POSITIVE,
    st.sampled_from(["worker", "bundle"]),
    st.sampled_from(["barrier", "pingpong"]),
    st.integers(1, 4),
    st.floats(0.2, 5.0),
)


def paper(**changes: object) -> Bundle:
    """The paper's hardware with B = 256."""
    coefficients = LatencyCoefficients(
        alpha_attention=0.00165,
        beta_attention=50,
        alpha_ffn=0.083,
        beta_ffn=100,
        alpha_communication=0.022,
        beta_communication=20,
    )
    return Bundle(coefficients=coefficients, batch_per_worker=256, **changes)  # type: ignore[arg-type]


@given(BUNDLES, st.floats(0.0, 30.0))
@settings(max_examples=150, deadline=None)
def test_whole_optimum_is_the_best_of_all_whole_ratios(bundle: Bundle, theta: float) -> None:
    best = optimum(bundle, theta, r_max=400)
    ratios = np.arange(1, 401)
    x = throughput(bundle, ratios, mean_field_cycle_s(bundle, theta, ratios))
    assert best.throughput_per_instance == pytest.approx(x.max(), rel=1e-12)
    assert x[best.r - 1] == pytest.approx(x.max(), rel=1e-12)


@given(BUNDLES, st.floats(0.0, 30.0))
@settings(max_examples=150, deadline=None)
def test_real_optimum_beats_every_point_of_a_fine_grid(bundle: Bundle, theta: float) -> None:
    best = optimum(bundle, theta).r_real
    grid = np.append(np.geomspace(1e-3, 1e4, 4001), best)
    x = throughput(bundle, grid, mean_field_cycle_s(bundle, theta, grid))
    assert x[-1] >= x.max() * (1 - 1e-12)


@given(BUNDLES, st.floats(0.0, 30.0))
@settings(max_examples=60, deadline=None)
def test_throughput_rises_to_one_peak_and_falls(bundle: Bundle, theta: float) -> None:
    ratios = np.arange(1, 301)
    x = throughput(bundle, ratios, mean_field_cycle_s(bundle, theta, ratios))
    rises = np.diff(x) > 1e-12 * x.max()
    falls = np.diff(x) < -1e-12 * x.max()
    if rises.any() and falls.any():
        assert np.flatnonzero(rises).max() < np.flatnonzero(falls).min()


def test_theorem_of_the_paper_takes_the_largest_of_three_ratios() -> None:
    best = optimum(paper(), 599.0)
    attention = 0.00165 * 256 * 599 + 50
    assert best.r_attention == pytest.approx((attention - 100) / (0.083 * 256))
    assert best.r_peak == pytest.approx(math.sqrt(100 / (0.083 * 256)))
    assert best.r_real == max(best.r_attention or 0, best.r_communication or 0, best.r_peak)
    assert best.regime == "attention"


def test_a_limited_range_takes_the_end_next_to_the_optimum() -> None:
    assert optimum(paper(), 599.0, r_max=6).r == 6
    assert optimum(paper(), 599.0, r_min=12, r_max=20).r == 12
    assert optimum(paper(), 599.0, r_max=6).r_real == pytest.approx(9.554669, rel=1e-6)


def test_floor_is_taken_where_rounding_to_nearest_would_be_wrong() -> None:
    """r* = 9.55 rounds to 10, but 9 gives more."""
    best = optimum(paper(), 599.0)
    x = throughput(paper(), [9, 10], mean_field_cycle_s(paper(), 599.0, [9, 10]))
    assert round(best.r_real) == 10
    assert best.r == 9
    assert x[0] > x[1]


def test_prices_move_the_ffn_bound_peak_by_their_root() -> None:
    bundle = paper(attention_price=4.0, ffn_price=9.0)
    assert optimum(bundle, 10.0).r_peak == pytest.approx(1.5 * optimum(paper(), 10.0).r_peak)


def test_an_attention_branch_ends_at_the_smaller_crossing_with_a_bundle_wide_transfer() -> None:
    coefficients = dataclasses.replace(
        paper().coefficients,
        alpha_communication=0.06,
        beta_communication=160,
        communication="bundle",
    )
    bundle = dataclasses.replace(paper(), coefficients=coefficients)
    best = optimum(bundle, 599.0)
    transfer_crossing = (303.0176 - 160) / (0.06 * 256)
    assert best.r_real == pytest.approx(transfer_crossing, rel=1e-6)
    assert best.r_attention is None
    assert best.regime == "attention"


def test_more_workers_always_help_where_nothing_slows_with_them() -> None:
    coefficients = dataclasses.replace(paper().coefficients, alpha_ffn=0.0)
    bundle = dataclasses.replace(paper(), coefficients=coefficients)
    best = optimum(bundle, 599.0, r_max=50)
    assert math.isinf(best.r_real)
    assert best.r == 50
    with pytest.raises(ValueError, match="r_max is needed"):
        optimum(bundle, 599.0)


def test_round_trip_adds_a_fourth_line_under_ping_pong() -> None:
    bundle = paper(semantics="pingpong", microbatches=2)
    lines = stage_lines(bundle, 300.0)
    assert [line.name for line in lines] == ["attention", "communication", "ffn", "round_trip"]
    assert float(lines[3].at(10)) == pytest.approx((300 + 312.48 + 25.632) / 2)


def test_an_empty_range_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 <= r_min <= r_max"):
        optimum(paper(), 599.0, r_min=5, r_max=4)
