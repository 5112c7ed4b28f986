"""``twin run`` with a paged-weight scenario: files, tables, pictures, and what is refused."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from models.scenario_file import load_scenario, parse_paged_weight, read_toml
from models.strict_tables import ScenarioError
from traces.record import read_run
from twin import cli
from twin.paged_weight_experiment import run_paged_weight
from twin.paged_weight_plots import draw_paged_weight
from twin.paged_weight_report import print_paged_weight
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
    import tomllib

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
    assert "too large" in out  # 16 bits
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
    code, _, _ = run(monkeypatch, capsys, str(target / "scenario.toml"), "--out", str(again))
    assert code == 0
    assert read_run(again).summary["files"] == record.summary["files"]


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
    assert "... and memory" in printed(summary, 100)
    assert "... and memory" not in printed(summary, 120)


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
