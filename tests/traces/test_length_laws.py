import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from traces.length_laws import (
    fixed,
    geometric,
    lognormal,
    merge_equal_pairs,
    pareto,
    two_point,
    uniform,
)
from traces.lengths import LengthPairs

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent.parent / "golden" / "afd_cases.json").read_text())
}


def slot_moments(lengths: LengthPairs) -> tuple[float, float, float]:
    """theta, nu, skew by renewal-reward, from power sums of the ages."""
    p, w = lengths.prompt_tokens.astype(float), lengths.weight
    d = lengths.output_tokens.astype(float)
    ages1, ages2, ages3 = d * (d - 1) / 2, d * (d - 1) * (2 * d - 1) / 6, (d * (d - 1) / 2) ** 2
    steps = float(w @ d)
    m1 = float(w @ (d * p + ages1)) / steps
    m2 = float(w @ (d * p**2 + 2 * p * ages1 + ages2)) / steps
    m3 = float(w @ (d * p**3 + 3 * p**2 * ages1 + 3 * p * ages2 + ages3)) / steps
    variance = m2 - m1**2
    skew = (m3 - 3 * m1 * m2 + 2 * m1**3) / variance**1.5 if variance > 0 else 0.0
    return m1, variance**0.5, skew


@pytest.mark.parametrize(
    ("case", "law"),
    [
        ("A-21", geometric(100, 500)),
        ("A-26", two_point(200, 100, 4000, 0.1)),
        ("A-28", fixed(100, 500)),
        ("A-29", pareto(200, 300, 2.5, 200_000)),
    ],
)
def test_slot_moments_of_a_law_are_those_of_the_reference_case(case: str, law: LengthPairs) -> None:
    expected = CASES[case]["expect"]
    theta, nu, skew = slot_moments(law)
    assert theta == pytest.approx(expected["theta"], rel=1e-9)
    assert nu == pytest.approx(expected["nu"], rel=1e-9)
    assert skew == pytest.approx(expected["skew"], rel=1e-6, abs=1e-9)


def test_geometric_has_its_closed_form_moments_up_to_the_cut_tail() -> None:
    mean = 200.0
    theta, nu, skew = slot_moments(geometric(1000, mean))
    # length-biased age of a geometric law is geometric from 0: mean (1 - p) / p, skew about 2
    assert theta == pytest.approx(1000 + mean - 1, rel=1e-6)
    assert nu**2 == pytest.approx((1 - 1 / mean) * mean**2, rel=1e-5)
    assert skew == pytest.approx((2 - 1 / mean) / (1 - 1 / mean) ** 0.5, rel=1e-4)


def test_geometric_leaves_out_no_more_than_one_request_in_a_billion() -> None:
    law = geometric(10, 50)
    assert stats.geom(1 / 50).sf(law.output_tokens.max()) <= 1e-9
    assert law.output_tokens.min() == 1


def test_geometric_of_mean_one_always_ends_after_one_token() -> None:
    assert geometric(5, 1).output_tokens.tolist() == [1]


def test_two_equal_points_become_one_pair() -> None:
    law = two_point(7, 30, 30, 0.5)
    assert law.output_tokens.tolist() == [30]
    assert law.weight.tolist() == [1.0]


def test_a_point_of_probability_zero_is_left_out() -> None:
    assert two_point(7, 30, 40, 0.0).output_tokens.tolist() == [30]


def test_uniform_has_every_length_once() -> None:
    law = uniform(3, 2, 5)
    assert law.output_tokens.tolist() == [2, 3, 4, 5]
    assert np.allclose(law.weight, 0.25)


def test_lognormal_has_its_means_and_the_moments_of_the_logarithms() -> None:
    law = lognormal(2000, 400, 0.8, 1.1, 0.4)
    log_p, log_d = np.log(law.prompt_tokens), np.log(law.output_tokens)
    w = law.weight
    mean_p, mean_d = float(w @ log_p), float(w @ log_d)
    sd_p = float(w @ (log_p - mean_p) ** 2) ** 0.5
    sd_d = float(w @ (log_d - mean_d) ** 2) ** 0.5
    rho = float(w @ ((log_p - mean_p) * (log_d - mean_d))) / (sd_p * sd_d)
    assert float(w @ law.prompt_tokens) == pytest.approx(2000, rel=1e-3)
    assert float(w @ law.output_tokens) == pytest.approx(400, rel=1e-3)
    assert (sd_p, sd_d, rho) == pytest.approx((0.8, 1.1, 0.4), rel=2e-3)


