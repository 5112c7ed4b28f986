"""Scenario files: what is accepted, and the message for everything that is not."""

import os
import tomllib

import pytest

from models.scenario import Scenario
from models.scenario_file import (
    apply_overrides,
    default_scenario,
    load_scenario,
    parse_scenario,
    scenario_toml,
    with_absolute_files,
)
from models.strict_tables import ScenarioError

COMPLETE = """
[workload]
num_requests = 10
[workload.lengths]
kind = "geometric"
prompt_tokens = 100
mean_output_tokens = 500
[workload.arrivals]
kind = "poisson"
rate_per_s = 3
[attention_ffn]
r = 8
batch_per_worker = 64
semantics = "pingpong"
microbatches = 3
one_way_s = 1e-5
[attention_ffn.coefficients]
alpha_attention = 0.00165
beta_attention = 50
alpha_ffn = 0.083
beta_ffn = 100
communication = "bundle"
[routing]
attention_worker = "power_of_two"
[[faults]]
kind = "slow"
worker = 3
factor = 1.5
[[faults]]
kind = "jitter"
cv = 0.1
[prefill]
base_s = 0.01
[slo]
tpot_s = 0.1
[run]
mode = "open_loop"
seed = 7
"""

OPEN = (
    "run.mode=open_loop",
    "workload.arrivals.kind=poisson",
    "workload.arrivals.rate_per_s=3",
)

PINGPONG = "attention_ffn.semantics=pingpong"
OPEN_GAMMA = (*OPEN, "workload.arrivals.kind=gamma")
RARE = "workload.arrivals={kind='on_off',on_rate_per_s=1,mean_on_s=1e-5,mean_off_s=1e9}"

