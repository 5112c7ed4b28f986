"""Sweeps: the grid, resuming, interruption, and independence of the executor."""

import json

import pytest

from models.strict_tables import ScenarioError
from traces.record import RunDirectoryError
from twin import sweep
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
    real, done = sweep.run_point, []

    def interrupted(tables):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(tables)
        return real(tables)

    monkeypatch.setattr(sweep, "run_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(TABLES, grid, tmp_path / "part", jobs=1)
    assert len((tmp_path / "part" / "sweep.csv").read_text().splitlines()) == 3
    monkeypatch.setattr(sweep, "run_point", real)
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
    assert rows[1]["infeasible"] == ""


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
