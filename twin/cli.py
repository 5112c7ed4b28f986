"""The ``twin`` command: what it reads, what it runs, what it prints.

Every command imports what it needs when it runs, so that the closed forms answer at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from models.scenario import Scenario
from models.strict_tables import ScenarioError
from traces.errors import TraceError

app = typer.Typer(
    name="twin",
    help="A digital twin of LLM serving: how many attention workers per FFN server, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

ScenarioArgument = Annotated[
    Path | None,
    typer.Argument(help="Scenario file (TOML). Without it: the bundled Azure conversation."),
]
TraceOption = Annotated[
    str | None,
    typer.Option("--trace", help="Trace file, or a bundled workload's name; replaces [workload]."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting: table.key=value. May be repeated."),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Seed of all random streams (run.seed).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Run the command line; bad input ends with exit code 2 and one message."""
    try:
        app()
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except _input_errors() as error:
        _complain(f"error: {error}")
        sys.exit(2)


def _input_errors() -> tuple[type[Exception], ...]:
    """Errors that the person at the keyboard can mend."""
    from models.calibration import CalibrationError
    from models.slot_load import HeavyTailError
    from policies.provisioning import InfeasibleError
    from traces.record import RunDirectoryError

    return (
        ScenarioError,
        TraceError,
        CalibrationError,
        HeavyTailError,
        InfeasibleError,
        RunDirectoryError,
    )


def _complain(message: str) -> None:
    sys.stderr.write(message + "\n")


def _scenario(
    path: Path | None, trace: str | None, overrides: list[str] | None, seed: int | None
) -> Scenario:
    """The scenario of the command line: file, then --trace, then --set, then --seed."""
    from models.scenario_file import DEFAULT_TRACE, apply_overrides, parse_scenario, read_toml

    tables: dict[str, Any] = {} if path is None else read_toml(path)
    if trace is not None:
        workload = tables.get("workload", {})
        kept = ("arrivals", "num_requests", "skip_bad_rows", "format", "columns", "time_unit")
        if isinstance(workload, dict):
            workload = {key: value for key, value in workload.items() if key in kept}
        tables["workload"] = {**workload, "trace": trace}
    tables = apply_overrides(tables, overrides or [])
    workload = tables.setdefault("workload", {})
    if path is None and isinstance(workload, dict) and "lengths" not in workload:
        workload.setdefault("trace", DEFAULT_TRACE)
    if seed is not None:
        tables = apply_overrides(tables, [f"run.seed={seed}"])
    return parse_scenario(tables, where="command line" if path is None else str(path))


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


@app.command()
def run(
    scenario: ScenarioArgument = None,
    trace: TraceOption = None,
    settings: SetOption = None,
    seed: SeedOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory to write. Default: results/NAME-NNN."),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw the pictures.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Theory at four levels, the simulated twin beside it, and what stragglers cost."""
    from traces.record import check_writable, next_run_path, write_run
    from twin.experiment import run_experiment
    from twin.progress import progress_bar
    from twin.report import make_console, print_report
    from twin.run_files import run_record

    question = _scenario(scenario, trace, settings, seed)
    if out is not None:
        check_writable(out)
    with progress_bar() as on_progress:
        result = run_experiment(question, on_progress=on_progress)
    target = out or next_run_path("results", result.name)
    write_run(target, run_record(result, plots=plots))
    if as_json:
        _print_json({**result.summary, "run_directory": str(target)})
        return
    console = make_console()
    print_report(result.summary, console)
    console.print(f"\nwritten: {target}/ (run.json, tables, timeline{', plots' if plots else ''})")


@app.command()
def theory(
    scenario: ScenarioArgument = None,
    trace: TraceOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """The closed forms alone, in under a second."""
    from twin.report import make_console, print_report
    from twin.theory import solve_theory, theory_summary
    from twin.workload import resolve_workload

    question = _scenario(scenario, trace, settings, None)
    summary = theory_summary(solve_theory(question, resolve_workload(question.workload)))
    if as_json:
        _print_json(summary)
    else:
        print_report(summary, make_console())


@app.command()
def dashboard(
    port: Annotated[int, typer.Option(help="Port on loopback.", min=1, max=65535)] = 8501,
) -> None:
    """The what-if page in a browser (Streamlit, on loopback, no telemetry)."""
    from twin.dashboard_server import serve_dashboard

    sys.exit(serve_dashboard(port))


if __name__ == "__main__":
    main()