BAD = [
    # (settings, the part of the message that names the place, the part that names the rule)
    (["run.sed=1"], "[run] sed", "did you mean seed?"),
    (["runs.seed=1"], "runs", "unknown table"),
    (["run.seed=x"], "[run] seed", "an integer, found 'x'"),
    (["run.seed=1.5"], "[run] seed", "an integer, found 1.5"),
    (["run.seed=true"], "[run] seed", "an integer, found True"),
    (["run.seed=-1"], "[run] seed", ">= 0"),
    (["run.mode=closed"], "[run] mode", "'saturated', 'open_loop'"),
    (["run.mode=1"], "[run] mode", "found 1"),
    (["run.replications=0"], "[run] replications", ">= 1"),
    (["run.replications=1"], "[run] replications", "at least 2"),
    (["run.num_cycles=3"], "[run] num_cycles", ">= 20"),
    (["run.num_cycles='many'"], "[run] num_cycles", "an integer or 'auto'"),
    (["run.num_cycles=1000000000"], "[run] num_cycles", "<= 10,000,000 with 4 replications"),
    (["run.num_cycles=20000001", "run.replications=2"], "[run] num_cycles", "<= 20,000,000"),
    (["run.simulate_r=[]"], "[run] simulate_r", "empty"),
    (["run.simulate_r=[0]"], "[run] simulate_r", ">= 1"),
    (["run.simulate_r=[1,'two']"], "[run] simulate_r", "a list of integers"),
    (["run.confidence=1.0"], "[run] confidence", "0.5..0.999999"),
    (["run.confidence=nan"], "[run] confidence", "nan"),
    (["run.target_relative_error=0"], "[run] target_relative_error", "1e-06..1"),
    (["run.horizon_s=5"], "[run] horizon_s", "open_loop"),
    (["run.engine=cuda"], "[run] engine", "'auto', 'simpy', 'compiled'"),
    (["attention_ffn.r=0"], "[attention_ffn] r", ">= 1"),
    (["attention_ffn.r=best"], "[attention_ffn] r", "an integer or 'auto'"),
    (["attention_ffn.r=9", "attention_ffn.r_max=8"], "[attention_ffn] r", "<= r_max (8)"),
    (["attention_ffn.r=5000"], "[attention_ffn] r", "<= 4,096"),
    (["attention_ffn.batch_per_worker=0"], "[attention_ffn] batch_per_worker", ">= 1"),
    (["attention_ffn.batch_per_worker=auto"], "[attention_ffn] batch_per_worker", "max_tpot_s"),
    (["attention_ffn.semantics=pong"], "[attention_ffn] semantics", "'barrier', 'pingpong'"),
    (["attention_ffn.microbatches=17"], "[attention_ffn] microbatches", "<= 16"),
    (["attention_ffn.one_way_s=1e-6"], "[attention_ffn] one_way_s", "pingpong"),
    (["attention_ffn.attention_price=0"], "[attention_ffn] attention_price", "> 0"),
    (["attention_ffn.ffn_price=inf"], "[attention_ffn] ffn_price", "finite"),
    (["attention_ffn.attention_price=1e300"], "[attention_ffn] attention_price", "1e-06..1e+09"),
    ([PINGPONG, "attention_ffn.one_way_s=1e300"], "[attention_ffn] one_way_s", "0..1e+06"),
    ([*OPEN_GAMMA, "workload.arrivals.cv=1e300"], "[workload.arrivals] cv", "0..1000"),
    (["run.mode=open_loop", RARE], "[workload.arrivals] mean_on_s", "at least 0.001 requests"),
    (["attention_ffn.max_tpot_s=-1"], "[attention_ffn] max_tpot_s", "> 0"),
    (["attention_ffn.kv_capacity_tokens=1.5"], "[attention_ffn] kv_capacity_tokens", "an integer"),
    (["attention_ffn.level=best"], "[attention_ffn] level", "'exact'"),
    (["attention_ffn.coefficients.alpha_ffn=1"], "[attention_ffn.coefficients]", "missing"),
    (["workload.lengths.kind=fixed"], "[workload.lengths]", "missing"),
    (
        ["workload.lengths={kind='fixed',prompt_tokens=1,output_tokens=1}"],
        "[workload] trace",
        "both",
    ),
    (["workload.columns={arrival=3}"], "[workload.columns] arrival", "text"),
    (["workload.time_unit=min"], "[workload] time_unit", "'ms'"),
    (["workload.skip_bad_rows=1"], "[workload] skip_bad_rows", "true or false"),
    (["workload.num_requests=5"], "[workload] num_requests", "open_loop"),
    (["workload.arrivals.kind=burst"], "[workload.arrivals] kind", "'poisson'"),
    (["workload.arrivals=3"], "[workload.arrivals]", "must be a table"),
    (["slo.ttft_s=0"], "[slo] ttft_s", "> 0"),
    (["slo.tpot_s=0.1"], "[slo]", "open_loop"),
    (["prefill.base_s=1"], "[prefill]", "open_loop"),
    (["routing.attention_worker=best"], "[routing] attention_worker", "'least_token_load'"),
    (["faults.kind=slow"], "[faults]", "a list of tables"),
    (["run=4"], "--set run=4", "table.key=value"),
    (["run.seed=" + 5000 * "["], "--set run.seed=[[[", "recursion"),
    (["run.seed=" + 30 * "[" + 30 * "]"], "--set run.seed=[[[", "nested deeper than 20"),
    (["run." + 5000 * "a." + "b=1"], "--set run.a.a", "nested deeper than 20"),
    (["run.seed=" + 5000 * "9"], "--set run.seed=999", "4300 digits"),
    (["run.seed=" + 400 * "9"], "--set run.seed=999", "64 bits"),
    (["attention_ffn.max_tpot_s=" + 400 * "9"], "max_tpot_s", "64 bits"),
    (["attention_ffn.r=3\nrun.seed=4"], "--set attention_ffn.r=3 run.seed=4", "one setting"),
    (["attention_ffn.r=3\n[x"], "--set attention_ffn.r=3 [x", "several lines"),
    (["attention_ffn.kv_safety_z=2"], "[attention_ffn] kv_safety_z", "kv_capacity_tokens"),
    (
        ["workload.lengths={kind='fixed',prompt_tokens=3000000000,output_tokens=1}"],
        "prompt_tokens",
        "<= 2,147,483,647",
    ),
    ([*OPEN, "workload.arrivals.rate_per_s=1e-12"], "rate_per_s", "1e-06..1e+12"),
    ([*OPEN, "run.start=cold"], "[run] start", "'saturated'"),
    ([*OPEN, "run.num_cycles=60"], "[run] num_cycles", "'saturated'"),
    ([*OPEN, "run.engine=compiled"], "[run] engine", "'saturated'"),
    ([*OPEN, "run.simulate_r=[2]"], "[run] simulate_r", "'saturated'"),
    ([*OPEN, "run.compare_routing=false"], "[run] compare_routing", "'saturated'"),
    ([*OPEN, "run.target_relative_error=0.1"], "[run] target_relative_error", "'saturated'"),
    (["run.seed"], "--set run.seed", "table.key=value"),
    (["run.seed.x=1", "run.seed=1", "run.seed.y=2"], "--set run.seed.y=2", "not a table"),
]

