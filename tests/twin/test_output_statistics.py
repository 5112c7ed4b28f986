"""Intervals cover what they should; comparisons say no more than the runs can tell."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from models.streams import stream
from twin.output_statistics import (
    batch_means,
    mser5,
    not_worse_than_best,
    paired_difference,
    ratio_batch_means,
    ratio_replications,
    replications,
)


def autoregressive(num_series: int, length: int, phi: float, seed: int) -> NDArray[np.float64]:
    """Stationary AR(1) series of mean 10, [num_series, length]."""
    noise = stream(seed, "ar1").normal(size=(num_series, length))
    series = np.empty_like(noise)
    series[:, 0] = noise[:, 0] / math.sqrt(1 - phi * phi)
    for t in range(1, length):
        series[:, t] = phi * series[:, t - 1] + noise[:, t]
    return series + 10.0


def share_within(count: int, of: int, nominal: float) -> bool:
    """Whether a count of hits fits a nominal share, within four standard errors and 2 points."""
    error = math.sqrt(nominal * (1 - nominal) / of)
    return abs(count / of - nominal) < 4 * error + 0.02


class TestBatchMeans:
    @pytest.mark.parametrize("phi", [0.0, 0.9, 0.95])
    def test_the_interval_covers_the_mean_of_a_correlated_series_as_often_as_it_says(
        self, phi: float
    ) -> None:
        hits = 0
        for series in autoregressive(600, 4000, phi, seed=1):
            estimate = batch_means(series)
            hits += estimate.low <= 10.0 <= estimate.high
        assert share_within(hits, 600, 0.95)

    def test_joining_batches_widens_the_interval_where_they_hang_together(self) -> None:
        joined = [batch_means(series).num_samples for series in autoregressive(60, 400, 0.95, 2)]
        assert min(joined) == 10
        loose = [batch_means(series).num_samples for series in autoregressive(60, 4000, 0.0, 2)]
        assert np.mean(np.array(loose) == 20) > 0.85

    def test_a_trend_is_warned_about(self) -> None:
        estimate = batch_means(np.arange(1000.0))
        assert estimate.warning is not None
        assert "run longer" in estimate.warning

    def test_by_hand(self) -> None:
        # Eight batches of two with means 1, 3, 1, 3, ..: mean 2, variance of means 8/7.
        estimate = batch_means([1, 1, 3, 3] * 4, num_batches=8)
        assert estimate.mean == 2.0
        assert estimate.standard_error == pytest.approx(math.sqrt(8 / 7 / 8))
        assert estimate.half_width == pytest.approx(2.364624251 * estimate.standard_error)
        assert estimate.lag1 == pytest.approx(-7 / 8)
        assert (estimate.num_samples, estimate.method) == (8, "batch means")

    def test_what_does_not_fill_a_batch_is_left_out_at_the_front(self) -> None:
        assert batch_means([99.0, *([1.0, 3.0] * 8)], num_batches=8).mean == 2.0

    def test_a_constant_series_is_certain(self) -> None:
        estimate = batch_means(np.full(100, 7.0))
        assert (estimate.mean, estimate.half_width, estimate.lag1) == (7.0, 0.0, 0.0)

    @pytest.mark.parametrize(
        ("series", "kwargs", "message"),
        [
            (np.ones(39), {}, "series must have at least 40 values, found 39"),
            (np.r_[np.ones(60), np.nan], {}, "series must be finite"),
            (np.ones(60), {"num_batches": 7}, "num_batches must be >= 8, found 7"),
            (np.ones(60), {"confidence": 1.0}, r"confidence must be in \(0, 1\), found 1.0"),
        ],
    )
    def test_bad_input_is_refused(self, series: object, kwargs: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            batch_means(series, **kwargs)


class TestRatio:
    def test_the_interval_covers_the_ratio_of_means_as_often_as_it_says(self) -> None:
        # Tokens are twice the seconds plus noise; seconds are correlated.
        rng = stream(3, "ratio")
        hits = 0
        for seconds in autoregressive(500, 2000, 0.8, seed=4):
            tokens = 2.0 * seconds + rng.normal(size=len(seconds))
            estimate = ratio_batch_means(tokens, seconds)
            hits += estimate.low <= 2.0 <= estimate.high
        assert share_within(hits, 500, 0.95)

    def test_it_is_the_ratio_of_sums_not_the_mean_of_ratios(self) -> None:
        above, below = [1.0, 9.0] * 10, [1.0, 3.0] * 10
        assert ratio_batch_means(above, below, num_batches=8).mean == pytest.approx(10 / 4)

    def test_different_lengths_are_refused(self) -> None:
        with pytest.raises(ValueError, match="differ in length: 50 and 51"):
            ratio_batch_means(np.ones(50), np.ones(51))

    def test_over_runs_it_covers_the_ratio_of_means_where_the_mean_of_ratios_is_biased(
        self,
    ) -> None:
        # Tokens fixed, seconds exponential around 1 with a floor: E[1 / s] is well above 1 / E[s].
        seconds = 0.2 + 0.8 * stream(13, "seconds").exponential(size=(2000, 40))
        hits = 0
        for row in seconds:
            estimate = ratio_replications(np.ones(40), row)
            hits += estimate.low <= 1.0 <= estimate.high
        assert abs(hits / 2000 - 0.95) < 0.03
        assert abs(float((1 / seconds).mean()) - 1.0) > 0.3
        with pytest.raises(ValueError, match="differ in length: 5 and 6"):
            ratio_replications(np.ones(5), np.ones(6))


class TestReplications:
    def test_by_hand(self) -> None:
        estimate = replications([1.0, 2.0, 3.0, 4.0])
        assert estimate.mean == 2.5
        assert estimate.standard_error == pytest.approx(math.sqrt(5 / 3 / 4))
        assert estimate.half_width == pytest.approx(3.182446305 * estimate.standard_error)
        assert (estimate.low, estimate.high) == (
            2.5 - estimate.half_width,
            2.5 + estimate.half_width,
        )
        assert estimate.relative_standard_error == pytest.approx(estimate.standard_error / 2.5)

    def test_the_interval_covers_the_mean_as_often_as_it_says(self) -> None:
        samples = stream(5, "replications").normal(3.0, 2.0, size=(4000, 6))
        for confidence in (0.8, 0.95):
            hits = 0
            for values in samples:
                estimate = replications(values, confidence=confidence)
                hits += estimate.low <= 3.0 <= estimate.high
            assert abs(hits / 4000 - confidence) < 4 * math.sqrt(
                confidence * (1 - confidence) / 4000
            )

    def test_one_run_is_not_enough(self) -> None:
        with pytest.raises(ValueError, match="values must have at least 2 values, found 1"):
            replications([1.0])


class TestWarmUp:
    def test_the_cut_takes_most_of_the_transient_s_bias_away(self) -> None:
        rng = stream(6, "warm-up")
        transient = 6.0 * np.exp(-np.arange(6000) / 150)
        cuts = [mser5(transient + rng.normal(size=6000)).first for _ in range(40)]
        assert 2 * 150 < np.median(cuts) < 6 * 150
        bias = [transient[cut:].mean() for cut in cuts]
        assert np.mean(bias) < 0.15 * transient.mean()

    def test_a_settled_series_loses_little(self) -> None:
        cuts = [mser5(series).first for series in autoregressive(40, 4000, 0.5, seed=7)]
        assert np.median(cuts) < 400

    def test_a_drifting_series_is_warned_about_and_cut_at_the_middle_at_most(self) -> None:
        cut = mser5(np.linspace(0.0, 1.0, 1000))
        assert cut.first == 500
        assert cut.warning is not None
        assert "too short" in cut.warning
        assert mser5(stream(6, "settled").normal(size=1000)).warning is None

    def test_it_is_the_minimum_of_the_marginal_standard_error(self) -> None:
        series = np.r_[np.full(30, 9.0), stream(8, "mser").normal(size=170)]
        means = series.reshape(-1, 5).mean(axis=1)
        marginal = [means[k:].var() / len(means[k:]) for k in range(len(means) // 2 + 1)]
        assert mser5(series).first == 5 * int(np.argmin(marginal))

    def test_a_short_series_is_refused(self) -> None:
        with pytest.raises(ValueError, match="series must have at least 20 values, found 19"):
            mser5(np.ones(19))


class TestComparisons:
    def test_common_noise_cancels(self) -> None:
        rng = stream(9, "pairs")
        common, own = rng.normal(0, 10, 12), rng.normal(0, 0.1, 12)
        difference = paired_difference(common + 1.0 + own, common)
        assert difference.verdict == "a"
        assert difference.mean == pytest.approx(1.0, abs=0.2)
        assert difference.variance_ratio > 1000
        assert paired_difference(common, common + 1.0 + own).verdict == "b"

    def test_a_difference_within_the_noise_cannot_be_told(self) -> None:
        rng = stream(9, "no difference")
        told = sum(
            paired_difference(*rng.normal(size=(2, 8))).verdict != "cannot tell"
            for _ in range(2000)
        )
        assert abs(told / 2000 - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 2000)

    def test_equal_settings_cannot_be_told_apart(self) -> None:
        difference = paired_difference([1.0, 2.0, 4.0], [1.0, 2.0, 4.0])
        assert (difference.verdict, difference.half_width) == ("cannot tell", 0.0)
        assert difference.variance_ratio == math.inf

    def test_pairs_need_a_partner(self) -> None:
        with pytest.raises(
            ValueError, match="must have the same length, at least 2, found 3 and 2"
        ):
            paired_difference([1.0, 2.0, 3.0], [1.0, 2.0])

    def test_settings_clearly_behind_the_best_are_left_out_and_close_ones_kept(self) -> None:
        noise = stream(10, "ratios").normal(0, 1, 10)
        wobble = stream(11, "ratios").normal(0, 0.5, (3, 10))
        values = {7: noise + 9.0, 8: noise + 9.9 + wobble[0], 9: noise + 10.0 + wobble[1]}
        assert not_worse_than_best(values) == (8, 9)

    @pytest.mark.parametrize("num_settings", [2, 6])
    def test_a_setting_as_good_as_the_best_is_left_out_as_rarely_as_promised(
        self, num_settings: int
    ) -> None:
        rng = stream(12, "holm")
        runs = 2000
        dropped = 0
        for _ in range(runs):
            values = {k: rng.normal(0, 1, 10) for k in range(num_settings)}
            dropped += 0 not in not_worse_than_best(values)
        assert dropped / runs < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)

    def test_holm_by_hand(self) -> None:
        # Gaps of mean 1 with chosen spreads: p = .020 and .030 one-sided with nine degrees.
        base = np.zeros(10)
        unit = np.array([-1.0, 1.0] * 5) / math.sqrt(10 / 9)

        def behind(t: float) -> NDArray[np.float64]:
            return base - 1.0 + unit * math.sqrt(10) / t

        # t quantiles of 0.980 and 0.970 with 9 degrees of freedom: 2.398 and 2.150.
        assert not_worse_than_best({"a": base, "b": behind(2.398441), "c": behind(2.150375)}) == (
            "a",
        )
        assert not_worse_than_best({"a": base, "b": behind(1.9), "c": behind(2.150375)}) == (
            "a",
            "b",
            "c",
        )
