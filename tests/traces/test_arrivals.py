import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from traces.arrivals import RateTable, gamma, on_off, poisson, replay, time_varying


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def dispersion(arrival_s: np.ndarray, window_s: float) -> float:
    counts = np.bincount((arrival_s / window_s).astype(int))[:-1]
    return float(counts.var() / counts.mean())


def test_poisson_gaps_are_exponential_with_the_given_rate() -> None:
    gaps = np.diff(poisson(rng(), rate_per_s=7.0, num_requests=20_000))
    assert stats.kstest(gaps, stats.expon(scale=1 / 7.0).cdf).pvalue > 0.01


def test_poisson_counts_have_a_dispersion_of_one() -> None:
    arrivals = poisson(rng(), rate_per_s=10.0, num_requests=200_000)
    assert dispersion(arrivals, 5.0) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("cv", [0.25, 1.0, 2.0, 4.0])
def test_gamma_gaps_follow_the_gamma_law_of_that_variation(cv: float) -> None:
    gaps = np.diff(gamma(rng(), rate_per_s=3.0, cv=cv, num_requests=20_000))
    law = stats.gamma(a=1 / cv**2, scale=cv**2 / 3.0)
    assert law.std() / law.mean() == pytest.approx(cv)
    # gaps below a microsecond are rounded away beside a clock that shows thousands of seconds
    tiny = law.cdf(1e-6)
    seen = np.count_nonzero(gaps <= 1e-6)
    assert stats.binomtest(seen, len(gaps), tiny).pvalue > 0.01
    rest = gaps[gaps > 1e-6]
    assert stats.kstest(rest, lambda x: (law.cdf(x) - tiny) / (1 - tiny)).pvalue > 0.01


def test_gamma_with_cv_zero_is_a_clock() -> None:
    assert gamma(rng(), rate_per_s=4.0, cv=0.0, num_requests=3).tolist() == [0.25, 0.5, 0.75]


def test_bursts_of_a_renewal_process_show_as_the_square_of_the_cv_in_long_windows() -> None:
    arrivals = gamma(rng(), rate_per_s=50.0, cv=3.0, num_requests=1_000_000)
    assert dispersion(arrivals, 20.0) == pytest.approx(9.0, rel=0.1)


def test_on_off_has_the_mean_rate_of_its_stays() -> None:
    arrivals = on_off(
        rng(), on_rate_per_s=20.0, off_rate_per_s=2.0, mean_on_s=3.0, mean_off_s=6.0,
        num_requests=400_000,
    )  # fmt: skip
    assert 400_000 / arrivals[-1] == pytest.approx((20 * 3 + 2 * 6) / 9, rel=0.02)


def test_on_off_counts_have_the_dispersion_of_a_markov_modulated_poisson_process() -> None:
    on, off, mean_on, mean_off, window = 30.0, 5.0, 2.0, 4.0, 7.0
    arrivals = on_off(
        rng(5), on_rate_per_s=on, off_rate_per_s=off, mean_on_s=mean_on, mean_off_s=mean_off,
        num_requests=2_000_000,
    )  # fmt: skip
    # Fischer and Meier-Hellstern (1993): variance of the counts of a two-state MMPP
    a, b = 1 / mean_on, 1 / mean_off
    mean_rate = (on * b + off * a) / (a + b)
    factor = 2 * a * b * (on - off) ** 2 / ((a + b) ** 3 * mean_rate)
    expected = 1 + factor * (1 - (1 - np.exp(-(a + b) * window)) / ((a + b) * window))
    assert dispersion(arrivals, window) == pytest.approx(expected, rel=0.03)


def test_an_off_rate_of_zero_leaves_gaps_as_long_as_the_off_stays() -> None:
    arrivals = on_off(
        rng(), on_rate_per_s=1000.0, off_rate_per_s=0.0, mean_on_s=1.0, mean_off_s=9.0,
        num_requests=300_000,
    )  # fmt: skip
    long_gaps = np.diff(arrivals)
    long_gaps = long_gaps[long_gaps > 0.5]
    # exponential stays have no memory: beyond 0.5 s they are exponential again
    assert stats.kstest(long_gaps - 0.5, stats.expon(scale=9.0).cdf).pvalue > 0.01