@pytest.mark.parametrize("rho", [-0.6, 0.0, 0.7])
def test_lognormal_slot_load_is_the_closed_form_of_the_unrounded_law(rho: float) -> None:
    mean_p, mean_d, s_p, s_d = 3000.0, 500.0, 1.0, 0.9
    theta, nu, _ = slot_moments(lognormal(mean_p, mean_d, s_p, s_d, rho))
    # E[P^a D^b] = mean_p^a mean_d^b exp((a(a-1) s_p^2 + b(b-1) s_d^2) / 2 + a b rho s_p s_d)
    cross = np.exp(rho * s_p * s_d)
    m1 = mean_p * cross + mean_d * np.exp(s_d**2) / 2 - 0.5
    m2 = (
        mean_p**2 * np.exp(s_p**2) * cross**2
        + mean_p * mean_d * np.exp(s_d**2) * cross**2
        - mean_p * cross
        + mean_d**2 * np.exp(3 * s_d**2) / 3
        - mean_d * np.exp(s_d**2) / 2
        + 1 / 6
    )
    assert theta == pytest.approx(m1, rel=1e-3)
    assert nu == pytest.approx((m2 - m1**2) ** 0.5, rel=3e-3)


def test_lognormal_without_spread_is_fixed() -> None:
    law = lognormal(100, 20, 0.0, 0.0)
    assert (law.prompt_tokens.tolist(), law.output_tokens.tolist()) == ([100], [20])


def test_perfectly_correlated_lognormal_lengths_rise_together() -> None:
    law = lognormal(1000, 1000, 1.0, 1.0, 1.0)
    assert np.all(np.diff(law.output_tokens) > 0)
    assert law.prompt_tokens.tolist() == law.output_tokens.tolist()


def test_caps_shorten_and_do_not_drop() -> None:
    law = lognormal(1000, 200, 1.0, 1.0, 0.0, max_prompt_tokens=1500, max_output_tokens=300)
    assert law.output_tokens.max() == 300
    assert law.prompt_tokens.max() == 1500
    beyond = stats.norm.sf((np.log(300.5) - np.log(200) + 0.5) / 1.0)
    share = law.weight[law.output_tokens == 300].sum()
    assert share == pytest.approx(beyond, abs=0.02)


def test_lengths_below_one_half_still_count_as_one_token() -> None:
    assert lognormal(1, 1, 2.0, 2.0).output_tokens.min() == 1


def test_pareto_survival_follows_the_power_law_until_the_cap() -> None:
    law = pareto(10, 100, 1.5, 5_000)
    for length in (200, 1_000, 4_999):
        above = law.weight[law.output_tokens >= length].sum()
        assert above == pytest.approx((100 / length) ** 1.5, rel=5e-3)
    assert law.output_tokens.max() == 5_000


def test_merging_keeps_the_law_and_the_number_of_requests() -> None:
    law = LengthPairs.from_requests([5, 5, 9, 5], [2, 2, 2, 3])
    merged = merge_equal_pairs(law)
    assert merged.prompt_tokens.tolist() == [5, 9, 5]
    assert merged.output_tokens.tolist() == [2, 2, 3]
    assert merged.weight.tolist() == [0.5, 0.25, 0.25]
    assert merged.num_requests == 4
    assert slot_moments(merged) == pytest.approx(slot_moments(law))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fixed(-1, 5), "prompt_tokens must be a whole number >= 0, found -1"),
        (lambda: fixed(1, 0), "output_tokens must be a whole number >= 1, found 0"),
        (lambda: fixed(1, 2.5), "found 2.5"),
        (lambda: fixed(1, float("nan")), "found nan"),
        (lambda: fixed(1, "5 tokens"), "found '5 tokens'"),
        (lambda: two_point(1, 2, 3, 1.5), r"second_probability must be within \[0, 1\]"),
        (lambda: uniform(1, 9, 3), "maximum_output_tokens must be a whole number >= 9, found 3"),
        (lambda: uniform(1, 1, 10**8), "support points"),
        (lambda: geometric(1, 0.5), "mean_output_tokens must be within"),
        (lambda: geometric(1, 1e8), "support points"),
        (lambda: lognormal(100, 100, 1.0, -1.0), "sigma_output must be within"),
        (lambda: lognormal(100, 100, 1.0, 1.0, 1.1), "correlation must be within"),
        (lambda: lognormal(100, 100, 1.0, 1.0, max_output_tokens=0), "max_output_tokens must be"),
        (lambda: pareto(1, 100, 0.0, 500), "tail_index must be finite and > 0"),
        (lambda: pareto(1, 100, 2.0, 50), "cap_tokens must be a whole number >= 100, found 50"),
    ],
)
def test_a_bad_argument_is_named_with_its_rule(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
