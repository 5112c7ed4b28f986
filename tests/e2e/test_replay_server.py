"""`runtime replay --url` against a running server, which it asks for all that it has to know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import Served
from traces.record import read_run

DRIVE = ("--requests", 30, "--scale-tokens", 0.05, "--concurrency", 4, "--no-plots")


def replay(*words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime", "replay", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_trace_is_replayed_on_a_server_that_tells_its_vocabulary_and_context(
    served: Served, tmp_path: Path
) -> None:
    before = served.metric("vllm:generation_tokens_total")
    out = tmp_path / "run"
    done = replay(
        *("azure-2023-conversation", "--url", served.url, "--api-key", served.key),
        *(*DRIVE, "--out", out, "--json"),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    row = summary["policies"][0]
    assert (row["arrived"], row["served"], row["refused"]) == (30, 30, 0)
    assert summary["deployment"]["model"] == served.name
    assert row["running_peak"] == 4
    record = read_run(out)
    told = record.requests
    assert told is not None
    assert record.timeseries is not None
    assert {"report.txt", "scenario.toml"} <= set(record.files)
    assert np.array_equal(told["generated_tokens"], told["output_tokens"])
    assert np.all(told["added_s"] <= told["first_token_s"])
    assert np.all(told["first_token_s"] <= told["last_token_s"])
    generated = served.metric("vllm:generation_tokens_total") - before
    assert generated == told["output_tokens"].sum()


def test_prompts_longer_than_the_server_s_context_are_cut(served: Served, tmp_path: Path) -> None:
    context = served_context(served)
    out = tmp_path / "run"
    done = replay(
        *("azure-2023-conversation", "--url", served.url, "--api-key", served.key),
        *("--requests", 6, "--concurrency", 3, "--no-plots", "--out", out, "--json"),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["policies"][0]["served"] == 6
    assert summary["requests"]["cut_tokens"] > 0
    told = read_run(out).requests
    assert told is not None
    assert np.max(told["prompt_tokens"] + told["output_tokens"]) == context


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--api-key", "wrong"), "--url: "),
        (("--api-key", Served("", Path()).key, "--name", "gpt"), "--name: must be one of tiny"),
    ],
)
def test_a_server_that_refuses_is_one_line(
    words: tuple[str, ...], message: str, served: Served
) -> None:
    done = replay("azure-2023-conversation", "--url", served.url, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")


def test_a_replay_without_one_answer_fails_after_its_directory_is_written(
    served: Served, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = replay(
        *("azure-2023-conversation", "--url", served.url, "--api-key", served.key),
        *(*DRIVE, "--vocabulary", 1_000_000, "--out", out),  # ids that the server lacks
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"error: not one of 30 requests was served; see {out}"
    assert read_run(out).summary["policies"][0]["refused"] == 30


def served_context(served: Served) -> int:
    """Most tokens of prompt and answer."""
    config = json.loads((served.folder / "config.json").read_bytes())
    return int(config["max_position_embeddings"])