def test_a_thinned_rate_function_gives_the_integral_of_the_rate() -> None:
    arrivals = time_varying(
        rng(), rate_per_s=lambda t: 50 + 40 * np.sin(2 * np.pi * t / 100), max_rate_per_s=90.0,
        num_requests=500_000,
    )  # fmt: skip
    phase = arrivals[arrivals < 9_900] % 100
    observed, _ = np.histogram(phase, bins=10, range=(0, 100))
    edges = np.linspace(0, 100, 11)
    cumulated = 50 * edges - 40 * 100 / (2 * np.pi) * np.cos(2 * np.pi * edges / 100)
    expected = np.diff(cumulated) / 5_000 * len(phase)
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 0.01


def test_a_rate_table_gives_each_interval_its_rate_round_after_round() -> None:
    table = RateTable(start_s=(0.0, 10.0, 30.0), rate_per_s=(5.0, 0.0, 20.0), period_s=40.0)
    arrivals = time_varying(rng(), rate_per_s=table, num_requests=100_000)
    phase = arrivals % 40.0
    rounds = arrivals[-1] / 40.0
    assert np.count_nonzero((phase > 10.0) & (phase < 30.0)) == 0
    assert np.count_nonzero(phase <= 10.0) / rounds == pytest.approx(50.0, rel=0.03)
    assert np.count_nonzero(phase >= 30.0) / rounds == pytest.approx(200.0, rel=0.03)
    assert table.mean_rate_per_s() == pytest.approx(250 / 40)


def test_the_last_rate_of_pairs_without_a_period_holds_for_ever() -> None:
    arrivals = time_varying(
        rng(), rate_per_s=[(0.0, 0.0), (100.0, 2.0), (200.0, 10.0)], num_requests=50_000
    )
    assert arrivals[0] > 100.0
    assert np.count_nonzero(arrivals < 200.0) == pytest.approx(200, abs=60)
    late = arrivals[arrivals > 200.0]
    assert len(late) / (late[-1] - 200.0) == pytest.approx(10.0, rel=0.02)


def test_table_and_thinning_agree_on_one_law() -> None:
    table = RateTable(start_s=(0.0, 5.0), rate_per_s=(4.0, 1.0), period_s=10.0)
    by_table = time_varying(rng(1), rate_per_s=table, num_requests=20_000)
    by_thinning = time_varying(
        rng(2), rate_per_s=lambda t: np.where(t % 10 < 5, 4.0, 1.0), max_rate_per_s=4.0,
        num_requests=20_000,
    )  # fmt: skip
    assert stats.ks_2samp(np.diff(by_table), np.diff(by_thinning)).pvalue > 0.01


def test_replay_keeps_the_trace_and_starts_it_at_zero() -> None:
    assert replay([5.0, 6.0, 9.0]).tolist() == [0.0, 1.0, 4.0]


def test_replay_at_twice_the_rate_halves_every_gap() -> None:
    assert replay([0.0, 1.0, 4.0], rate_scale=2.0).tolist() == [0.0, 0.5, 2.0]


def test_a_looped_replay_repeats_the_gaps_and_keeps_the_mean_rate() -> None:
    # three requests in 4 s: two gaps of mean 2 s, so a round lasts 6 s
    assert replay([0.0, 1.0, 4.0], num_requests=7).tolist() == [0.0, 1.0, 4.0, 6.0, 7.0, 10.0, 12.0]


