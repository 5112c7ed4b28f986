"""Sweeps: the grid, resuming, interruption, and independence of the executor."""

import contextlib
import csv
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from models.calibration import CalibrationError
from models.scenario_file import parse_scenario
from models.strict_tables import ScenarioError
from traces.errors import TraceError
from traces.record import RunDirectoryError
from twin import sweep_executors
from twin.command_reports import print_sweep
from twin.experiment import run_experiment
from twin.sweep import grid_points, parse_axis, run_sweep, sweep_rows

TABLES = {
    "workload": {"trace": "azure-2023-conversation"},
    "attention_ffn": {"batch_per_worker": 16, "r_max": 8},
    "run": {"num_cycles": 40, "replications": 2},
}


def axes(*texts):
    return [parse_axis(text) for text in texts]


def test_ranges_and_lists_become_values():
    assert parse_axis("a.b=1..3").values == ("1", "2", "3")
    assert parse_axis("a.b=1..9..4").values == ("1", "5", "9")
    assert parse_axis("a.b=x, y").values == ("x", "y")


def test_the_grid_is_the_product_with_the_last_axis_fastest():
    points = grid_points(TABLES, axes("attention_ffn.r=1..2", "run.seed=1,2"))
    assert [tuple(p.settings.values()) for p in points] == [
        ("1", "1"),
        ("1", "2"),
        ("2", "1"),
        ("2", "2"),
    ]


def test_a_bad_cell_is_named_before_anything_runs(tmp_path):
    with pytest.raises(ScenarioError, match=r"sweep point attention_ffn\.r=0"):
        run_sweep(TABLES, axes("attention_ffn.r=1,0"), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_results_do_not_depend_on_the_number_of_processes(tmp_path):
    grid = axes("attention_ffn.r=1..3")
    for jobs in (1, 2):
        run_sweep(TABLES, grid, tmp_path / str(jobs), jobs=jobs)
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / str(jobs) / "points").iterdir()}
        for jobs in (1, 2)
    )
    assert one == two
    assert (tmp_path / "1" / "sweep.csv").read_bytes() == (
        tmp_path / "2" / "sweep.csv"
    ).read_bytes()


def test_an_interrupted_sweep_is_usable_and_goes_on(tmp_path, monkeypatch):
    grid = axes("attention_ffn.r=1..4")
    whole = run_sweep(TABLES, grid, tmp_path / "whole", jobs=1)
    real, done = sweep_executors.run_point, []

    def interrupted(tables):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(tables)
        return real(tables)

    monkeypatch.setattr(sweep_executors, "run_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(TABLES, grid, tmp_path / "part", jobs=1)
    assert len((tmp_path / "part" / "sweep.csv").read_text().splitlines()) == 3
    monkeypatch.setattr(sweep_executors, "run_point", real)
    resumed = run_sweep(TABLES, grid, tmp_path / "part", jobs=1)
    assert resumed.reused == 2
    assert resumed.is_complete
    assert sweep_rows(resumed) == json.loads(json.dumps(sweep_rows(whole)))


def test_a_damaged_point_is_run_again(tmp_path):
    grid = axes("attention_ffn.r=1..2")
    run_sweep(TABLES, grid, tmp_path / "s", jobs=1)
    victim = sorted((tmp_path / "s" / "points").iterdir())[0]
    victim.write_text(victim.read_text()[:100])
    assert run_sweep(TABLES, grid, tmp_path / "s", jobs=1).reused == 1


def test_another_sweep_in_the_same_place_is_refused(tmp_path):
    run_sweep(TABLES, axes("attention_ffn.r=1"), tmp_path / "s", jobs=1)
    with pytest.raises(RunDirectoryError, match="another sweep"):
        run_sweep(TABLES, axes("attention_ffn.r=2"), tmp_path / "s", jobs=1)


def test_a_point_that_cannot_meet_the_limits_is_a_row_not_a_failure(tmp_path):
    result = run_sweep(TABLES, axes("attention_ffn.max_tpot_s=1e-9,1"), tmp_path / "s", jobs=1)
    rows = sweep_rows(result)
    assert "max_tpot_s" in rows[0]["infeasible"]
    assert rows[1]["infeasible"] is None
    assert "attention_ffn.max_tpot_s = 1e-09: " in printed(result)


def printed(result) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    print_sweep(sweep_rows(result), [axis.key for axis in result.axes], console)
    return console.file.getvalue()


def table_of(directory) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / "sweep.csv").read_text().splitlines()))


FAULTY = {**TABLES, "faults": [{"kind": "slow", "worker": 0, "factor": 2.0}]}


