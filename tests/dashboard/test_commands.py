"""The command line shown on the page, read by the command line itself."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dashboard.commands import command_line
from models.scenario import Scenario
from models.scenario_file import parse_scenario, scenario_toml
from twin import cli

AZURE = {"trace": "azure-2023-conversation"}


def asked_by(command: str, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """The scenario that ``twin theory`` gets from this command line."""
    found: list[Scenario] = []

    def remember(scenario: Scenario, *_: object, **__: object) -> None:
        found.append(scenario)
        raise SystemExit(0)

    monkeypatch.setattr("twin.theory.solve_theory", remember)
    program, *words = shlex.split(command)
    assert program == "twin"
    CliRunner().invoke(cli.app, words)
    return found[0]


@pytest.mark.parametrize(
    "tables",
    [
        {"workload": AZURE},
        {
            "workload": AZURE,
            "attention_ffn": {
                "batch_per_worker": "auto",
                "max_tpot_s": 0.035,
                "kv_capacity_tokens": 400_000,
                "semantics": "pingpong",
                "one_way_s": 1e-05,
                "r_max": 32,
                "attention_price": 0.5,
                "level": "gaussian",
            },
            "routing": {"attention_worker": "least_token_load"},
            "run": {"simulate_r": [1, 4, 8], "compare_routing": False, "confidence": 0.9},
        },
        {
            "workload": {
                "lengths": {"kind": "geometric", "prompt_tokens": 100, "mean_output_tokens": 500.0}
            },
            "attention_ffn": {
                "coefficients": {
                    "alpha_attention": 0.00165,
                    "beta_attention": 50.0,
                    "alpha_ffn": 0.083,
                    "beta_ffn": 100.0,
                    "unit": "us",
                },
                "num_layers": 61,
            },
            "run": {"simulate_r": "chosen", "seed": 7, "num_cycles": 100},
        },
        {
            "workload": {
                **AZURE,
                "num_requests": 500,
                "arrivals": {"kind": "gamma", "rate_per_s": 2.5, "cv": 1.5},
            },
            "slo": {"ttft_s": 1.0},
            "run": {"mode": "open_loop"},
        },
    ],
    ids=["defaults", "limits", "law and coefficients", "open loop"],
)
def test_the_command_line_asks_the_same_question(
    tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = parse_scenario(tables)
    assert asked_by(command_line("theory", scenario), monkeypatch) == scenario


def test_names_with_blanks_quotes_and_toml_words_survive_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "it's a trace.csv"
    trace.write_text("ask me,true\n3,4\n5,6\n")
    scenario = parse_scenario(
        {
            "workload": {
                "trace": str(trace),
                "format": "csv",
                "columns": {"prompt": "ask me", "output": "true"},
            }
        }
    )
    assert asked_by(command_line("theory", scenario, "--json"), monkeypatch) == scenario


def test_a_scenario_with_faults_goes_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = parse_scenario(
        {"workload": AZURE, "faults": [{"kind": "slow", "worker": 0, "factor": 1.5}]}
    )
    monkeypatch.chdir(tmp_path)
    Path("scenario.toml").write_text(scenario_toml(scenario))
    assert command_line("run", scenario) == "twin run scenario.toml"
    assert asked_by(command_line("theory", scenario), monkeypatch) == scenario
