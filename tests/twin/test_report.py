"""Reports: every section fits the width it is given, and nothing is hidden."""

import io

import pytest
from rich.console import Console

from models.scenario_file import apply_overrides, parse_scenario
from twin.experiment import run_experiment
from twin.plots import draw_all
from twin.report import duration, percent, print_report, rate, with_interval

SMALL = {
    "workload": {"trace": "azure-2023-conversation"},
    "attention_ffn": {"batch_per_worker": 8, "r_max": 6, "r": 3},
    "run": {"num_cycles": 60, "replications": 2},
    "faults": [{"kind": "slow", "worker": 1, "factor": 2.0}],
}


@pytest.fixture(scope="module")
def saturated():
    return run_experiment(parse_scenario(SMALL)).summary


@pytest.fixture(scope="module")
def open_loop():
    tables = {**SMALL, "run": {"mode": "open_loop", "replications": 2}}
    settings = [
        "workload.num_requests=300",
        "slo.ttft_s=0.5",
        "attention_ffn.semantics=pingpong",
    ]
    return run_experiment(parse_scenario(apply_overrides(tables, settings))).summary


def text(summary, width, *, terminal=False):
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, force_terminal=terminal, highlight=False)
    print_report(summary, console)
    return buffer.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_page(saturated, open_loop, width):
    for summary in (saturated, open_loop):
        assert max(len(line) for line in text(summary, width).splitlines()) <= width


def test_every_section_that_was_computed_is_shown(saturated, open_loop):
    shown = text(saturated, 100)
    for title in (
        "What was asked",
        "Theory at four levels",
        "simulated twin",
        "Stragglers",
        "Faults",
    ):
        assert title in shown
    assert "Open loop" in text(open_loop, 100)
    assert "goodput" in text(open_loop, 100)


def test_every_warning_is_printed(saturated):
    shown = " ".join(text(saturated, 160).split())
    for warning in saturated["warnings"]:
        assert " ".join(warning.split()) in shown


def test_a_given_ratio_is_priced_against_the_best(saturated):
    best = saturated["recommendation"]
    shown = text(saturated, 100)
    assert best["is_given"]
    assert f"r = {best['r']} was given" in shown
    assert percent(best["regret"]) in shown


def test_plain_text_has_no_escapes_and_a_terminal_has(saturated):
    assert "\x1b" not in text(saturated, 100)
    assert "\x1b" in text(saturated, 100, terminal=True)


def test_a_slow_worker_costs_what_it_must(saturated):
    assert saturated["faults"]["throughput_change"]["mean"] < -0.2


def test_pictures_are_drawn_and_repeat_byte_for_byte(saturated, open_loop):
    assert set(draw_all(saturated)) == {"throughput.png", "idle.png", "barrier.png", "load.png"}
    assert "latency.png" in draw_all(open_loop)
    assert draw_all(saturated) == draw_all(saturated)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0 s"), (3.7e-4, "370 us"), (0.0369, "36.9 ms"), (2.5, "2.5 s"), (None, "-")],
)
def test_durations_read_in_their_best_unit(seconds, shown):
    assert duration(seconds) == shown


def test_numbers_keep_their_meaning():
    assert rate(12345.6) == "12,346"
    assert rate(0.12345) == "0.1235"
    assert percent(None) == "-"
    assert with_interval({"mean": 3494.0, "half_width": 147.2}) == "3,494 ± 147"
    assert with_interval({"mean": 10.0, "half_width": None}) == "10"
