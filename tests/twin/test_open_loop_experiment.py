"""Open-loop experiments: rates, busy slots, goodput against queueing laws and brute force."""

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from models.scenario_file import parse_scenario
from twin.experiment import ExperimentResult, run_experiment
from twin.open_log import GapCounter, merge_gaps
from twin.plots import latency_figure
from twin.report import open_loop_table

STEP_S = 0.01
SLOTS = 2 * 16
CAPACITY_TOKENS_PER_S = SLOTS / STEP_S
MEAN_OUTPUT_TOKENS = 40


def scenario(**tables: dict[str, Any]) -> dict[str, Any]:
    """Two workers of 16 slots on which every step takes 10 ms, whatever the load."""
    asked: dict[str, dict[str, Any]] = {
        "workload": {
            "num_requests": 2000,
            "lengths": {
                "kind": "geometric",
                "prompt_tokens": 5,
                "mean_output_tokens": MEAN_OUTPUT_TOKENS,
            },
            "arrivals": {"kind": "poisson", "rate_per_s": 30.0},
        },
        "attention_ffn": {
            "r": 2,
            "r_max": 2,
            "batch_per_worker": 16,
            "num_layers": 1,
            "coefficients": {
                "alpha_attention": 5e-8,
                "beta_attention": STEP_S,
                "alpha_ffn": 0.0,
                "beta_ffn": STEP_S / 2,
                "alpha_communication": 0.0,
                "beta_communication": STEP_S / 4,
                "unit": "s",
            },
        },
        "routing": {"attention_worker": "least_token_load"},
        "slo": {"ttft_s": 0.5},
        "run": {"mode": "open_loop", "replications": 4},
    }
    for name, table in tables.items():
        asked[name] = {**asked.get(name, {}), **table}
    return asked


def experiment(**tables: dict[str, Any]) -> ExperimentResult:
    return run_experiment(parse_scenario(scenario(**tables)))


@pytest.fixture(scope="module")
def light() -> ExperimentResult:
    """30 x 40 of 3,200 tokens/s: never a queue to speak of."""
    return experiment()


@pytest.fixture(scope="module")
def overloaded() -> ExperimentResult:
    """Twice what the slots can serve, cut off while requests still arrive."""
    return experiment(
        workload={"num_requests": 2600, "arrivals": {"kind": "poisson", "rate_per_s": 160.0}},
        run={"horizon_s": 15.0},
    )


def table_of(result: ExperimentResult, replication: int) -> dict[str, np.ndarray]:
    assert result.requests is not None
    mine = np.asarray(result.requests["replication"]) == replication
    return {name: np.asarray(column)[mine] for name, column in result.requests.items()}


def shown(result: ExperimentResult) -> str:
    console = Console(file=io.StringIO(), width=400, highlight=False)
    console.print(open_loop_table(result.summary, True))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_a_lightly_loaded_bundle_serves_requests_as_they_arrive(light):
    run = light.summary["open_loop"]
    served = run["requests_per_s_interval"]
    assert served["mean"] == pytest.approx(run["requests_per_s"])
    assert abs(served["mean"] - 30.0) <= served["half_width"] < 3.0
    tokens = run["output_tokens_per_s_interval"]
    assert abs(tokens["mean"] - 30.0 * MEAN_OUTPUT_TOKENS) <= tokens["half_width"] < 150.0


def test_a_short_run_is_not_thinned_by_filling_up_and_draining():
    # 20 s of arrivals, 4 s in a slot: over the whole run the rate would be 30 * 20 / 24.
    run = experiment(
        workload={
            "num_requests": 600,
            "lengths": {"kind": "fixed", "prompt_tokens": 5, "output_tokens": 400},
        },
        attention_ffn={"batch_per_worker": 256},
    ).summary["open_loop"]
    assert run["slot_utilisation"] == pytest.approx(30.0 * 4.0 / 512, rel=0.06)  # Little's law
    assert run["requests_per_s"] == pytest.approx(30.0, rel=0.06)
    assert all(window["start_s"] > 2.0 for window in run["windows"])