@given(
    times=st.lists(st.floats(0, 1e6), min_size=2, max_size=30).map(sorted),
    scale=st.floats(0.01, 100.0),
    count=st.integers(1, 200),
)
@settings(max_examples=100, deadline=None)
def test_replay_never_goes_back_in_time(times: list[float], scale: float, count: int) -> None:
    if times[-1] == times[0] and count > len(times):
        return
    arrivals = replay(times, rate_scale=scale, num_requests=count)
    assert len(arrivals) == count
    assert arrivals[0] == 0.0
    assert np.all(np.diff(arrivals) >= 0.0)


@given(
    rates=st.lists(st.floats(0.0, 50.0), min_size=1, max_size=6),
    cv=st.floats(0.0, 5.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_table_arrivals_never_go_back_and_never_fall_on_a_rate_of_zero(
    rates: list[float], cv: float, seed: int
) -> None:
    if max(rates) < 0.1:
        return
    starts = tuple(10.0 * i for i in range(len(rates)))
    table = RateTable(start_s=starts, rate_per_s=tuple(rates), period_s=10.0 * len(rates))
    arrivals = time_varying(rng(seed), rate_per_s=table, num_requests=300, cv=cv)
    assert np.all(np.diff(arrivals) >= 0.0)
    inside = arrivals % table.period_s  # type: ignore[operator]
    away_from_edges = np.abs(inside / 10.0 - np.rint(inside / 10.0)) > 1e-6
    index = (inside[away_from_edges] // 10.0).astype(int)
    assert np.all(np.asarray(rates)[index] > 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poisson(rng(), rate_per_s=0.0, num_requests=1), "rate_per_s must be finite and >"),
        (lambda: poisson(rng(), rate_per_s=float("nan"), num_requests=1), "found nan"),
        (lambda: poisson(rng(), rate_per_s=1.0, num_requests=0), "num_requests must be a whole"),
        (lambda: poisson(rng(), rate_per_s=1.0, num_requests=2.5), "found 2.5"),
        (lambda: gamma(rng(), rate_per_s=1.0, cv=-1.0, num_requests=1), "cv must be within"),
        (
            lambda: on_off(
                rng(), on_rate_per_s=1.0, off_rate_per_s=-2.0, mean_on_s=1.0, mean_off_s=1.0,
                num_requests=1,
            ),
            "off_rate_per_s must be finite and >= 0, found -2.0",
        ),
        (lambda: time_varying(rng(), rate_per_s=[], num_requests=1), "of one length >= 1"),
        (lambda: time_varying(rng(), rate_per_s=[(1.0, 2.0)], num_requests=1), "begin at 0"),
        (lambda: time_varying(rng(), rate_per_s=[(0, 1.0), (0, 2.0)], num_requests=1), "must rise"),
        (lambda: time_varying(rng(), rate_per_s=[(0, 1.0), (5, 0.0)], num_requests=1), "must be >"),
        (lambda: time_varying(rng(), rate_per_s=lambda t: t, num_requests=1), "max_rate_per_s is"),
        (
            lambda: time_varying(
                rng(), rate_per_s=lambda t: t, max_rate_per_s=3.0, num_requests=100
            ),
            "must stay within",
        ),
        (
            lambda: time_varying(
                rng(), rate_per_s=lambda t: 0 * t, max_rate_per_s=3.0, num_requests=100
            ),
            "must not stay below",
        ),
        (
            lambda: RateTable(start_s=(0.0, 5.0), rate_per_s=(1.0, 1.0), period_s=5.0),
            "period_s must be > the last start_s",
        ),
        (
            lambda: RateTable(start_s=(0.0,), rate_per_s=(0.0,), period_s=5.0),
            "at least one rate_per_s must be > 0",
        ),
        (lambda: replay([]), "at least one time"),
        (lambda: replay([0.0, 2.0, 1.0]), "step back at number 2"),
        (lambda: replay([0.0, float("inf")]), "must be finite"),
        (lambda: replay([0.0, 1.0], rate_scale=0.0), "rate_scale must be finite and > 0"),
        (lambda: replay([3.0, 3.0], num_requests=3), "cannot be looped"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named_with_its_rule(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
