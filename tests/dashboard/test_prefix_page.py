"""The page about prefix caches as a user meets it, without a browser."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.prefix_form import DEFAULT_POLICIES, NUM_REQUESTS, SIZES, split_sizes
from dashboard.prefix_pictures import curves_picture
from policies.catalog import EVICTION
from traces.record import RunRecord, write_run
from twin.cache_curves import CacheQuestion, run_curves
from twin.cache_workload import generated_workload

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"
MOONCAKE = '{"timestamp": %d, "input_length": 1024, "output_length": 9, "hash_ids": [%d, %d]}\n'


def open_prefix_tab() -> AppTest:
    page = AppTest.from_file(str(APP), default_timeout=120).run()
    page.session_state["source"] = "Prefix cache"
    return page


def small(page: AppTest) -> AppTest:
    """The tab with a question that is answered at once."""
    page.session_state["form.prefix_requests"] = 60
    page.session_state["prefix.policies"] = ["lru", "gdsf"]
    page.session_state["prefix.sizes"] = "5%, 20%"
    return page.run()


def html(page: AppTest) -> str:
    return unescape("".join(part.value for part in page.get("html")))


def tables(page: AppTest) -> dict[str, list[str]]:
    """First cell of each row -> the other cells, of all tables, the first of equals."""
    found: dict[str, list[str]] = {}
    for row in re.findall(r"<tr.*?</tr>", html(page), re.S):
        cells = re.findall(r"<td.*?>(.*?)</td>", row, re.S)
        if cells:
            found.setdefault(cells[0], cells[1:])
    return found


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    question = CacheQuestion(policies=("lru", "gdsf"), sizes=("5%", "20%"), jobs=1)
    return run_curves(question, generated_workload("docqa", num_requests=60))


def test_the_page_shows_the_numbers_of_the_simulation(summary: dict[str, Any]) -> None:
    page = small(open_prefix_tab())
    assert not page.exception and not page.error
    shown = tables(page)
    for name in ("lru", "gdsf"):
        for cell, row in zip(shown[name], summary["curves"][name], strict=False):
            assert cell.rstrip("* ") == f"{100 * row['block_hit_share']:.1f}"
    for warning in summary["warnings"]:
        assert warning in html(page)


def test_the_command_of_the_page_prints_the_summary_of_the_page(tmp_path: Path) -> None:
    page = small(open_prefix_tab())
    (command,) = [box.value for box in page.code if box.value.startswith("twin cache")]
    words = shlex.split(command)
    program = Path(sys.executable).with_name("twin")
    done = subprocess.run(
        [str(program), *words[1:], "--json", "--jobs", "1", "--no-plots", "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    printed = json.loads(done.stdout)
    shown = tables(page)
    for name, rows in printed["curves"].items():
        for cell, row in zip(shown[name], rows, strict=False):
            assert cell.rstrip("* ") == f"{100 * row['block_hit_share']:.1f}"


def test_an_uploaded_folder_is_not_needed_a_path_will_do(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text("".join(MOONCAKE % (1000 * i, i % 2, 10 + i % 4) for i in range(20)))
    page = open_prefix_tab()
    page.session_state["prefix.kind"] = "Trace file"
    page.session_state["prefix.trace_path"] = str(file)
    page = small(page)
    assert not page.exception and not page.error
    assert "20 prompts" in html(page)


def test_a_question_that_cannot_be_asked_shows_one_message(tmp_path: Path) -> None:
    page = open_prefix_tab()
    page.session_state["prefix.sizes"] = "2%, a lot"
    page.session_state["form.prefix_requests"] = 20
    page = page.run()
    assert not page.exception
    (box,) = page.error
    assert "a lot" in box.value
    page.session_state["prefix.kind"] = "Trace file"
    page = page.run()
    assert not page.error and "Choose a trace" in page.info[0].value
    page.session_state["prefix.trace_path"] = str(tmp_path / "absent.jsonl")
    page = page.run()
    assert len(page.error) == 1 and not page.exception


def test_a_saved_run_of_the_command_is_shown(summary: dict[str, Any], tmp_path: Path) -> None:
    write_run(tmp_path / "run", RunRecord(summary=summary))
    page = AppTest.from_file(str(APP), default_timeout=60).run()
    page.session_state["source"] = "Saved run"
    page.session_state["saved.path"] = str(tmp_path / "run")
    page = page.run()
    assert not page.exception and not page.error
    assert tables(page)["lru"][0].rstrip("* ") == (
        f"{100 * summary['curves']['lru'][0]['block_hit_share']:.1f}"
    )


def test_the_picture_has_a_line_for_each_policy_and_the_bound(summary: dict[str, Any]) -> None:
    figure = curves_picture(summary, "block_hit_share", "hits")
    lines = {line.name: list(line.y) for line in figure.data}
    assert list(lines) == ["Belady's bound", "lru", "gdsf"]
    for name in ("lru", "gdsf"):
        assert lines[name] == [row["block_hit_share"] for row in summary["curves"][name]]
    assert [line.name for line in curves_picture(summary, "saved_share", "s").data] == [
        "lru",
        "gdsf",
    ]


def test_what_the_form_begins_with_can_be_asked() -> None:
    assert set(DEFAULT_POLICIES) <= set(EVICTION)
    assert NUM_REQUESTS > 0
    CacheQuestion(policies=DEFAULT_POLICIES, sizes=split_sizes(SIZES))