def test_a_sweep_with_faults_reports_the_run_with_faults(tmp_path):
    result = run_sweep(FAULTY, axes("attention_ffn.r=2,4"), tmp_path / "s", jobs=1)
    for row in sweep_rows(result):
        tables = {**FAULTY, "attention_ffn": {**TABLES["attention_ffn"], "r": row["r"]}}
        summary = run_experiment(parse_scenario(tables)).summary
        layers, faults = summary["bundle"]["num_layers"], summary["faults"]
        for name, side in (("", "faulty"), ("healthy_", "healthy")):
            mean = faults[side]["throughput_per_instance"]["mean"] / layers
            assert row[f"{name}tokens_per_s_per_instance"] == pytest.approx(mean, rel=1e-12)
        assert row["fault_change"] == faults["throughput_change"]["mean"] < -0.1
        assert row["barrier_share"] == faults["faulty"]["barrier_share"]["mean"]
        steps_s = faults["faulty"]["cycle_s"]["mean"] * layers
        assert row["tpot_s"] == pytest.approx(steps_s, rel=1e-12)
    text = printed(result)
    assert "with faults, tokens/s" in text
    assert "twin, healthy" in text


def test_unlabelled_columns_are_simulated_and_predictions_are_named_so(tmp_path):
    tables = {**TABLES, "routing": {"attention_worker": "least_token_load"}}
    result = run_sweep(tables, axes("attention_ffn.r=4"), tmp_path / "s", jobs=1)
    (row,), (summary,) = sweep_rows(result), result.summaries
    (point,) = summary["simulation"]["points"]
    for name in ("tpot_s", "barrier_share", "attention_idle", "ffn_idle"):
        assert row[name] == point[name]["mean"]
    for name in ("tpot_s", "barrier_overhead", "attention_idle", "ffn_idle"):
        assert row[f"predicted_{name}"] == summary["recommendation"][name]
    assert row["attention_idle"] != row["predicted_attention_idle"]
    assert row["fault_change"] is None


def test_rows_hold_numbers_and_none_and_the_table_the_text_that_was_given(tmp_path):
    grid = axes("attention_ffn.r=2,3", "run.confidence=0.90")
    row = sweep_rows(run_sweep(TABLES, grid, tmp_path / "s", jobs=1))[0]
    assert row["attention_ffn.r"] == 2
    assert row["run.confidence"] == 0.9
    assert row["completed"] is None
    line = table_of(tmp_path / "s")[0]
    assert line["run.confidence"] == "0.90"
    assert line["completed"] == ""
    assert float(line["tpot_s"]) == row["tpot_s"]


TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
    f"{i},{50 + i % 7},{5 + i % 11}\n" for i in range(60)
)


def test_a_cell_whose_trace_has_changed_is_run_again(tmp_path):
    trace = tmp_path / "t.csv"
    tables = {**TABLES, "workload": {"trace": str(trace)}}
    grid = axes("attention_ffn.r=1..2")
    trace.write_text(TRACE)
    before = run_sweep(tables, grid, tmp_path / "s", jobs=1)
    assert before.summaries[0]["inputs"] == before.points[0].inputs
    assert run_sweep(tables, grid, tmp_path / "s", jobs=1).reused == 2
    trace.write_text(TRACE.replace(",50,", ",500000,"))
    after = run_sweep(tables, grid, tmp_path / "s", jobs=1)
    assert after.reused == 0
    assert sweep_rows(after)[0]["tpot_s"] > sweep_rows(before)[0]["tpot_s"]
    assert len(list((tmp_path / "s" / "points").iterdir())) == 2


def test_a_cell_of_another_version_is_run_again(tmp_path, monkeypatch):
    grid = axes("attention_ffn.r=1")
    run_sweep(TABLES, grid, tmp_path / "s", jobs=1)
    monkeypatch.setattr("twin.sweep_files.metadata.version", lambda name: "999")
    assert run_sweep(TABLES, grid, tmp_path / "s", jobs=1).reused == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("workload.trace=azure-2023-conversation,{0}/nope.csv", TraceError),
        ("workload.trace=azure-2023-conversation,{0}/picture.csv", TraceError),
        ("workload.trace=azure-2023-conversation,{0}/pipe", TraceError),
        ("attention_ffn.calibration=deepseek-v3-ascend-910c,{0}/nope.json", CalibrationError),
    ],
)
def test_an_input_that_cannot_be_read_is_found_before_anything_is_made(tmp_path, text, error):
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(error, match=r"nope|picture|pipe"):
        run_sweep(TABLES, axes(text.format(tmp_path)), tmp_path / "s", jobs=1)
    assert not (tmp_path / "s").exists()


