"""A replay on an engine in this process: its requests, its directory, its decisions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.build import build_engine
from runtime.engine.settings import PrefixSettings
from runtime.replay_arrivals import ReplayArrivals
from runtime.replay_engine import EngineReplay
from runtime.replay_prompts import ReplayPrompts
from runtime.replay_requests import ReplayLimits, ReplayRequests, replay_requests
from runtime.replay_run import ReplayRun
from tests.runtime.replay_cases import (
    engine_of,
    mooncake_file,
    quantized_checkpoint,
    workload_of,
)
from traces.decisions import read_decisions
from traces.record import read_run
from twin.replay import replay_log

SMALL = ("--threads", "1", "--memory", "2MiB", "--prefix-store", "none", "--no-plots")


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield quantized_checkpoint(folder)
    shutil.rmtree(folder)


def replayed(
    model: Path, requests: ReplayRequests, concurrency: int | None = None, **changes: Any
) -> tuple[ReplayRun, bytes]:
    """The run, and its decision log; saves have ended when a request has."""
    parts = build_engine(engine_of(model, **changes))

    def finish_saves(done: float, total: float) -> None:
        if parts.prefix is not None:  # else the next one may ask too early, and find nothing
            assert parts.prefix.drain(20.0)

    try:
        prompts = ReplayPrompts(
            requests, seed=1, vocabulary=parts.info.vocabulary, never=parts.info.eos_token_ids
        )
        arrivals = ReplayArrivals(requests, concurrency=concurrency)
        driver = EngineReplay(parts, requests, prompts, arrivals, settle_s=20.0)
        return driver.run(show=finish_saves), parts.log.to_bytes()
    finally:
        parts.close()


def requests_of(count: int, scale: float = 0.05, context: int = 900) -> ReplayRequests:
    workload = workload_of(trace="azure-2023-conversation", num_requests=count)
    limits = ReplayLimits(scale_tokens=scale, context_tokens=context)
    return replay_requests(workload, seed=1, limits=limits)


def test_memory_pressure_narrows_weights_before_anybody_is_preempted_and_they_come_back(
    model: Path, tmp_path: Path
) -> None:
    requests = requests_of(60, scale=0.12)
    run, log = replayed(model, requests, concurrency=24)
    totals = run.totals
    assert run.fates.num_failed == 0
    assert np.array_equal(run.fates.generated_tokens, requests.output_tokens)
    assert totals.least_bits <= totals.first_bits - 1.0
    if run.counters["preemptions_total"]:
        assert totals.bits_at_first_preemption <= totals.first_bits - 1.0
    assert totals.last_bits >= totals.first_bits
    (tmp_path / "decisions.jsonl.gz").write_bytes(log)
    found = replay_log(tmp_path)
    assert found.difference is None
    assert found.num_left_out == 0
    _, decisions = read_decisions(tmp_path / "decisions.jsonl.gz")
    calls = [decision.call for decision in decisions if decision.policy == "batching"]
    assert calls.count("add") == 60


def test_moving_widths_hold_more_sequences_than_one_width_in_the_same_memory(model: Path) -> None:
    requests = requests_of(40, scale=0.2)
    running = {
        precision: replayed(model, requests, concurrency=32, precision=precision)[0]
        for precision in ("hull", 6)
    }
    moving, fixed = running["hull"], running[6]
    assert moving.fates.num_failed == 0
    assert moving.totals.running_peak > fixed.totals.running_peak
    assert moving.totals.kv_pages_peak > fixed.totals.kv_pages_peak
    assert fixed.totals.least_bits == fixed.counters["mean_bits"] == 6.0


def test_equal_beginnings_are_found_in_the_prefix_store(model: Path, tmp_path: Path) -> None:
    rows = [(0.0, 520, 2, [1, 2]), (9.0, 520, 2, [1, 3]), (18.0, 520, 2, [4, 5])]
    workload = workload_of(trace=str(mooncake_file(tmp_path / "t.jsonl", rows)))
    requests = replay_requests(workload, seed=1)
    run, _ = replayed(model, requests, concurrency=1, prefix=PrefixSettings(place="memory"))
    assert run.fates.cached_tokens.tolist() == [0, 512, 0]
    assert run.totals.kv_tokens_peak == 521  # nothing follows the last token


def test_the_command_writes_a_directory_that_twin_replay_repeats_anywhere(
    model: Path, tmp_path: Path, run_command: Callable[..., Any]
) -> None:
    out = tmp_path / "run"
    done = run_command(
        *("replay", "azure-2023-conversation", model, "--requests", 40, "--scale-tokens", 0.1),
        *("--concurrency", 16, "--out", out, *SMALL),
    )
    assert done.returncode == 0, done.stderr
    assert "40 of 40 requests" in done.stdout
    record = read_run(out)
    row = record.summary["policies"][0]
    assert record.summary["kind"] == "runtime-replay"
    assert (row["label"], row["served"], row["refused"]) == ("hull", 40, 0)
    assert row["latency"]["ttft_s"]["p50"] > 0
    assert record.requests is not None
    assert record.timeseries is not None
    told = record.requests
    assert np.all(told["first_token_s"] <= told["last_token_s"])
    assert np.all(told["arrival_s"] <= told["admitted_s"])
    assert record.summary["decision_calls"]["left_out"] == 0
    copied = tmp_path / "elsewhere" / "copy"
    shutil.copytree(out, copied)
    for seed in ("0", "77"):
        again = subprocess.run(
            [sys.executable, "-m", "twin", "replay", str(copied)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert again.returncode == 0, again.stderr
        assert f"{record.summary['decision_calls']['kept']:,} calls, no difference" in again.stdout


def test_pictures_are_drawn_and_json_is_printed(
    model: Path, tmp_path: Path, run_command: Callable[..., Any]
) -> None:
    out = tmp_path / "run"
    done = run_command(
        *("replay", model, "azure-2023-conversation", "--requests", 4, "--scale-tokens", 0.02),
        *("--concurrency", 4, "--out", out, *SMALL[:-1], "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run_directory"] == str(out)
    files = read_run(out).files
    assert {"latency.png", "arena.png", "report.txt", "scenario.toml"} <= set(files)
    assert all(files[name].startswith(b"\x89PNG") for name in ("latency.png", "arena.png"))


def test_ctrl_c_writes_what_there_is(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "runtime", "replay", "azure-2023-conversation", str(model)),
        *("--requests", "4000", "--scale-tokens", "0.02", "--rate", "20"),
        *("--out", str(out), *SMALL),
    ]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stderr is not None
    assert b"loading" in process.stderr.readline()
    assert b"replaying 4,000 requests" in process.stderr.readline()
    _wait_for_cpu(process.pid, seconds=1.0)
    process.send_signal(signal.SIGINT)
    told, complaints = process.communicate(timeout=120)
    assert process.returncode == 130, complaints
    assert b"stopped before its end" in told
    summary = read_run(out).summary
    assert summary["requests"]["was_stopped"]
    assert 0 < summary["policies"][0]["served"] < 4000
    assert replay_log(out).difference is None


def _wait_for_cpu(pid: int, seconds: float) -> None:
    """Until a process has used so much more CPU time: the machine's load plays no part."""
    until_s = _cpu_s(pid) + seconds
    while _cpu_s(pid) < until_s:
        time.sleep(0.05)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "TRACE: give a trace"),
        (("a", "b"), "one trace at a time, found a and b"),
        (("azure-2023-conversation", "--speed", "0"), "--speed: must be finite and > 0"),
        (("no-such-trace",), "no-such-trace"),
        (("azure-2023-conversation", "--set", "workload.trice=1"), "trice"),
        (("azure-2023-conversation", "--url", "ftp://x"), "--url: must be http://HOST:PORT"),
        (("azure-2023-conversation", "--url", "http://127.0.0.1:9"), "--url: 127.0.0.1:9: "),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    words: tuple[str, ...], message: str, model: Path, run_command: Callable[..., Any]
) -> None:
    if "--speed" in words:
        words = (*words, str(model), *SMALL)
    done = run_command("replay", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