BAD_FAULTS = [
    ({"kind": "slow", "worker": 0}, "factor", "missing"),
    ({"kind": "jitter"}, "cv", "missing"),
    ({"kind": "pause", "worker": 0}, "duration_s", "missing"),
    ({"kind": "lost"}, "worker", "missing"),
    ({"kind": "lost", "worker": 0, "factor": 2.0}, "factor", "'slow'"),
    ({"kind": "slow", "worker": -1, "factor": 2.0}, "worker", ">= 0"),
    ({"kind": "fire", "worker": 0}, "kind", "'slow'"),
    ({"worker": 0}, "kind", "missing"),
    ({"kind": "slow", "worker": 9, "factor": 2.0}, "worker", "< r (8)"),
    ({"kind": "slow", "worker": 0, "factor": 0}, "factor", "> 0"),
    ({"kind": "slow", "worker": 0, "factor": 1e300}, "factor", "1e-06..1e+06"),
    ({"kind": "jitter", "cv": 1e-300}, "cv", "0.001..100"),
    ({"kind": "jitter", "cv": 1e300}, "cv", "0.001..100"),
]


def base() -> dict:
    return {"workload": {"trace": "azure-2023-conversation"}}


@pytest.mark.parametrize(("settings", "place", "rule"), BAD, ids=[" ".join(b[0])[:60] for b in BAD])
def test_a_bad_setting_is_one_line_that_names_place_and_rule(settings, place, rule):
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(apply_overrides(base(), settings))
    message = str(caught.value)
    assert place in message
    assert rule in message
    assert "\n" not in message


@pytest.mark.parametrize(("fault", "field", "rule"), BAD_FAULTS)
def test_a_bad_fault_names_its_field(fault, field, rule):
    with pytest.raises(ScenarioError) as caught:
        parse_scenario({**base(), "attention_ffn": {"r": 8}, "faults": [fault]})
    assert f" {field}:" in str(caught.value)
    assert rule in str(caught.value)


def test_the_complete_example_survives_writing_and_reading():
    scenario = parse_scenario(tomllib.loads(COMPLETE))
    assert parse_scenario(tomllib.loads(scenario_toml(scenario))) == scenario


def test_the_default_scenario_survives_writing_and_reading():
    scenario = default_scenario()
    assert parse_scenario(tomllib.loads(scenario_toml(scenario))) == scenario


def test_coefficients_are_converted_to_seconds():
    scenario = parse_scenario(tomllib.loads(COMPLETE))
    assert scenario.attention_ffn.coefficients is not None
    seconds = scenario.attention_ffn.coefficients.in_seconds()
    assert seconds.beta_attention == pytest.approx(50e-6)
    assert seconds.communication == "bundle"


