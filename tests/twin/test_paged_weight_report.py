"""``twin run`` with a paged-weight scenario: files, tables, pictures, and what is refused."""

import io
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from models.kv_bytes import kv_token_bytes
from models.scenario_file import load_scenario, parse_paged_weight, read_toml
from models.strict_tables import ScenarioError
from models.workload import resolve_workload
from traces.record import read_run
from twin import cli
from twin.paged_weight_engine import PagedWeightEngine, weights_of
from twin.paged_weight_experiment import run_paged_weight
from twin.paged_weight_model import build_model
from twin.paged_weight_plots import draw_paged_weight
from twin.paged_weight_report import print_paged_weight
from twin.paged_weight_summary import capacity, deployment_summary
from twin.replay import replay_log

SCENARIO = Path(__file__).parents[2] / "scenarios" / "paged-weight.toml"
SMALL = """
[workload]
num_requests = 40
[workload.lengths]
kind = "geometric"
prompt_tokens = 300
mean_output_tokens = 60
[workload.arrivals]
kind = "gamma"
rate_per_s = 40
cv = 2
[llm]
model = "Qwen1.5-MoE-A2.7B"
[hardware]
device = "RTX-4090"
memory_gb = 14
[precision]
compare = ["uniform", 4, 16]
[serving]
max_running = 32
[slo]
ttft_s = 1.0
"""


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Exit code, standard output and error of ``twin run ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["twin", "run", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return dict(run_paged_weight(parse_paged_weight(tomllib.loads(SMALL))).summary)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


def test_a_run_leaves_a_directory_that_reads_back_and_replays(small, tmp_path, monkeypatch, capsys):
    target = tmp_path / "out"
    code, out, err = run(monkeypatch, capsys, str(small), "--out", str(target))
    assert (code, err) == (0, "")
    record = read_run(target)
    assert {"arena.png", "frontier.png", "decisions.jsonl.gz", "report.txt"} <= set(record.files)
    assert replay_log(target).difference is None
    rows = record.summary["policies"]
    assert [row["policy"] for row in rows] == ["hull", "uniform", 4, 16]
    assert "too big" in out  # 16 bits
    table = record.requests
    hull = table["policy"] == "hull"
    assert hull.sum() == 40
    ttft = table["ttft_s"][hull]
    assert rows[0]["latency"]["ttft_s"]["p50"] == pytest.approx(np.quantile(ttft, 0.5))
    assert rows[0]["good_share"] == pytest.approx((ttft <= 1.0).mean())
    times = record.timeseries
    total = times["weight_pages"] + times["kv_pages"] + times["free_pages"]
    assert (total == record.summary["deployment"]["arena_pages"]).all()
    again = tmp_path / "again"
    arguments = (str(target / "scenario.toml"), "--no-plots", "--out", str(again))
    assert run(monkeypatch, capsys, *arguments)[0] == 0
    assert read_run(again).summary["files"].items() <= record.summary["files"].items()


def test_json_holds_what_the_tables_show(small, tmp_path, monkeypatch, capsys):
    arguments = (str(small), "--json", "--no-plots", "--out", str(tmp_path / "out"))
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    found = json.loads(out)
    assert found["kind"] == "paged-weight"
    assert found["run_directory"] == str(tmp_path / "out")
    assert {row["bits"]: row["fits"] for row in found["capacity"]}[16] is False


def printed(summary: dict[str, Any], width: int) -> str:
    buffer = io.StringIO()
    print_paged_weight(summary, Console(width=width, file=buffer, highlight=False))
    return buffer.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_the_report_fits_its_width_and_has_every_policy(summary, width):
    text = printed(summary, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for row in summary["policies"]:
        assert row["label"] in text
    for word in ("TTFT", "TPOT", "damage", "copied", "bits on average", "static estimate"):
        assert word in text


def test_the_wide_report_is_one_table_and_the_narrow_one_two(summary):
    assert "... and memory" in printed(summary, 120)
    assert "... and memory" not in printed(summary, 140)


@pytest.mark.parametrize("width", [80, 120, 140])
def test_no_row_of_the_tables_of_policies_is_folded(summary, width):
    lines = printed(summary, width).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    tables = 1 if width == 140 else 2
    for policy in summary["policies"]:
        assert sum(row.startswith(f"|{policy['label']} ") for row in rows) == tables
    headless = [row for row in rows if row[1:8].strip() == ""]
    assert len(headless) <= 4  # folded facts of the first table only


def test_a_budget_of_10_gb_leaves_the_published_cache_beside_3_bits():
    """Qwen1.5-MoE-A2.7B: 6.3 GB for experts and cache, 3 bits and 7,600 tokens."""
    tables = tomllib.loads(SMALL)
    tables["hardware"] |= {"memory_gb": 10, "reserve_gb": 0.0}
    model = build_model(parse_paged_weight(tables))
    assert deployment_summary(model)["arena_bytes"] == pytest.approx(6.3e9, rel=0.005)
    by_bits = {row["bits"]: row for row in capacity(model)}
    # tables are rounded up to pages here, which costs 1.7 %
    assert by_bits[3]["kv_tokens"] == pytest.approx(7_600, rel=0.02)
    assert by_bits[3]["weight_bytes"] == pytest.approx(4.783e9, rel=0.01)
    assert not by_bits[4]["fits"]


def test_an_asked_policy_that_does_not_fit_is_reported_beside_those_that_do():
    tables = tomllib.loads(SMALL)
    tables["precision"] = {"policy": 16, "compare": ["hull"]}
    tables["workload"]["num_requests"] = 5
    found = run_paged_weight(parse_paged_weight(tables))
    assert [row["fits"] for row in found.summary["policies"]] == [False, True]
    assert "16 bits: weights of 16 bits take 760,320 pages" in printed(found.summary, 100)
    assert draw_paged_weight(found.summary) == {}


def test_sliding_windows_give_their_pages_back_within_a_run():
    tables = tomllib.loads(SMALL)
    tables["llm"]["model"] = "Gemma-4-26B-A4B"
    tables["hardware"] = {"device": "RTX-4090", "memory_gb": 19}
    tables["workload"] |= {"num_requests": 12}
    tables["workload"]["lengths"] = {"kind": "fixed", "prompt_tokens": 1500, "output_tokens": 80}
    model = build_model(parse_paged_weight(tables))
    requests = resolve_workload(model.scenario.workload, seed=1).open_loop_requests(
        np.random.default_rng(1)
    )
    weights = weights_of(model, "hull", 0)
    found = PagedWeightEngine(model, weights, requests, policy="hull").run()
    assert np.isfinite(found.last_token_s).all()
    assert weights.ledger.held_pages("kv") == 0
    weights.ledger.check()
    whole = found.totals.kv_tokens_peak * kv_token_bytes(model.shape).inside
    assert found.totals.kv_pages_peak * 32_768 < 0.8 * whole  # windows of 1,024 of 1,580 tokens


def test_pictures_are_drawn_of_what_there_is(summary, tmp_path):
    pictures = draw_paged_weight(summary)
    assert set(pictures) == {"arena.png", "frontier.png"}
    for name, content in pictures.items():
        (tmp_path / name).write_bytes(content)
        picture = matplotlib.image.imread(tmp_path / name)
        assert picture.shape[0] > 400 and picture[..., :3].std() > 0.05


def test_damage_is_measured_in_uniform_widths(summary):
    fixed = next(row for row in summary["policies"] if row["policy"] == 4)
    assert summary["damage_unit_bits"] == 4
    assert fixed["damage"] == pytest.approx(1.0, rel=0.35)  # drifting traffic about the long run
    assert summary["policies"][0]["damage"] < fixed["damage"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("attention_ffn.r=4", ("[attention_ffn]", "[llm]")),
        ("faults=[{kind='pause'}]", ("[faults]", "[llm]")),
        ("precision.polcy='hull'", ("[precision] polcy", "did you mean policy?")),
        ("precision.policy='best'", ("[precision] policy", "'hull'", "'best'")),
        ("precision.policy=9", ("[precision] policy", "2..8 or 16", "9")),
        ("precision.min_bits=1", ("[precision] min_bits", "2..8", "1")),
        ("precision.page_bytes=3000", ("[precision] page_bytes", "power of two", "3,000")),
        ("precision.low_share=0.5", ("[precision] low_share", "0.08")),
        ("precision.low_share=0.08", ("[precision] low_share", "0.08, 0.08")),
        ("precision.damage='nowhere'", ("[precision] damage", "nowhere", "No such file")),
        ("hardware.device='H20'", ("[hardware] device", "H200", "'H20'")),
        ("hardware.memory_gb=1000", ("[hardware] memory_gb", "<= 24", "1000")),
        ("hardware.memory_gb=5", ("[hardware] memory_gb", "Qwen1.5-MoE-A2.7B")),
        ("hardware.bandwidth_share.9=0.5", ("[hardware.bandwidth_share] 9", "16")),
        ("hardware.bandwidth_share.4=2", ("[hardware.bandwidth_share] 4", "0.001..1")),
        ("llm.model='Qwen'", ("Qwen", "Qwen1.5-MoE-A2.7B")),
        ("llm.model='Llama-3.1-8B'", ("[llm] model", "found none")),
        ("routing.skew=-1", ("[routing] skew", "-1")),
        ("serving.max_running=0", ("[serving] max_running", "0")),
        ("run.mode='open_loop'", ("[run] mode", "unknown")),
        ("workload.num_requests=0", ("num_requests", "0")),
    ],
)
def test_bad_settings_end_with_code_2_and_one_line_that_names_them(
    small, tmp_path, monkeypatch, capsys, setting, words
):
    arguments = (str(small), "--out", str(tmp_path / "out"), "--set", setting)
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "out").exists()


