"""``twin run`` with a [prefix] table from end to end, and what it refuses."""

import json
import subprocess
import sys

import numpy as np
import pytest

from models.scenario_file import parse_prefix, parse_scenario, scenario_tables
from models.strict_tables import ScenarioError
from traces.record import read_run
from twin.replay import replay_log
from twin.store.experiment import run_prefix
from twin.store.files import prefix_record

TABLES = {
    "prefix": {"modes": ["vanilla", "local_prefix", "ptstore", "product"]},
    "workload": {
        "kind": "documents",
        "documents": 3,
        "questions": 8,
        "prompt_tokens": [512, 2048],
        "arrivals": {"kind": "poisson", "rate_per_s": 5},
    },
    "cluster": {"nodes": 2, "gpus_per_node": 2},
    "run": {"replications": 2},
}


def _with(**changes):
    return {**TABLES, **changes}


def test_a_run_says_where_tokens_came_from_and_how_long_they_took():
    result = run_prefix(parse_prefix(TABLES))
    rows = {(row["stream"], row["mode"]): row for row in result.summary["rows"]}
    assert len(rows) == 8
    for row in rows.values():
        assert sum(row["token_shares"].values()) == pytest.approx(1.0)
        ttft = row["ttft_s"]
        assert ttft["p50"]["mean"] <= ttft["p90"]["mean"] <= ttft["p99"]["mean"] <= ttft["max"]
        parts = row["load_s"] + row["queue_s"] + row["prefill_s"]
        assert parts == pytest.approx(ttft["mean"]["mean"])
        assert ttft["mean"]["num_samples"] == 2
    assert rows[("2,048 tokens", "vanilla")]["hit_rate"] == 0.0
    assert rows[("2,048 tokens", "product")]["hit_rate"] > 0.6
    table = result.requests
    assert len(table["ttft_s"]) == 2 * 2 * 4 * 24
    chosen = (table["mode"] == "product") & (table["stream"] == "512 tokens")
    mean = np.mean([table["ttft_s"][chosen & (table["replication"] == r)].mean() for r in (0, 1)])
    assert mean == pytest.approx(rows[("512 tokens", "product")]["ttft_s"]["mean"]["mean"])


def test_the_command_writes_a_directory_that_replays_and_reads_back(tmp_path):
    scenario = tmp_path / "pool.toml"
    scenario.write_text(
        '[prefix]\nmodes = ["local_prefix", "product"]\n'
        '[workload]\nkind = "generated"\ngenerator = "chat"\nnum_requests = 40\n'
        "[cluster]\nnodes = 2\nmemory_bytes = 2_000_000_000\nssd_bytes = 4_000_000_000\n"
        "[gpu]\ncache_tokens = 4_000\n[run]\nreplications = 1\n"
    )
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "twin", "run", str(scenario), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Time to first token" in done.stdout
    record = read_run(out)
    assert {"decisions.jsonl.gz", "report.txt", "scenario.toml", "ttft.png", "tiers.png"} <= set(
        record.files
    )
    assert record.files["ttft.png"].startswith(b"\x89PNG")
    assert len(record.requests["ttft_s"]) == 80
    assert set(record.timeseries) >= {"time_s", "mode", "bytes_to_device", "memory_used_bytes"}
    assert json.loads((out / "run.json").read_text())["kind"] == "prefix"
    replay = replay_log(out)
    assert replay.difference is None
    assert replay.num_calls > 100


def test_the_same_scenario_gives_the_same_bytes():
    first, second = (prefix_record(run_prefix(parse_prefix(TABLES)), plots=False) for _ in range(2))
    assert json.dumps(first.summary) == json.dumps(second.summary)
    assert first.files == second.files
    for name, values in first.requests.items():
        assert (values == second.requests[name]).all()


def test_a_scenario_survives_being_written_down():
    scenario = parse_prefix(TABLES)
    assert parse_prefix(scenario_tables(scenario)) == scenario


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix": {"modes": []}}, r"\[prefix\] modes: is empty"),
        ({"prefix": {"modes": ["ptstore", "ptstore"]}}, "modes: a mode is given twice"),
        ({"prefix": {"modes": ["lmcache"]}}, r"\[prefix\] modes: must be one of 'vanilla'"),
        ({"prefix": {"block_tokens": 0}}, r"\[prefix\] block_tokens: must be within 1"),
        ({"workload": {"kind": "documents", "prompt_tokens": [64]}}, "> question_tokens"),
        ({"workload": {"kind": "documents", "prompt_tokens": [512, 512]}}, "given twice"),
        (
            {"workload": {"kind": "other"}},
            r"\[workload\] kind: must be one of 'documents', 'generated', 'trace'",
        ),
        ({"workload": {"trace": " "}}, r"\[workload\] trace: is empty"),
        ({"store": {"replica_share": 1.0}}, "replica_share: must be > 0 and < 1"),
        ({"product": {"overlap": 1.5}}, r"\[product\] overlap: must be within 0..1"),
        ({"links": {"nic_bytes_per_s": 0}}, r"\[links\] nic_bytes_per_s: must be within"),
        ({"attention_ffn": {}}, r"attention_ffn: unknown table"),
    ],
)
def test_what_a_scenario_may_not_say(changes, message):
    with pytest.raises(ScenarioError, match=message):
        parse_prefix(_with(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"product": {"eviction": "random"}}, r"\[product\] eviction: must be one of 'lru'"),
        ({"llm": {"model": "DeepSeek-V3"}}, "has latent attention"),
        ({"gpu": {"memory_bytes": 1e9}}, "leave no room for a cache"),
        ({"cluster": {"memory_bytes": 100}}, "must hold at least one block of 8,388,608 bytes"),
    ],
)
def test_what_does_not_fit_together(changes, message):
    with pytest.raises(ScenarioError, match=message):
        run_prefix(parse_prefix(_with(**changes)))


def test_other_commands_say_that_such_a_scenario_is_not_for_them():
    with pytest.raises(ScenarioError, match="pooled prefix cache is for `twin run`"):
        parse_scenario(TABLES)
