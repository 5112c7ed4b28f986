"""What the saturated points and the closed forms say side by side."""

import csv
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from models.attention_ffn import optimum, predict
from models.calibration import fit_attention_ffn, save_calibration
from models.scenario import Scenario
from models.scenario_file import parse_scenario
from models.workload import resolve_workload
from traces.decisions import DecisionLog
from twin.comparisons import not_worse_than_best
from twin.experiment import run_experiment
from twin.replay import replay_log
from twin.report import headline, how_sure, levels_table, percent, print_report, with_interval
from twin.simulation import Simulator, simulated_ratios
from twin.theory import Theory, solve_theory, theory_summary

GEOMETRIC = {"kind": "geometric", "prompt_tokens": 100, "mean_output_tokens": 500}


def scenario(
    attention_ffn: dict[str, Any], *, lengths: dict[str, Any] | None = None, **tables: Any
) -> Scenario:
    return parse_scenario(
        {
            "workload": {"lengths": lengths or GEOMETRIC},
            "attention_ffn": {"level": "gaussian", **attention_ffn},
            **tables,
        }
    )


def theory(attention_ffn: dict[str, Any], **tables: Any) -> Theory:
    asked = scenario(attention_ffn, **tables)
    return solve_theory(asked, resolve_workload(asked.workload, seed=1))


def shown(summary: Any) -> str:
    buffer = io.StringIO()
    print_report(summary, Console(file=buffer, width=160, highlight=False))
    return " ".join(buffer.getvalue().split())


# --- which ratios are as good as the best ------------------------------------------------------


def test_every_setting_is_compared_over_the_replications_it_shares_with_the_best() -> None:
    rng = np.random.default_rng(5)
    noise = rng.normal(0, 1, 64)
    values = {
        8: noise + 10.0,
        9: noise + 9.6 + rng.normal(0, 0.5, 64),  # a gap that 4 pairs do not show, 64 do
        40: noise[:4] + 5.0 + rng.normal(0, 0.1, 4),
    }
    assert not_worse_than_best(values, best=8) == (8,)
    assert 9 in not_worse_than_best({r: x[:4] for r, x in values.items()}, best=8)


def test_the_best_that_is_named_is_always_among_those_as_good_as_it() -> None:
    values = {8: np.array([1.0, 2.0, 3.0]), 9: np.array([2.0, 3.0, 3.5])}
    assert 8 in not_worse_than_best(values, best=8)
    with pytest.raises(ValueError, match="best must be one of the settings, found 7"):
        not_worse_than_best(values, best=7)


def test_ratios_with_few_replications_do_not_blur_the_comparison_of_the_others() -> None:
    solved = theory(
        {"batch_per_worker": 64, "r_max": 40},
        run={"replications": 2, "target_relative_error": 0.01, "simulate_r": [4, 8, 40]},
    )
    simulator = Simulator(theory=solved)
    summary = simulator.points_summary(simulated_ratios(solved))
    runs = {point["r"]: point["replications"] for point in summary["points"]}
    assert len(set(runs.values())) > 1
    assert summary["best_r"] in summary["not_worse_than_best"]
    values = {r: simulator.point(r).tokens / simulator.point(r).priced_s for r in runs}
    expected = not_worse_than_best(values, best=summary["best_r"])
    assert summary["not_worse_than_best"] == sorted(expected)


# --- levels beyond the automatic range ----------------------------------------------------------

# Prompts that vary this much put the mean field's optimum far beyond the barrier's.
SKEWED = {
    "kind": "lognormal",
    "mean_prompt_tokens": 20_000,
    "mean_output_tokens": 300,
    "sigma_prompt": 1.0,
    "sigma_output": 0.8,
}


def test_a_level_finds_its_optimum_beyond_an_automatic_range() -> None:
    given = {"batch_per_worker": 64}
    solved = theory(given, lengths=SKEWED)
    best = optimum(solved.bundle, solved.moments.theta_tokens)
    assert best.r > len(solved.ratios)  # else this test shows nothing
    level = theory_summary(solved)["levels"]["mean_field"]
    assert level["r"] == best.r
    assert level["throughput_per_instance"] == pytest.approx(best.throughput_per_instance)
    both = predict(
        solved.workload.lengths, solved.bundle, range(1, best.r + 1), level="exact"
    ).throughput_per_instance
    assert level["regret"] == pytest.approx(1.0 - both[-1] / both.max())


def test_a_range_that_was_asked_for_still_limits_every_level() -> None:
    solved = theory({"batch_per_worker": 64, "r_max": 6}, lengths=SKEWED)
    assert max(level["r"] for level in theory_summary(solved)["levels"].values()) == 6


# --- limits ---------------------------------------------------------------------------------------


def test_the_other_semantics_keep_the_limits_too() -> None:
    limits = {"batch_per_worker": 64, "max_tpot_s": 0.014}
    other = theory_summary(theory(limits))["other_semantics"]
    assert (other["r"], other["misses"]) == (None, "max_tpot_s")
    assert "cannot meet max_tpot_s at any r" in shown(
        theory_summary(theory(limits)) | {"warnings": []}
    )
    other = theory_summary(theory({"batch_per_worker": 64, "max_tpot_s": 0.0165}))[
        "other_semantics"
    ]
    assert other["tpot_s"] <= 0.0165
    full = theory({"batch_per_worker": 64, "kv_capacity_tokens": 60_000})
    assert theory_summary(full)["other_semantics"]["misses"] == "kv_capacity_tokens"