def test_other_commands_say_that_they_do_not_know_such_a_scenario(small):
    with pytest.raises(ScenarioError, match=r"\[llm\]: .*twin run"):
        load_scenario(small)


def test_the_scenario_of_the_repository_is_valid_and_compares_every_width():
    asked = parse_paged_weight(read_toml(SCENARIO))
    assert set(asked.precision.compare) >= {"greedy", "uniform", *range(2, 9), 16}


def manifest(path: Path, *, experts: int = 60, levels: tuple[int, ...] = (2, 3, 4)) -> None:
    blocks = [
        {
            "layer": layer,
            "expert": expert,
            "module": module,
            "rows": rows,
            "columns": columns,
            "damage": [4.0**-bits * (1 + expert) for bits in levels],
        }
        for layer in range(24)
        for expert in range(experts)
        for module, rows, columns in (("gate_up", 2816, 2048), ("down", 2048, 1408))
    ]
    path.write_text(json.dumps({"levels": list(levels), "blocks": blocks}))


def test_damage_may_come_from_a_quantized_checkpoint(small, tmp_path):
    manifest(tmp_path / "pagedweight.json")
    tables = read_toml(small)
    tables["precision"] = {
        "damage": str(tmp_path),
        "parent_bits": 4,
        "use_routing": False,
        "compare": [],
    }
    tables["routing"] = {"drift": 0.0}
    found = run_paged_weight(parse_paged_weight(tables)).summary
    assert found["damage_source"] == str(tmp_path)
    assert str(tmp_path / "pagedweight.json") in found["inputs"]
    asked = found["policies"][0]
    if asked["least_bits"] == 4.0:
        assert asked["damage"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"experts": 59}, "2,832 blocks are not the 2,880"), ({"levels": (2, 3)}, r"\[4\] are asked")],
)
def test_a_checkpoint_of_another_model_or_without_a_width_is_refused(
    small, tmp_path, change, words
):
    manifest(tmp_path / "pagedweight.json", **change)
    tables = read_toml(small)
    tables["precision"] = {"damage": str(tmp_path), "parent_bits": 4, "compare": []}
    with pytest.raises(ScenarioError, match=words):
        run_paged_weight(parse_paged_weight(tables))


def test_a_fixed_width_without_a_damage_in_the_checkpoint_is_refused(small, tmp_path):
    manifest(tmp_path / "pagedweight.json")
    tables = read_toml(small)
    tables["precision"] = {"damage": str(tmp_path), "parent_bits": 4, "compare": [8]}
    with pytest.raises(ScenarioError, match=r"\[precision\] compare: .* 8"):
        run_paged_weight(parse_paged_weight(tables))
