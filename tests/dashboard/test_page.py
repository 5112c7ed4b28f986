"""The page as a user meets it, without a browser."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.answers import closed_forms, summary_json
from models.scenario_file import default_scenario
from traces.record import RunRecord, write_run
from twin.report import duration, headline, how_sure, percent, rate

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"
SMALL = """\
[workload]
trace = "azure-2023-conversation"

[attention_ffn]
batch_per_worker = 16
r_max = 8

[run]
engine = "simpy"
replications = 2
num_cycles = 60
simulate_r = [2, 8]
compare_routing = false
"""


def open_page() -> AppTest:
    page = AppTest.from_file(str(APP), default_timeout=60).run()
    assert not page.exception
    return page


def open_file_tab(text: str) -> AppTest:
    page = open_page()
    page.session_state["source"] = "Scenario file"
    return page.run().text_area[0].set_value(text).run()


def html(page: AppTest) -> str:
    return unescape("".join(part.value for part in page.get("html")))


def errors(page: AppTest) -> list[str]:
    """Texts of the error boxes as they are read on the screen."""
    return [re.sub(r"\\(.)", r"\1", box.value) for box in page.error]


def ratio(page: AppTest) -> str:
    found = re.search(r'data-testid="ratio">(.*?)</span>', html(page))
    assert found is not None, html(page)
    return found.group(1)


def metrics(page: AppTest, part: str = "value") -> dict[str, str]:
    """Metric -> its number (``value``), or the simulated one below it (``twin``)."""
    cards = re.findall(r'data-name="(\w+)".*?</div></div>', html(page))
    texts = re.findall(rf'<div class="{part}">(.*?)</div>', html(page))
    return dict(zip(cards, texts, strict=True))


@functools.cache
def twin(command: str, where: str = ".") -> str:
    """What the ``twin`` command of this environment prints."""
    program = Path(sys.executable).with_name("twin")
    done = subprocess.run(
        command.replace("twin", str(program), 1),
        shell=True,
        cwd=where,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def expected_metrics(summary: dict[str, Any]) -> dict[str, str]:
    best = summary["recommendation"]
    return {
        "throughput": rate(best["throughput_per_instance"] / summary["bundle"]["num_layers"]),
        "tpot": duration(best["tpot_s"]),
        "cycle": duration(best["cycle_s"]),
        "barrier": percent(best["barrier_overhead"]),
        "attention_idle": percent(best["attention_idle"], 1),
        "ffn_idle": percent(best["ffn_idle"], 1),
    }


def assert_page_says(page: AppTest, summary: dict[str, Any]) -> None:
    best = summary["recommendation"]
    assert ratio(page) == f"r = {best['r']}"
    assert metrics(page) == expected_metrics(summary)
    shown = html(page)
    assert headline(best) in shown
    assert how_sure(best)[1:] in shown
    for warning in summary["warnings"]:
        assert warning in shown


def test_the_first_page_recommends_a_ratio_without_a_click() -> None:
    page = open_page()
    assert_page_says(page, json.loads(twin("twin theory --json")))
    assert not page.error


def test_the_command_shown_prints_the_numbers_shown_after_a_change() -> None:
    page = open_page()
    before = ratio(page)
    page.number_input(key="form.batch_per_worker").set_value(64).run()
    command = page.code[0].value
    assert "attention_ffn.batch_per_worker=64" in command
    assert ratio(page) != before
    assert_page_says(page, json.loads(twin(command)))


def test_the_json_is_the_command_lines_to_the_letter() -> None:
    assert summary_json(closed_forms(default_scenario())) == twin("twin theory --json")


def test_a_limit_in_milliseconds_holds_the_ratio_back() -> None:
    page = open_page()
    page.number_input(key="form.max_tpot_ms").set_value(36.0).run()
    assert "held back by max_tpot_s" in html(page)
    assert "attention_ffn.max_tpot_s=0.036" in page.code[0].value
    assert_page_says(page, json.loads(twin(page.code[0].value)))


def test_a_limit_that_cannot_be_met_is_an_error_box_and_no_answer() -> None:
    page = open_page()
    page.number_input(key="form.max_tpot_ms").set_value(1.0).run()
    assert errors(page) == [
        "max_tpot_s = 0.001 cannot be met with batch_per_worker = 256: even one attention worker "
        "needs 0.03465 s per output token"
    ]
    assert not page.exception
    assert not page.code


def test_an_empty_batch_without_limits_shows_the_readers_message() -> None:
    page = open_page()
    page.number_input(key="form.batch_per_worker").set_value(None).run()
    assert "[attention_ffn] batch_per_worker: 'auto' needs" in errors(page)[0]


def test_toml_that_is_none_shows_the_readers_message() -> None:
    page = open_file_tab("[workload\n")
    assert errors(page)[0].startswith("scenario.toml: is not valid TOML: ")
    assert not page.exception


def test_an_unknown_key_is_named_with_its_table_and_a_suggestion() -> None:
    page = open_file_tab(SMALL.replace("batch_per_worker", "batch_per_workr"))
    assert errors(page)[0].startswith(
        "scenario.toml: [attention_ffn] batch_per_workr: unknown key; known here: "
    )
    assert errors(page)[0].endswith("(did you mean batch_per_worker?)")


def test_a_law_that_is_too_wide_to_solve_is_an_error_box() -> None:
    page = open_file_tab(
        """[workload.lengths]
        kind = "lognormal"
        mean_prompt_tokens = 1e6
        mean_output_tokens = 1e6
        sigma_output = 4.0
        """
    )
    assert "lengths may span at most" in errors(page)[0]
    assert not page.exception


def test_the_form_can_be_carried_on_as_a_scenario_file() -> None:
    page = open_page()
    page.number_input(key="form.batch_per_worker").set_value(64).run()
    answer = metrics(page)
    page.button(key="take.edit").click().run()
    assert "batch_per_worker = 64" in page.text_area[0].value
    assert metrics(page) == answer


def test_simulate_shows_what_twin_run_prints_for_the_same_scenario(tmp_path: Path) -> None:
    page = open_file_tab(SMALL)
    assert "simulated twin" not in html(page)
    page.button(key="simulate").click().run()
    assert not page.error and not page.exception
    command = f"{page.code[1].value} --json --no-plots --out {tmp_path / 'run'}"
    summary = json.loads(twin(command))
    assert_page_says(page, summary)
    point = summary["simulation"]["points"][-1]
    layers = summary["bundle"]["num_layers"]
    estimate = point["throughput_per_instance"]
    assert summary["recommendation"]["r"] == point["r"]
    assert metrics(page, "twin")["throughput"] == (
        f"twin {rate(estimate['mean'] / layers)} ± {rate(estimate['half_width'] / layers)}"
    )
    assert "Theory against the simulated twin (simpy engine)" in [
        line.value.removeprefix("##### ") for line in page.markdown
    ]
    assert page.button(key="simulate").disabled


def test_a_saved_run_shows_the_same_answer(tmp_path: Path) -> None:
    twin(
        f"twin run --set attention_ffn.batch_per_worker=8 --set run.num_cycles=60 "
        f"--set run.simulate_r=chosen --set run.compare_routing=false --set run.engine=simpy "
        f"--no-plots --out {tmp_path / 'saved'}"
    )
    page = open_page()
    page.session_state["source"] = "Saved run"
    page.run().text_input(key="saved.path").set_value(str(tmp_path / "saved")).run()
    assert_page_says(page, json.loads((tmp_path / "saved" / "run.json").read_text()))
    origin = f"saved run {tmp_path / 'saved'}; seed 1; "
    assert any(caption.value.startswith(origin) for caption in page.caption)


def test_a_run_of_another_engine_shows_what_it_has(tmp_path: Path) -> None:
    summary = {"warnings": ["measured on one device"], "seed": 3}
    write_run(tmp_path / "other", RunRecord(summary=summary))
    page = open_page()
    page.session_state["source"] = "Saved run"
    page.run().text_input(key="saved.path").set_value(str(tmp_path / "other")).run()
    assert not page.exception and not page.error
    assert "measured on one device" in html(page)


def test_a_damaged_run_directory_is_named(tmp_path: Path) -> None:
    page = open_page()
    page.session_state["source"] = "Saved run"
    page.run().text_input(key="saved.path").set_value(str(tmp_path)).run()
    assert errors(page)[0] == f"{tmp_path}/run.json: cannot be read: No such file or directory"


# --- trace files ------------------------------------------------------------------------------

BAD_ROWS = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    b"2023-11-16 18:15:46.6805900,374,44\n"
    b"2023-11-16 18:15:50.9951690,396,-109\n"
    b"2023-11-16 18:15:51.2225670,879,55\n"
)


def upload(name: str, content: bytes) -> AppTest:
    page = open_page()
    page.session_state["form.workload"] = "Trace file"
    page.run()
    assert page.info[0].value == "Choose a file on the left, or type its path."
    return page.file_uploader[0].set_value((name, content, "text/csv")).run()


def test_a_bad_upload_shows_the_readers_message_with_the_files_own_name() -> None:
    page = upload("conv.csv", BAD_ROWS)
    assert errors(page)[0].startswith("conv.csv, line 3, column GeneratedTokens: found '-109'")
    assert not page.exception


def test_bad_rows_can_be_left_out_and_are_reported() -> None:
    page = upload("conv.csv", BAD_ROWS)
    page.checkbox(key="form.skip_bad_rows").check().run()
    assert not page.error
    assert "1 row" in html(page) and "output_tokens" in html(page)
    assert "--trace conv.csv --set workload.skip_bad_rows=true" in page.code[0].value


def test_an_uploaded_trace_gives_what_the_command_line_gives(
    data_file: Callable[[str], Path],
) -> None:
    path = data_file("azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz")
    page = upload(path.name, path.read_bytes())
    command = page.code[0].value
    assert command == f"twin theory --trace {path.name} --json"
    assert_page_says(page, json.loads(twin(command, where=str(path.parent))))


def test_a_path_on_this_machine_needs_no_upload(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_bytes(BAD_ROWS.replace(b"-109", b"109"))
    page = open_page()
    page.session_state["form.workload"] = "Trace file"
    page.run().text_input(key="form.trace_path").set_value(str(path)).run()
    assert not page.error
    assert page.code[0].value == f"twin theory --trace {path} --json"


@pytest.mark.parametrize("law", ["geometric", "lognormal", "pareto", "fixed"])
def test_every_length_law_has_an_answer_at_its_defaults(law: str) -> None:
    page = open_page()
    page.session_state["form.workload"] = "Length law"
    page.run().selectbox(key="form.law").select(law).run()
    assert not page.error and not page.exception
    assert ratio(page).startswith("r = ")


def test_own_coefficients_start_from_the_calibrated_ones() -> None:
    page = open_page()
    answer = metrics(page)
    page.selectbox(key="form.calibration").select("six coefficients").run()
    assert "num_layers=61" in page.code[0].value
    assert metrics(page) == answer
