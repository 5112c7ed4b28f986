"""Run directories and decision logs: whole or not at all, and checked when read."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from traces.decisions import DecisionLog, read_decisions
from traces.errors import TraceError
from traces.record import (
    RunDirectoryError,
    RunRecord,
    check_writable,
    next_run_path,
    read_run,
    write_numbered_run,
    write_run,
)


def record() -> RunRecord:
    return RunRecord(
        summary={"seed": 1},
        requests={"ttft_s": np.array([0.1, np.nan]), "worker": np.array([0, 3])},
        timeseries={"time_s": np.array([0.0, 1.0])},
        files={"report.txt": b"hello\n"},
    )


def test_a_run_directory_reads_back_as_it_was_written(tmp_path):
    write_run(tmp_path / "a" / "run", record())
    back = read_run(tmp_path / "a" / "run")
    assert back.summary["seed"] == 1
    assert back.files == {"report.txt": b"hello\n"}
    assert np.array_equal(back.requests["ttft_s"], [0.1, np.nan], equal_nan=True)
    assert back.requests["worker"].tolist() == [0, 3]


def test_the_same_record_is_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name, record())
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_an_existing_directory_is_never_touched(tmp_path):
    write_run(tmp_path / "run", record())
    with pytest.raises(RunDirectoryError, match="exists already"):
        write_run(tmp_path / "run", RunRecord(summary={"seed": 2}))
    assert read_run(tmp_path / "run").summary["seed"] == 1


def test_a_failure_half_way_leaves_nothing(tmp_path):
    broken = RunRecord(summary={"value": float("nan")}, files={"a.txt": b"a"})
    with pytest.raises(ValueError, match="nan"):
        write_run(tmp_path / "run", broken)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_a_file_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunDirectoryError, match="not a writable directory"):
        check_writable(tmp_path / "file" / "run")


def test_run_paths_are_numbered(tmp_path):
    assert next_run_path(tmp_path, "x").name == "x-001"
    (tmp_path / "x-001").mkdir()
    assert next_run_path(tmp_path, "x").name == "x-002"
    (tmp_path / "x-002").symlink_to(tmp_path / "absent")
    assert next_run_path(tmp_path, "x").name == "x-003"


def test_a_number_that_is_taken_while_the_run_is_written_gives_way_to_the_next(
    tmp_path, monkeypatch
):
    rename = Path.rename

    def late(partial, target):
        if not (tmp_path / "x-001").exists():  # another run is a moment earlier
            (tmp_path / "x-001").mkdir()
            (tmp_path / "x-001" / "run.json").write_text("{}")
        return rename(partial, target)

    monkeypatch.setattr(Path, "rename", late)
    assert write_numbered_run(tmp_path, "x", record()) == tmp_path / "x-002"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-001", "x-002"]
    assert (tmp_path / "x-001" / "run.json").read_text() == "{}"
    assert read_run(tmp_path / "x-002").files == {"report.txt": b"hello\n"}


def test_a_name_that_is_too_long_is_refused_before_the_run(tmp_path):
    with pytest.raises(RunDirectoryError, match="cannot be made: File name too long"):
        check_writable(tmp_path / ("x" * 300))


def test_the_longest_name_that_passes_the_check_can_be_written(tmp_path):
    target = tmp_path / ("x" * 255)
    check_writable(target)
    write_run(target, record())
    assert read_run(target).summary["seed"] == 1


@pytest.mark.parametrize("damage", ["flip", "remove", "version", "json"])
def test_damage_is_found_and_named(tmp_path, damage):
    write_run(tmp_path / "run", record())
    report, head = tmp_path / "run" / "report.txt", tmp_path / "run" / "run.json"
    if damage == "flip":
        report.write_bytes(b"jello\n")
    elif damage == "remove":
        report.unlink()
    elif damage == "version":
        head.write_text(head.read_text().replace('"version": 1', '"version": 99'))
    else:
        head.write_text(head.read_text()[:-20])
    with pytest.raises(TraceError, match=r"report\.txt|run\.json"):
        read_run(tmp_path / "run")


def test_a_decision_log_reads_back_and_keeps_only_its_prefix(tmp_path):
    log = DecisionLog(max_calls=2)
    log.policies["routing"] = {"kind": "routing", "name": "random"}
    for n in range(5):
        log.record("routing", "assign", {"free": np.array([n, 1])}, [n], now=0.5 * n)
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(log.to_bytes())
    header, decisions = read_decisions(path)
    kept = list(decisions)
    assert header["calls_left_out"] == 3
    assert header["policies"]["routing"]["name"] == "random"
    assert [d.args["free"] for d in kept] == [[0, 1], [1, 1]]
    assert [d.now for d in kept] == [0.0, 0.5]


def test_a_cut_or_foreign_decision_log_is_named_by_line(tmp_path):
    log = DecisionLog()
    log.record("routing", "assign", {}, [1], now=0.0)
    text = gzip.decompress(log.to_bytes())
    path = tmp_path / "cut.jsonl"
    path.write_bytes(text[:-10])
    with pytest.raises(TraceError, match=r"cut\.jsonl:2: not a JSON line"):
        list(read_decisions(path)[1])
    path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(TraceError, match="not a decision log"):
        read_decisions(path)
    path.write_bytes(log.to_bytes()[:20])
    with pytest.raises(TraceError, match="cannot be read"):
        read_decisions(path)