def test_an_overloaded_bundle_serves_its_capacity(overloaded):
    run = overloaded.summary["open_loop"]
    assert run["output_tokens_per_s"] == pytest.approx(CAPACITY_TOKENS_PER_S, rel=0.01)
    assert run["output_tokens_per_s"] == pytest.approx(run["capacity_tokens_per_s"], rel=0.01)
    assert run["requests_per_s"] == pytest.approx(
        CAPACITY_TOKENS_PER_S / MEAN_OUTPUT_TOKENS, rel=0.05
    )
    assert run["offered_share"] == pytest.approx(2.0, rel=0.05)
    assert run["slot_utilisation"] == pytest.approx(1.0, rel=0.01)


def test_a_stage_is_idle_by_what_the_cycle_leaves_it(overloaded):
    run = overloaded.summary["open_loop"]
    assert run["ffn_idle"] == pytest.approx(0.5, abs=0.01)
    assert run["attention_idle"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("name", ["light", "overloaded"])
def test_busy_slots_and_rates_agree_with_the_requests_one_by_one(name, request):
    result = request.getfixturevalue(name)
    run = result.summary["open_loop"]
    busy_s = served = seconds = 0.0
    for number, window in enumerate(run["windows"]):
        start_s, end_s = window["start_s"], window["end_s"]
        table = table_of(result, number)
        assert start_s == table["arrival_s"][run["warm_up_requests"][number]]
        assert end_s == min(table["arrival_s"][-1], window["run_end_s"])
        for admitted_s, last_s in zip(table["admitted_s"], table["last_token_s"], strict=True):
            if admitted_s == admitted_s:
                until_s = last_s if last_s == last_s else window["run_end_s"]
                busy_s += max(0.0, min(until_s, end_s) - max(admitted_s, start_s))
            served += start_s < last_s <= end_s
        seconds += end_s - start_s
    assert run["slot_utilisation"] == pytest.approx(busy_s / (SLOTS * seconds), rel=2e-3)
    assert run["requests_per_s"] == pytest.approx(served / seconds)
    assert run["duration_s"] == pytest.approx(seconds / run["replications"])


def test_goodput_is_counted_request_by_request_and_unfinished_ones_are_not_good(overloaded):
    run = overloaded.summary["open_loop"]
    arrived = good = good_in_time = unfinished = 0
    for number, window in enumerate(run["windows"]):
        table = table_of(overloaded, number)
        for row in range(len(table["arrival_s"])):
            arrival_s, last_s = table["arrival_s"][row], table["last_token_s"][row]
            is_done = last_s == last_s
            is_good = bool(is_done and table["ttft_s"][row] <= 0.5)
            if window["start_s"] <= arrival_s <= window["end_s"]:
                arrived += 1
                good += is_good
                unfinished += not is_done
            good_in_time += is_good and window["start_s"] < last_s <= window["end_s"]
    found = run["goodput"]
    assert found["arrived"] == arrived
    assert found["unfinished"] == unfinished > 0
    assert found["share"] == pytest.approx(good / arrived)
    assert found["share_interval"]["mean"] == pytest.approx(found["share"])
    assert found["requests_per_s"] * run["duration_s"] * run["replications"] == pytest.approx(
        good_in_time
    )


def test_the_mean_gap_is_the_token_weighted_tpot_of_all_replications(light):
    table = light.requests
    weight = np.asarray(table["output_tokens"]) - 1.0
    tpot_s = np.nan_to_num(np.asarray(table["tpot_s"]))
    found = light.summary["open_loop"]["latency"]["itl_s"]
    assert found["mean"] == pytest.approx(float((weight * tpot_s).sum() / weight.sum()), rel=1e-9)
    assert found["interval"]["mean"] == pytest.approx(found["mean"])


def test_merged_gaps_are_those_of_one_counter_that_saw_them_all():
    gaps = np.random.default_rng(1).lognormal(-3.0, 1.0, 2000)
    counters = [GapCounter(), GapCounter(), GapCounter()]
    for number, gap_s in enumerate(gaps):
        counters[number % 2].add(float(gap_s), 1 + number % 3)
        counters[2].add(float(gap_s), 1 + number % 3)
    merged = merge_gaps([counter.histogram() for counter in counters[:2]])
    whole = counters[2].histogram()
    np.testing.assert_array_equal(merged.num_gaps, whole.num_gaps)
    np.testing.assert_allclose(merged.gap_s, whole.gap_s, rtol=1e-12)
    assert merged.mean_s == pytest.approx(whole.mean_s)


def test_no_gaps_merge_to_no_gaps():
    assert len(merge_gaps([GapCounter().histogram()] * 2).gap_s) == 0


def test_every_replication_accounts_for_every_request(overloaded):
    run = overloaded.summary["open_loop"]
    for number, window in enumerate(run["windows"]):
        fates = (window[name] for name in ("completed", "running", "queued", "preparing"))
        arrived = int((table_of(overloaded, number)["arrival_s"] <= 15.0).sum())
        assert window["injected"] == arrived == sum(fates)
    assert run["injected"] + run["beyond_horizon"] == 4 * 2600
    assert run["beyond_horizon"] > 0


def test_intervals_cover_each_mean_and_stand_in_the_report(light):
    run = light.summary["open_loop"]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        row = run["latency"][name]
        assert row["interval"]["mean"] == pytest.approx(row["mean"])
        assert row["interval"]["num_samples"] == 4
    text = shown(light)
    assert "8,000 requests in 4 replications" in text
    assert "±: 95 % interval of the mean, over replications" in text
    assert text.count("±") >= 5
    assert "in prefill" not in text
    assert "horizon" not in text


def test_requests_in_prefill_and_beyond_the_horizon_are_named():
    result = experiment(
        workload={"num_requests": 300},
        prefill={"base_s": 1.0},
        run={"horizon_s": 4.0, "replications": 1},
    )
    run = result.summary["open_loop"]
    assert run["preparing"] > 0
    assert f"{run['preparing']} in prefill" in shown(result)
    assert f"{300 - run['injected']} more would arrive after the horizon" in shown(result)
    assert any("had not arrived by the horizon" in line for line in result.summary["warnings"])


def test_a_recorded_trace_is_measured_from_its_first_to_its_last_arrival(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"{0.5 * n + 1.0},5,{50 + n}" for n in range(40)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    asked = scenario(run={"replications": 1})
    asked["workload"] = {"trace": str(path)}
    run = run_experiment(parse_scenario(asked)).summary["open_loop"]
    assert run["is_recorded"]
    (window,) = run["windows"]
    assert (window["start_s"], window["end_s"]) == (0.0, 19.5)
    # Service of n takes (50 + n) steps of 10 ms: the last two end after the last arrival.
    assert window["served"] == 38
    assert run["requests_per_s"] == pytest.approx(38 / 19.5)
    assert run["requests_per_s_interval"] is None
    assert run["goodput"]["share"] == 1.0


def test_requests_that_arrive_all_at_once_are_measured_to_the_end_of_the_run(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,5,100\n" * 10)
    asked = scenario(run={"replications": 1})
    asked["workload"] = {"trace": str(path)}
    run = run_experiment(parse_scenario(asked)).summary["open_loop"]
    assert run["output_tokens_per_s"] == pytest.approx(10 / STEP_S, rel=0.01)
    assert run["offered_tokens_per_s"] is None


def test_a_horizon_before_the_first_token_leaves_no_rates_and_no_latencies():
    run = experiment(run={"horizon_s": 1e-9, "replications": 2}).summary["open_loop"]
    assert run["injected"] == 0
    assert run["latency"]["ttft_s"] is None
    assert run["requests_per_s"] is None
    assert run["goodput"] is None


def test_target_lines_are_named_in_the_picture(light):
    axes = latency_figure(light.summary).axes[0]
    assert "target: TTFT <= 0.5 s" in axes.get_legend_handles_labels()[1]


def test_a_window_shorter_than_its_requests_last_is_warned_about(light):
    asked = {
        "workload": {
            "num_requests": 100,
            "lengths": {"kind": "fixed", "prompt_tokens": 5, "output_tokens": 900},
        },
        "attention_ffn": {"batch_per_worker": 64},
    }
    short = experiment(**asked).summary["warnings"]
    assert any("shorter than slow requests last" in line for line in short)
    assert not any("slow requests last" in line for line in light.summary["warnings"])
