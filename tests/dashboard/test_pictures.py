"""What is drawn is what the summary says."""

import functools
import math
from typing import Any

import pytest

from dashboard.pictures import (
    barrier_picture,
    idle_picture,
    latency_picture,
    load_picture,
    throughput_picture,
)
from models.scenario_file import parse_scenario
from twin.experiment import run_experiment

LEVELS = {
    "mean field": "mean_field",
    "Gaussian": "gaussian",
    "Pearson III": "pearson3",
    "exact": "exact",
}


@functools.cache
def small_run() -> dict[str, Any]:
    scenario = parse_scenario(
        {
            "workload": {"trace": "azure-2023-conversation"},
            "attention_ffn": {"batch_per_worker": 16, "r_max": 12},
            "run": {
                "engine": "simpy",
                "replications": 2,
                "num_cycles": 60,
                "simulate_r": [2, 8],
                "compare_routing": False,
            },
        }
    )
    return dict(run_experiment(scenario).summary)


def trace_of(figure: Any, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


@pytest.mark.parametrize("name", LEVELS)
def test_throughput_curves_are_those_of_the_levels(name: str) -> None:
    summary = small_run()
    drawn = trace_of(throughput_picture(summary), name)
    curve = summary["levels"][LEVELS[name]]["curve"]["throughput_per_instance"]
    assert list(drawn.x) == summary["ratios"]
    assert list(drawn.y) == [value / summary["bundle"]["num_layers"] for value in curve]


def test_simulated_points_carry_their_intervals() -> None:
    summary = small_run()
    layers, points = summary["bundle"]["num_layers"], summary["simulation"]["points"]
    drawn = trace_of(throughput_picture(summary), "simulated twin")
    estimates = [point["throughput_per_instance"] for point in points]
    assert list(drawn.x) == [point["r"] for point in points]
    assert list(drawn.y) == [estimate["mean"] / layers for estimate in estimates]
    assert list(drawn.error_y.array) == [estimate["half_width"] / layers for estimate in estimates]


def test_the_ratio_in_use_is_marked_in_every_picture_over_r() -> None:
    summary = small_run()
    r = summary["recommendation"]["r"]
    for picture in (throughput_picture, idle_picture, barrier_picture):
        figure = picture(summary)
        assert f"r = {r}" in [note.text for note in figure.layout.annotations]
        assert r in [shape.x0 for shape in figure.layout.shapes]


def test_on_a_log_axis_the_name_of_the_ratio_stands_at_its_line() -> None:
    summary = small_run()
    r = summary["recommendation"]["r"]
    figure = throughput_picture(summary, log_ratio=True)
    assert figure.layout.shapes[-1].x0 == r
    assert figure.layout.annotations[-1].x == math.log10(r)


def test_latency_curves_and_targets_are_those_of_the_run() -> None:
    row = {"quantile_levels": [0.0, 0.5, 1.0], "quantiles_s": [0.1, 0.2, 0.9]}
    summary = {
        "open_loop": {
            "latency": {"ttft_s": row, "tpot_s": {**row, "quantiles_s": []}},
            "slo": {"ttft_s": 0.5, "tpot_s": None, "e2e_s": None},
        }
    }
    figure = latency_picture(summary)
    assert [trace.name for trace in figure.data] == ["TTFT"]
    assert list(figure.data[0].x) == [0.1, 0.2, 0.9]
    assert [shape.x0 for shape in figure.layout.shapes] == [0.5]
    assert [note.text for note in figure.layout.annotations] == ["TTFT target"]


def test_idle_shares_are_those_of_the_exact_level_and_of_the_twin() -> None:
    summary = small_run()
    figure = idle_picture(summary)
    curve = summary["levels"]["exact"]["curve"]
    assert list(trace_of(figure, "attention").y) == curve["attention_idle"]
    assert list(trace_of(figure, "FFN").y) == curve["ffn_idle"]
    assert list(trace_of(figure, "FFN, twin").y) == [
        point["ffn_idle"]["mean"] for point in summary["simulation"]["points"]
    ]


def test_straggler_overhead_is_the_cycle_over_the_mean_field_cycle() -> None:
    summary = small_run()
    figure = barrier_picture(summary)
    mean_field = summary["levels"]["mean_field"]["curve"]["cycle_s"]
    assert (
        list(trace_of(figure, "exact").y)
        == (summary["levels"]["exact"]["curve"]["barrier_overhead"])
    )
    assert list(trace_of(figure, "twin").y) == pytest.approx(
        [
            point["cycle_s"]["mean"] / mean_field[point["r"] - 1] - 1.0
            for point in summary["simulation"]["points"]
        ]
    )


def test_the_load_histogram_is_that_of_the_summary() -> None:
    summary = small_run()
    load = summary["load_distribution"]
    figure = load_picture(summary)
    assert list(trace_of(figure, "twin").y) == load["twin_share"]
    assert list(trace_of(figure, "exact law").y) == load["theory_share"]


def test_closed_forms_alone_can_be_drawn_and_have_no_points() -> None:
    summary = {key: value for key, value in small_run().items() if key != "simulation"}
    for picture in (throughput_picture, idle_picture, barrier_picture):
        assert all(trace.mode == "lines" for trace in picture(summary).data)
