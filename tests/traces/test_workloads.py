import json
from importlib import resources

import numpy as np
import pytest

from traces.lengths import LengthPairs
from traces.readers import read_trace
from traces.request import Trace
from traces.statistics import arrival_statistics
from traces.workloads import (
    BUNDLED,
    bundled_arrivals,
    bundled_info,
    bundled_lengths,
    expand_cells,
)

SOURCE_FILES = {
    "azure-2023-conversation": "azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz",
    "mooncake-conversation": "mooncake-conversation/conversation_trace.first-30-min.jsonl.gz",
}


@pytest.fixture(params=BUNDLED)
def name(request) -> str:
    return request.param


@pytest.fixture
def source(name: str, data_file) -> Trace:
    return read_trace(data_file(SOURCE_FILES[name]))


def moments(lengths: LengthPairs) -> dict[str, float]:
    p, w = lengths.prompt_tokens.astype(float), lengths.weight
    d = lengths.output_tokens.astype(float)
    steps, held = float(w @ d), d * p + d * (d - 1) / 2
    ages2, ages3 = d * (d - 1) * (2 * d - 1) / 6, (d * (d - 1) / 2) ** 2
    m1 = float(w @ held) / steps
    m2 = float(w @ (d * p**2 + p * d * (d - 1) + ages2)) / steps
    m3 = float(w @ (d * p**3 + 1.5 * p**2 * d * (d - 1) + 3 * p * ages2 + ages3)) / steps
    nu = (m2 - m1**2) ** 0.5
    mean_p, mean_d = float(w @ p), float(w @ d)
    return {
        "theta": m1,
        "nu": nu,
        "skew": (m3 - 3 * m1 * m2 + 2 * m1**3) / nu**3,
        "mean_p": mean_p,
        "mean_d": mean_d,
        "sd_p": float(w @ (p - mean_p) ** 2) ** 0.5,
        "sd_d": float(w @ (d - mean_d) ** 2) ** 0.5,
        "covariance": float(w @ ((p - mean_p) * (d - mean_d))),
        "theta_se": float(w @ (held - m1 * d) ** 2) ** 0.5 / steps,
    }


def test_a_bundled_law_has_the_moments_of_its_trace(name: str, source: Trace) -> None:
    ours, theirs = moments(bundled_lengths(name)), moments(source.lengths())
    for key in ("theta", "nu", "mean_p", "mean_d", "sd_p", "sd_d", "theta_se"):
        assert ours[key] == pytest.approx(theirs[key], rel=0.005), key
    assert ours["skew"] == pytest.approx(theirs["skew"], rel=0.02)
    scale = theirs["sd_p"] * theirs["sd_d"]
    assert ours["covariance"] / scale == pytest.approx(theirs["covariance"] / scale, abs=0.001)


@pytest.mark.parametrize("column", ["prompt_tokens", "output_tokens"])
def test_a_bundled_law_has_the_quantiles_of_its_trace(
    name: str, source: Trace, column: str
) -> None:
    law = bundled_lengths(name)
    observed = np.sort(getattr(source, column))
    ours = np.cumsum(np.bincount(getattr(law, column), law.weight))
    for tokens in np.quantile(observed, [0.25, 0.5, 0.75, 0.9, 0.99]):
        share = np.searchsorted(observed, tokens, side="right") / len(observed)
        # the law has a few hundred points where the trace has thousands: steps of 3 % remain
        nearby = ours[int(tokens * 0.9) : int(tokens * 1.1) + 2]
        assert nearby.min() - 0.03 <= share <= nearby.max() + 0.03


def test_a_bundled_law_knows_how_many_requests_it_stands_for(name: str, source: Trace) -> None:
    assert bundled_lengths(name).num_requests == len(source)
    assert bundled_info(name)["num_requests"] == len(source)


