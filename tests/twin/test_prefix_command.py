"""``twin run`` of a prefix store: refused before it runs, and its picture over time."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from twin import cli
from twin.store import experiment
from twin.store.plots import COLORS, time_figure

SCENARIO = str(Path(__file__).parents[2] / "scenarios" / "ptstore.toml")


def refusal(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> str:
    monkeypatch.setattr(sys, "argv", ["twin", "run", SCENARIO, *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert (stop.value.code, said.out, said.err.count("\n")) == (2, "", 1), said
    return said.err


@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y"])
def test_a_place_that_cannot_be_written_is_refused_before_the_simulation(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("it runs")

    monkeypatch.setattr(experiment, "run_prefix", fails)
    assert f"error: {place}: cannot be made" in refusal(["--out", place], capsys, monkeypatch)


@pytest.mark.parametrize("setting", ["cluster.memory_bytes=1", "product.eviction=foo"])
def test_what_does_not_fit_together_is_said_with_the_file(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    words = ["--set", setting, "--out", str(tmp_path / "run")]
    said = refusal(words, capsys, monkeypatch)
    assert said.startswith(f"error: {SCENARIO}: [{setting.partition('.')[0]}]"), said
    assert list(tmp_path.iterdir()) == []


def test_lines_that_coincide_over_time_are_all_seen() -> None:
    modes = ["evostore", "ptstore", "product"]
    same = {"stream": "s", "time_s": [0.0, 1.0, 2.0], "computed_share": [1.0, 0.5, 0.4]}
    queue = {"num_requests_waiting": [0, 1, 0], "num_requests_running": [1, 2, 9]}
    figure = time_figure(
        {
            "rows": [{"stream": "s"}],
            "series": [{"mode": mode, **same, **queue} for mode in modes],
            "modes": [{"mode": mode, "label": mode} for mode in modes],
            "workload": {"name": "w"},
            "deployment": {"nodes": 1, "gpus": 1, "model": "m"},
        }
    )
    for axes in figure.axes:
        # Drawn in this order, each is narrower than all below it.
        assert [line.get_color() for line in axes.lines] == [COLORS[mode] for mode in modes]
        widths = [line.get_linewidth() for line in axes.lines]
        assert all(below >= above + 1 for below, above in itertools.pairwise(widths))
    assert all(float(tick).is_integer() for tick in figure.axes[1].get_yticks())