def test_a_given_ratio_gets_a_batch_of_its_own_and_the_log_repeats_it(tmp_path: Any) -> None:
    asked = scenario({"batch_per_worker": "auto", "r": 20, "max_tpot_s": 0.03, "r_max": 64})
    log = DecisionLog()
    solved = solve_theory(asked, resolve_workload(asked.workload, seed=1), log)
    assert solved.deciding.tpot_s[19] <= 0.03
    assert not [text for text in theory_summary(solved)["warnings"] if "was given but" in text]
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(log.to_bytes())
    assert replay_log(path).difference is None
    assert log.decisions[0].args["given_r"] == 20


def test_a_log_from_before_ratios_could_be_given_still_replays(tmp_path: Any) -> None:
    asked = scenario({"batch_per_worker": 64, "r_max": 16})
    log = DecisionLog()
    solve_theory(asked, resolve_workload(asked.workload, seed=1), log)
    old = log.decisions[0]
    args = {name: value for name, value in old.args.items() if name != "given_r"}
    orders = {name: value for name, value in old.orders.items() if name != "misses_limit_high"}
    log.decisions[0] = replace(old, args=args, orders=orders)
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(log.to_bytes())
    assert replay_log(path).difference is None


def test_an_answer_that_may_miss_its_limit_is_not_called_safe() -> None:
    solved = theory({"batch_per_worker": 64, "r_max": 16})
    safe = theory_summary(solved)["recommendation"] | {"is_sampled": True}
    assert not safe["misses_limit_high"]
    assert "sampling error does not move it" in how_sure(safe)
    for r_low in (safe["r_high"], safe["r_high"] - 3):
        text = how_sure(safe | {"misses_limit_high": True, "r_low": r_low})
        assert f"at + 2 se r = {safe['best_r']} would miss max_tpot_s" in text
        assert "does not move it" not in text
        assert "regret at most" not in text


def test_a_given_ratio_is_judged_at_its_own_batch_size() -> None:
    solved = theory({"batch_per_worker": "auto", "r": 4, "max_tpot_s": 0.02, "r_max": 16})
    text = headline(theory_summary(solved)["recommendation"])
    assert f"for B = {solved.bundle.batch_per_worker}" in text


# --- what a reader is told ----------------------------------------------------------------------


def test_a_routing_that_theory_does_not_assume_is_shown_and_explained() -> None:
    asked = scenario(
        {"batch_per_worker": 8, "r": 3, "r_max": 4},
        routing={"attention_worker": "least_token_load"},
        run={"num_cycles": 40, "replications": 2, "simulate_r": "chosen", "compare_routing": False},
    )
    summary = run_experiment(asked).summary
    text = shown(summary)
    assert "free slots refilled by least_token_load" in text
    assert "theory assumes random refill of free slots; least_token_load does better" in text
    assert "Best simulated r" not in text  # only one was simulated


def test_what_rounds_to_nothing_has_no_minus() -> None:
    assert percent(-1e-7, 1) == "0.0 %"
    assert percent(-0.0119, 1) == "-1.2 %"
    assert with_interval({"mean": 1121.0, "half_width": 2.4e-13}) == "1,121 ± 0"


def test_a_calibration_that_fits_badly_is_not_used_silently(tmp_path: Any) -> None:
    measured = tmp_path / "measured.csv"
    with measured.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["stage", "tokens", "batch", "time_us"])
        for n in (1000, 2000, 4000, 8000):
            writer.writerow(["attention", n, "", (n / 1000) ** 2 * 10])
            writer.writerow(["ffn", "", n, 100 + n * 0.083])
    calibration = tmp_path / "bent.json"
    save_calibration(fit_attention_ffn(measured), calibration)
    warnings = theory_summary(theory({"batch_per_worker": 8, "calibration": str(calibration)}))[
        "warnings"
    ]
    assert any(": attention: " in text and "off by up to" in text for text in warnings)
    assert not any(": ffn: " in text for text in warnings)
    assert any("those of one layer" in text for text in warnings)
    deep = {"batch_per_worker": 8, "calibration": str(calibration), "num_layers": 61}
    assert not any("one layer" in text for text in theory_summary(theory(deep))["warnings"])


def test_levels_are_shown_at_their_own_optimum() -> None:
    summary = theory_summary(theory({"batch_per_worker": 64}, lengths=SKEWED))
    buffer = io.StringIO()
    Console(file=buffer, width=120).print(levels_table(summary, True))
    line = next(line for line in buffer.getvalue().splitlines() if "mean field" in line)
    assert f" {summary['levels']['mean_field']['r']} " in line


def test_a_power_law_that_ends_before_its_cap_says_where() -> None:
    law = {
        "kind": "pareto",
        "prompt_tokens": 10,
        "minimum_output_tokens": 2,
        "tail_index": 2.5,
        "cap_tokens": 10_000,
    }
    end = int(2 * 800_000 ** (1 / 2.5))  # the last quantile, 1 - 1 / 800,000
    warnings = theory_summary(theory({"batch_per_worker": 8, "r_max": 4}, lengths=law))["warnings"]
    assert any(f"ends at {end:,} output tokens" in text for text in warnings)
    reached = law | {"cap_tokens": 300}
    solved = theory({"batch_per_worker": 8, "r_max": 4}, lengths=reached)
    assert not any("ends at" in text for text in theory_summary(solved)["warnings"])