def test_no_cell_of_a_bundled_file_describes_fewer_than_ten_requests(name: str) -> None:
    text = resources.files("traces").joinpath("data", f"{name}.json").read_text()
    document = json.loads(text)
    counts = [cell[0] for cell in document["cells"]]
    assert min(counts) >= 10
    assert sum(counts) == document["num_requests"]
    assert len(text) < 40_000


def test_the_checksum_of_the_fitted_file_is_recorded(data_file) -> None:
    info = bundled_info("azure-2023-conversation")
    expected = "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8"
    assert info["sha256"] == expected
    assert info["licence"] == "CC-BY-4.0"
    assert "Microsoft" in str(info["attribution"])


def test_the_first_round_of_arrivals_has_the_rate_of_every_five_minutes(
    name: str, source: Trace
) -> None:
    assert source.arrival_s is not None
    arrivals = bundled_arrivals(name, np.random.default_rng(1), num_requests=len(source))
    edges = np.arange(0.0, source.duration_s, 300.0)
    ours, _ = np.histogram(arrivals, edges)
    theirs, _ = np.histogram(source.arrival_s, edges)
    gap_cv = float(str(bundled_info(name)["gap_cv"]))
    # what is left is the noise of the draw and, for coarse stamps, of a tick at a window's edge
    assert np.all(np.abs(ours - theirs) < 4.0 * gap_cv * np.sqrt(theirs) + 30)


def test_arrivals_keep_the_burstiness_of_the_azure_trace(data_file) -> None:
    source = read_trace(data_file(SOURCE_FILES["azure-2023-conversation"]))
    assert source.arrival_s is not None
    arrivals = bundled_arrivals(
        "azure-2023-conversation", np.random.default_rng(2), num_requests=len(source)
    )
    ours, theirs = arrival_statistics(arrivals), arrival_statistics(source.arrival_s)
    assert ours is not None
    assert theirs is not None
    assert ours.rate_per_s == pytest.approx(theirs.rate_per_s, rel=0.03)
    assert ours.gap_cv == pytest.approx(theirs.gap_cv, rel=0.05)
    for window_s, tolerance in ((1.0, 0.1), (10.0, 0.15), (60.0, 0.25), (300.0, 0.25)):
        assert ours.dispersion_by_window_s[window_s] == pytest.approx(
            theirs.dispersion_by_window_s[window_s], rel=tolerance
        )


def test_arrivals_go_round_after_the_end_of_the_trace(name: str) -> None:
    info = bundled_info(name)
    count = 3 * int(str(info["num_requests"]))
    arrivals = bundled_arrivals(name, np.random.default_rng(3), num_requests=count)
    assert np.all(np.diff(arrivals) >= 0.0)
    assert arrivals[-1] == pytest.approx(3 * float(str(info["duration_s"])), rel=0.05)


def test_the_rate_scale_shrinks_time_as_a_replay_does(name: str) -> None:
    plain, fast = (
        bundled_arrivals(name, np.random.default_rng(4), num_requests=1000, rate_scale=scale)
        for scale in (1.0, 50.0)
    )
    assert fast * 50.0 == pytest.approx(plain)


def test_four_points_have_the_second_moments_of_their_cell() -> None:
    law = expand_cells("cell", [[40, 1000.0, 200.0, 50.0, 20.0, -0.5]], 40)
    found = moments(law)
    assert found["mean_p"] == pytest.approx(1000.0)
    assert found["sd_d"] == pytest.approx(20.0)
    assert found["covariance"] == pytest.approx(-0.5 * 50 * 20)
    assert sorted(law.weight) == pytest.approx([0.125, 0.125, 0.375, 0.375])


def test_a_name_that_is_not_bundled_is_an_error_with_the_names_that_are() -> None:
    with pytest.raises(ValueError, match=r"must be one of azure.*, found 'gpt'"):
        bundled_lengths("gpt")
    with pytest.raises(ValueError, match="rate_scale must be finite and > 0, found 0"):
        bundled_arrivals(BUNDLED[0], np.random.default_rng(1), num_requests=1, rate_scale=0)