def test_microbatches_follow_the_semantics():
    barrier = default_scenario()
    pingpong = parse_scenario(apply_overrides(base(), ["attention_ffn.semantics=pingpong"]))
    assert barrier.attention_ffn.num_microbatches == 1
    assert pingpong.attention_ffn.num_microbatches == 2


def test_overrides_leave_the_tables_they_came_from_alone():
    tables = base()
    apply_overrides(tables, ["workload.trace=other", "run.seed=4"])
    assert tables == base()


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"[run\nseed=1", "not valid TOML"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"x = " + 5000 * b"[", "not valid TOML"),
        (b"[run" + 5000 * b".a" + b"]", "nested deeper than 20"),
        (b"workload = 3", "must be a table"),
        (b"[workload]\ntrace = ''\n[workload]\n", "not valid TOML"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, rule):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    assert str(path) in str(caught.value)
    assert rule in str(caught.value)


def test_a_missing_file_and_a_directory_are_told_apart(tmp_path):
    with pytest.raises(ScenarioError, match="no such scenario file"):
        load_scenario(tmp_path / "none.toml")
    with pytest.raises(ScenarioError, match="is a directory"):
        load_scenario(tmp_path)


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ScenarioError, match="not a regular file"):
        load_scenario(tmp_path / "pipe.toml")


def test_without_a_workload_the_bundled_one_is_meant(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text("[run]\nseed = 3\n")
    assert load_scenario(path).workload == default_scenario().workload
    path.write_text("")
    assert load_scenario(path) == default_scenario()
    lengths = {"kind": "fixed", "prompt_tokens": 1, "output_tokens": 1}
    assert parse_scenario({"workload": {"lengths": lengths}}).workload.trace is None


def test_faults_can_be_given_as_an_override():
    tables = apply_overrides({}, ['faults=[{kind="slow",worker=1,factor=2}]'])
    (fault,) = parse_scenario(tables).faults
    assert (fault.kind, fault.worker, fault.factor) == ("slow", 1, 2.0)


def test_files_beside_the_scenario_come_before_those_of_the_current_directory(
    tmp_path, monkeypatch
):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    for name in ("there/both.csv", "here/both.csv", "here/only_here.csv", "there/c.json"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "there" / "scenario.toml"
    for trace, found in (
        ("both.csv", str(tmp_path / "there" / "both.csv")),
        ("only_here.csv", "only_here.csv"),
        ("nowhere.csv", "nowhere.csv"),
        ("azure-2023-conversation", "azure-2023-conversation"),
    ):
        path.write_text(f"workload.trace = '{trace}'\nattention_ffn.calibration = 'c.json'\n")
        scenario = load_scenario(path)
        assert scenario.workload.trace == found
        assert scenario.attention_ffn.calibration == str(tmp_path / "there" / "c.json")
        (tmp_path / "there" / "azure-2023-conversation").mkdir(exist_ok=True)


def test_absolute_names_are_for_files_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("")
    tables = {"workload": {"trace": "t.csv"}, "attention_ffn": {"calibration": "none.json"}}
    assert with_absolute_files(tables) == {
        "workload": {"trace": str(tmp_path / "t.csv")},
        "attention_ffn": {"calibration": "none.json"},
    }
    assert with_absolute_files(base()) == base()


@pytest.mark.parametrize("value", [1e300, 1e13, 1e-300])
def test_coefficients_without_meaning_are_refused(value):
    coefficients = dict.fromkeys(
        ("alpha_attention", "beta_attention", "alpha_ffn", "beta_ffn"), 1.0
    )
    tables = {**base(), "attention_ffn": {"coefficients": {**coefficients, "alpha_ffn": value}}}
    with pytest.raises(ScenarioError, match=r"alpha_ffn must be 0 or within 1e-20\.\.1e\+06 sec"):
        parse_scenario(tables)


def test_a_byte_order_mark_is_accepted(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf[workload]\ntrace = 'x'\n")
    assert isinstance(load_scenario(path), Scenario)
