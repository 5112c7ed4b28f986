"""``twin cache`` as it is typed: what it prints, writes and refuses."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from models.strict_tables import ScenarioError
from policies.catalog import EVICTION
from traces.record import read_run
from twin.cache_plots import spread
from twin.cache_sizes import CacheSize, resolve_sizes
from twin.cli import app, main

GIB = 2**30
SMALL = ["docqa", "--requests", "120", "--size", "5%", "--size", "20%", "--jobs", "1"]
PNG = b"\x89PNG\r\n\x1a\n"


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: Any, *words: str) -> str:
    """The one line of a command that ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["twin", "cache", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of two policies: what ``--json`` printed, and its directory."""
    folder = tmp_path_factory.mktemp("cache") / "run"
    words = [*SMALL, "--policy", "lru", "--policy", "gdsf", "--out", str(folder), "--json"]
    done = CliRunner().invoke(app, ["cache", *words])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), folder


def test_the_run_directory_holds_the_printed_summary(
    finished: tuple[dict[str, Any], Path],
) -> None:
    printed, folder = finished
    record = read_run(folder)
    assert printed.pop("run_directory") == str(folder)
    assert {key: record.summary[key] for key in printed} == printed
    assert record.files["hits.png"].startswith(PNG)
    assert record.files["saved.png"].startswith(PNG)


def test_the_table_of_curves_has_a_row_for_each_policy_and_size(
    finished: tuple[dict[str, Any], Path],
) -> None:
    summary, folder = finished
    rows = list(csv.DictReader(io.StringIO((folder / "curves.csv").read_text())))
    assert [(row["policy"], row["size"]) for row in rows] == [
        (name, size) for name in ("lru", "gdsf", "bound") for size in ("5%", "20%")
    ]
    for row in rows:
        curve = summary["bound"] if row["policy"] == "bound" else summary["curves"][row["policy"]]
        at = 0 if row["size"] == "5%" else 1
        assert int(row["hit_blocks"]) == curve[at]["hit_blocks"]
        assert float(row["saved_s"]) == curve[at]["saved_s"]
        assert int(row["blocks"]) == summary["sizes"][at]["blocks"]


def test_the_report_shows_the_numbers_of_the_summary(
    finished: tuple[dict[str, Any], Path],
) -> None:
    summary, folder = finished
    lines = (folder / "report.txt").read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("Block hits"))
    table = lines[first : first + 12]
    for name in ("lru", "gdsf"):
        row = next(line for line in table if line.startswith(f"|{name} "))
        cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
        for cell, figures, best in zip(
            cells, summary["curves"][name], summary["best"]["block_hit_share"], strict=False
        ):
            assert cell == f"{100 * figures['block_hit_share']:.1f}" + "*" * (name in best)
        assert cells[2] == f"{100 * summary['share_of_bound'][name]:.1f} %"


def test_every_policy_of_the_catalog_is_drawn_and_printed(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    done = CliRunner().invoke(app, ["cache", *SMALL, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    assert list(read_run(folder).summary["curves"]) == list(EVICTION)
    for name in EVICTION:
        assert f"|{name} " in done.stdout
    assert (folder / "hits.png").read_bytes().startswith(PNG)


def test_one_policy_at_one_size_without_a_bound_is_a_question_too(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    words = ["docqa", "--requests", "50", "--policy", "lru", "--size", "100", "--no-bound"]
    done = CliRunner().invoke(app, ["cache", *words, "--jobs", "1", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    summary = read_run(folder).summary
    assert summary["bound"] is None and summary["share_of_bound"] is None
    assert [size["blocks"] for size in summary["sizes"]] == [100]


def test_sizes_are_read_as_shares_blocks_and_bytes() -> None:
    sizes = resolve_sizes(
        ["100%", "64GiB", "7", "1 GB", "0.1%"], num_distinct=2000, block_bytes=GIB // 8
    )
    assert sizes == (
        CacheSize("0.1%", 2),
        CacheSize("7 blocks", 7),
        CacheSize("64 GiB", 512),
        CacheSize("100%", 2000),
    )  # 1 GB is 7 blocks too, and the one that was given first is kept


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0%", "share must be > 0 %"),
        ("101%", "share must be > 0 %"),
        ("0", "whole number"),
        ("2.5", "whole number"),
        ("-3", "must be a share"),
        ("nan%", "must be a share"),
        ("12 parsecs", "must be a share"),
        ("", "must be a share"),
        ("1KiB", "must hold"),
        ("9" * 30, "whole number"),
    ],
)
def test_a_size_out_of_range_is_refused_by_its_text(text: str, found: str) -> None:
    with pytest.raises(ScenarioError, match=found) as refused:
        resolve_sizes([text], num_distinct=1000, block_bytes=GIB)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["docqa", "--policy", "mru"], ["--policy", "tree_hd", "'mru'"]),
        (["docqa", "--policy", "lru", "--size", "200%"], ["--size", "200%"]),
        (["docqa", "--policy", "lru", "--model", "GPT-0"], ["GPT-0", "Llama-3.1-8B"]),
        (["docqa", "--policy", "lru", "--device", "abacus"], ["--device", "H200", "'abacus'"]),
        (["docqa", "--policy", "lru", "--mfu", "1.5"], ["--mfu", "1.5"]),
        (["docqa", "--policy", "lru", "--bytes-per-token", "0"], ["--bytes-per-token", "0"]),
        (["docqa", "--block-tokens", "32"], ["--block-tokens", "docqa"]),
        (["docqa", "--format", "foo"], ["--format", "docqa"]),
        (["docqa", "--columns", "prompt=p"], ["--columns", "docqa"]),
        (["docqa", "--time-unit", "s"], ["--time-unit", "docqa"]),
        (["docqa", "--skip-bad-rows"], ["--skip-bad-rows", "docqa"]),
        (["docqa", "--jobs", "0"], ["--jobs", "1"]),
        (["docqa", "--out", "/proc/x"], ["/proc/x", "cannot be made"]),
        (["no-such-file.jsonl"], ["no-such-file.jsonl"]),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_in_one_line(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    message = refusal(capsys, monkeypatch, *words)
    assert all(part in message for part in parts), message


def test_a_trace_without_blocks_is_refused_with_formats_that_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,50,5\n")
    message = refusal(capsys, monkeypatch, str(file))
    assert "mooncake-jsonl" in message and "docqa" in message


def test_prompts_shorter_than_a_block_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    file = tmp_path / "m.jsonl"
    line = '{"timestamp": %d, "input_length": 100, "output_length": 5, "hash_ids": [1]}\n'
    file.write_text("".join(line % (1000 * i) for i in range(3)))
    assert "512 tokens" in refusal(capsys, monkeypatch, str(file))
    words = ["--policy", "lru", "--size", "1", "--jobs", "1", "--json", "--no-plots"]
    done = CliRunner().invoke(
        app,
        ["cache", str(file), "--partial-blocks", *words, "--out", str(tmp_path / "run")],
    )
    assert json.loads(done.stdout)["curves"]["lru"][0]["hit_blocks"] == 2


def test_an_existing_directory_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    assert "exists already" in refusal(capsys, monkeypatch, "docqa", "--out", str(tmp_path))


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = Path(sys.executable).with_name("twin")
    words = ["mixed", "--policy", "tree_gdsf", "--no-bound", "--jobs", "2", "--out", str(folder)]
    running = subprocess.Popen(
        [str(program), "cache", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not children.read_text().strip():
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    out, complaints = running.communicate(timeout=60)
    assert running.returncode == 130
    assert (out, complaints) == ("", "interrupted: nothing was written\n")
    assert list(tmp_path.iterdir()) == []


def test_workers_do_not_hear_ctrl_c_whatever_they_are_doing(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("twin")
    words = ["docqa", "--requests", "40", "--policy", "lru", "--no-bound", "--no-plots"]
    running = subprocess.Popen(
        [str(program), "cache", *words, "--jobs", "2", "--out", str(tmp_path / "run"), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signalled = set()
    deadline = time.monotonic() + 60
    while running.poll() is None and time.monotonic() < deadline:
        for pid in descendants(running.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
                signalled.add(pid)
        time.sleep(0.002)
    out, complaints = running.communicate(timeout=60)
    assert (running.returncode, complaints) == (0, "")
    assert "lru" in json.loads(out)["curves"]
    assert len(signalled) >= 4  # resource tracker, forkserver, two workers


def descendants(pid: int) -> list[int]:
    """Children and their children, from /proc; those that end meanwhile have none."""
    found = []
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(word), *descendants(int(word))]
    return found


def test_a_report_has_whole_captions_and_no_empty_lines_in_a_row(tmp_path: Path) -> None:
    words = ["docqa", "--requests", "40", "--policy", "lru", "--size", "5%", "--no-plots"]
    out = (
        CliRunner()
        .invoke(app, ["cache", *words, "--jobs", "1", "--out", str(tmp_path / "run")])
        .stdout
    )
    assert "\n\n\n" not in out
    assert "*: best policy, or within 0.05 points of it; below each size its blocks" in out
    answers = [line for line in out.splitlines() if line.startswith(("  nearest", "*: "))]
    assert len(answers) >= 2 and answers == [line.rstrip() for line in answers]


def test_labels_move_apart_and_keep_their_order() -> None:
    assert spread([0.0, 10.0], 1.0) == [0.0, 10.0]
    assert spread([5.0, 5.0, 5.0], 1.0) == [4.0, 5.0, 6.0]
    places = spread([0.0, 0.1, 0.2, 3.0, 3.1], 1.0)
    assert all(high - low >= 1.0 - 1e-9 for low, high in itertools.pairwise(places))