def test_a_cell_whose_trace_is_bad_within_is_a_row_and_is_tried_again(tmp_path):
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text(TRACE)
    bad.write_text(TRACE + "99,-5,1\n")
    grid = axes(f"workload.trace={bad},{good}")
    result = run_sweep(TABLES, grid, tmp_path / "s", jobs=1)
    rows = sweep_rows(result)
    assert "line 62" in rows[0]["error"]
    assert rows[1]["error"] is None
    assert rows[1]["tokens_per_s_per_instance"] > 0
    assert "line 62" in " ".join(printed(result).split())
    assert "line 62" in table_of(tmp_path / "s")[0]["error"]
    assert run_sweep(TABLES, grid, tmp_path / "s", jobs=1).reused == 1


def test_saturated_and_open_loop_cells_share_a_table(tmp_path):
    (tmp_path / "t.csv").write_text(TRACE)
    tables = {
        "workload": {"trace": str(tmp_path / "t.csv")},
        "attention_ffn": {"batch_per_worker": 4, "r": 2},
        "run": {"replications": 2},
    }
    grid = axes("run.mode=saturated,open_loop")
    text = printed(run_sweep(tables, grid, tmp_path / "s", jobs=1))
    assert "theory" in text
    assert "TTFT" in text


def test_a_full_disk_is_one_message_and_leaves_no_partial_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError, match=r"sweep\.json: cannot be written: No space left"):
        run_sweep(TABLES, axes("attention_ffn.r=1"), tmp_path / "s", jobs=1)
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["points"]


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="File name too long"):
        run_sweep(TABLES, axes("attention_ffn.r=1"), tmp_path / ("x" * 300), jobs=1)


def wait_until(condition, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_ctrl_c_ends_a_sweep_of_long_cells_and_keeps_the_finished_ones(tmp_path):
    out = tmp_path / "s"
    settings = ("run.engine=simpy", "run.replications=2", "attention_ffn.r=8")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "twin.cli", "sweep", "--jobs", "2", "--out", str(out)),
            *("--over", "run.num_cycles=40,3000000"),
            *(part for text in settings for part in ("--set", text)),
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert wait_until(lambda: list(out.glob("points/[0-9]*.json")), 60)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=10)
        assert process.returncode == 130
        assert "the same command goes on from there" in stderr
        assert "Traceback" not in stderr
        assert len(table_of(out)) == 1
        assert wait_until(lambda: group_is_gone(process.pid), 10)
    finally:
        if not group_is_gone(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:9"),
        ("ray://127.0.0.1:9", "no Ray cluster answers at RAY_ADDRESS=ray://127.0.0.1:9"),
        ("somewhere", "must be host:port"),
    ],
)
def test_a_ray_cluster_that_does_not_answer_is_said_at_once(address, said):
    with pytest.raises(ScenarioError, match=said):
        sweep_executors.require_reachable(address)


def test_a_sweep_on_a_cluster_that_does_not_answer_makes_nothing(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ScenarioError, match="no Ray cluster answers"):
        run_sweep(TABLES, axes("attention_ffn.r=1"), tmp_path / "s", engine="ray")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_ray_addresses_without_a_host_are_left_to_ray(address):
    sweep_executors.require_reachable(address)


@pytest.mark.ray
@pytest.mark.slow
def test_ray_gives_the_same_bytes(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    grid = axes("attention_ffn.r=1..2")
    run_sweep(TABLES, grid, tmp_path / "here", jobs=1)
    run_sweep(TABLES, grid, tmp_path / "ray", jobs=2, engine="ray")
    here, ray = (
        {p.name: p.read_bytes() for p in (tmp_path / where / "points").iterdir()}
        for where in ("here", "ray")
    )
    assert here == ray


def test_a_killed_worker_ends_in_one_message_and_keeps_what_was_done(tmp_path, monkeypatch):
    from concurrent.futures.process import BrokenProcessPool

    from twin import sweep_executors

    class Killed:
        """A pool whose second task finds its worker gone."""

        def __init__(self) -> None:
            self.submitted = 0

        def submit(self, function, *arguments):
            from concurrent.futures import Future

            future = Future()
            self.submitted += 1
            if self.submitted == 1:
                future.set_result(function(*arguments))
            else:
                future.set_exception(BrokenProcessPool("terminated abruptly"))
            return future

    @contextlib.contextmanager
    def pool(workers, context):
        yield Killed()

    monkeypatch.setattr(sweep_executors, "_pool", pool)
    with pytest.raises(ScenarioError, match="worker process was killed"):
        run_sweep(TABLES, axes("attention_ffn.r=1..2"), tmp_path / "s", jobs=2)
    assert len((tmp_path / "s" / "sweep.csv").read_text().splitlines()) == 2
