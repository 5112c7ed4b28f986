"""The ``twin`` command: what it reads, what it runs, what it prints.

Every command imports what it needs when it runs, so that the closed forms answer at once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from models.scenario import Scenario
from models.strict_tables import ScenarioError
from traces.errors import TraceError
from twin.cache_command import cache
from twin.memory_command import memory
from twin.trace_commands import trace_app

INTERRUPTED = 130
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Of all errors of options and arguments; typer exports only this one subclass of it."""

app = typer.Typer(
    name="twin",
    help="A digital twin of LLM serving: attention workers per FFN server, bits per expert weight.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

calibrate_app = typer.Typer(help="Fit cost models to measurements.", no_args_is_help=True)
app.add_typer(calibrate_app, name="calibrate")
app.add_typer(trace_app, name="trace")
app.command()(memory)
app.command()(cache)


class Executor(StrEnum):
    """Where the runs of a sweep are executed."""

    PROCESSES = "processes"
    RAY = "ray"


class Validated(StrEnum):
    """Published results that can be checked."""

    AFD = "afd"
    PTSTORE = "ptstore"


class Transfer(StrEnum):
    """Whose tokens a transfer carries."""

    WORKER = "worker"
    BUNDLE = "bundle"


ScenarioArgument = Annotated[
    Path | None,
    typer.Argument(help="Scenario file (TOML). Without it: the bundled Azure conversation."),
]
TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace", help="Trace file, or a bundled workload's name; replaces \\[workload]."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting: table.key=value. May be repeated."),
]
SkipOption = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Leave bad rows of the trace out and count them.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Seed of all random streams (run.seed).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Run the command line; bad input ends with exit code 2 and one message."""
    _make_output_robust()
    try:
        try:
            code = app(standalone_mode=False)
        finally:
            sys.stdout.flush()
        if code == INTERRUPTED:
            _complain("interrupted")  # typer has made an exit code of it, without a word
        sys.exit(code if isinstance(code, int) else 0)
    except USAGE_ERROR as error:
        _complain_of_usage(error)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)
    except OSError as error:
        _drop_output()
        place = "standard output" if error.filename is None else error.filename
        _complain(f"error: {place}: {error.strerror or error}")
        sys.exit(1)
    except MemoryError:
        _complain("error: not enough memory for a question of this size")
        sys.exit(2)
    except _input_errors() as error:
        _complain(f"error: {error}")
        sys.exit(2)


def _make_output_robust() -> None:
    """Signs that the terminal's encoding lacks become ``?``; a closed output swallows all."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that the exit does not fail on it again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _input_errors() -> tuple[type[Exception], ...]:
    """Errors that the person at the keyboard can mend."""
    from models.calibration import CalibrationError
    from models.hf_config import HfConfigError
    from models.slot_load import HeavyTailError
    from models.weight_memory import WeightMemoryError
    from policies.provisioning import InfeasibleError
    from traces.record import RunDirectoryError

    return (
        ScenarioError,
        TraceError,
        CalibrationError,
        HeavyTailError,
        HfConfigError,
        InfeasibleError,
        RunDirectoryError,
        WeightMemoryError,
    )


def _complain_of_usage(error: Exception) -> None:
    """One line as for any other error; a command without words shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{error}\n" if str(error) else "")
        return
    context = getattr(error, "ctx", None)
    path = f" (see {context.command_path} --help)" if context is not None else ""
    _complain(f"error: {error.format_message()}{path}")  # type: ignore[attr-defined]


def _complain(message: str) -> None:
    sys.stderr.write(message.replace("\n", "\\n").replace("\r", "\\r") + "\n")


def _scenario(
    path: Path | None,
    trace: str | None,
    overrides: list[str] | None,
    *,
    seed: int | None = None,
    skip_bad_rows: bool = False,
) -> Scenario:
    """The scenario of the command line: file, then --trace, then --set, then the other flags."""
    from models.scenario_file import parse_scenario

    tables = _tables(path, trace, overrides, seed=seed, skip_bad_rows=skip_bad_rows)
    return parse_scenario(tables, where=_where(path))


def _where(path: Path | None) -> str:
    return "command line" if path is None else str(path)


def _tables(
    path: Path | None,
    trace: str | None,
    overrides: list[str] | None,
    *,
    seed: int | None = None,
    skip_bad_rows: bool = False,
) -> dict[str, Any]:
    from models.scenario_file import apply_overrides, beside, is_prefix, read_toml

    tables: dict[str, Any] = {} if path is None else beside(read_toml(path), path.parent)
    if trace is not None:
        workload = tables.get("workload", {})
        kept: tuple[str, ...] = (
            "arrivals",
            "num_requests",
            "skip_bad_rows",
            "format",
            "columns",
            "time_unit",
            "servegen",
        )
        if is_prefix(tables):
            kept = ("num_requests", "skip_bad_rows", "format", "rate_scale")
        if isinstance(workload, dict):
            workload = {key: value for key, value in workload.items() if key in kept}
        tables["workload"] = {**workload, "trace": trace}
    tables = apply_overrides(tables, overrides or [])
    if seed is not None:
        tables = apply_overrides(tables, [f"run.seed={seed}"])
    if skip_bad_rows:
        tables = apply_overrides(tables, ["workload.skip_bad_rows=true"])
    return tables


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from traces.environment import versions

        sys.stdout.write(f"serving-twin {versions().get('serving-twin', '(not installed)')}\n")
        raise typer.Exit


@app.callback()
def _whole_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """A digital twin of LLM serving: how many attention workers per FFN server, and why."""


@app.command()
def run(
    scenario: ScenarioArgument = None,
    trace: TraceOption = None,
    settings: SetOption = None,
    skip_bad_rows: SkipOption = False,
    seed: SeedOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory to write. Default: results/NAME-NNN."),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw the pictures.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Theory at four levels, the simulated twin beside it, and what stragglers cost.

    A scenario with [llm] and [precision]: expert weights that shrink while the KV cache grows. One
    with [prefix]: prompts' beginnings pooled over nodes.
    """
    from models.scenario_file import is_paged_weight, is_prefix, parse_paged_weight, parse_scenario
    from traces.record import (
        check_writable,
        next_run_path,
        write_numbered_run,
        write_run,
    )
    from twin.experiment import ExperimentResult, run_experiment
    from twin.paged_weight_experiment import PagedWeightResult, run_paged_weight
    from twin.paged_weight_files import paged_weight_record
    from twin.paged_weight_report import print_paged_weight
    from twin.progress import progress_bar
    from twin.report import make_console, print_report
    from twin.run_files import run_record

    tables = _tables(scenario, trace, settings, seed=seed, skip_bad_rows=skip_bad_rows)
    if is_prefix(tables):
        _run_prefix(tables, _where(scenario), out, plots=plots, as_json=as_json)
        return
    is_paged = is_paged_weight(tables)
    question = (parse_paged_weight if is_paged else parse_scenario)(tables, where=_where(scenario))
    check_writable(out or next_run_path("results", "run"))
    result: ExperimentResult | PagedWeightResult
    try:
        with progress_bar() as on_progress:
            if isinstance(question, Scenario):
                result = run_experiment(question, on_progress=on_progress)
            else:
                result = run_paged_weight(question, on_progress=on_progress)
        if isinstance(result, PagedWeightResult):
            record = paged_weight_record(result, plots=plots)
        else:
            record = run_record(result, plots=plots)
        if out is None:
            target = write_numbered_run("results", result.name, record)
        else:
            target = out
            write_run(target, record)
    except KeyboardInterrupt:
        _complain("interrupted: nothing was written")
        sys.exit(130)
    if as_json:
        _print_json({**result.summary, "run_directory": str(target)})
        return
    console = make_console()
    (print_paged_weight if is_paged else print_report)(result.summary, console)
    what = "run.json, tables, decisions" if is_paged else "run.json, tables, timeline"
    console.print(
        f"\nwritten: {target}/ ({what}{', plots' if plots else ''})",
        markup=False,
        soft_wrap=True,
    )


def _run_prefix(
    tables: dict[str, Any], where: str, out: Path | None, *, plots: bool, as_json: bool
) -> None:
    """A scenario of a pooled prefix cache, from its tables to its directory and report."""
    from models.scenario_file import parse_prefix
    from traces.record import (
        check_writable,
        next_run_path,
        write_numbered_run,
        write_run,
    )
    from twin.progress import progress_bar
    from twin.report import make_console
    from twin.store.experiment import run_prefix
    from twin.store.files import prefix_record
    from twin.store.report import print_prefix

    question = parse_prefix(tables, where=where)
    check_writable(out or next_run_path("results", "run"))
    try:
        with progress_bar() as on_progress:
            try:
                result = run_prefix(question, on_progress=on_progress)
            except ScenarioError as error:  # what does not fit together is found by the run
                raise ScenarioError(f"{where}: {error}") from None
        record = prefix_record(result, plots=plots)
        target = out or write_numbered_run("results", result.name, record)
        if out is not None:
            write_run(out, record)
    except KeyboardInterrupt:
        _complain("interrupted: nothing was written")
        sys.exit(130)
    if as_json:
        _print_json({**result.summary, "run_directory": str(target)})
        return
    console = make_console()
    print_prefix(result.summary, console)
    console.print(
        f"written: {target}/ (run.json, tables, decisions{', plots' if plots else ''})",
        markup=False,
        soft_wrap=True,
    )


@app.command()
def theory(
    scenario: ScenarioArgument = None,
    trace: TraceOption = None,
    settings: SetOption = None,
    skip_bad_rows: SkipOption = False,
    as_json: JsonOption = False,
) -> None:
    """The closed forms alone, in under a second."""
    from models.workload import resolve_workload
    from twin.report import make_console, print_report
    from twin.theory import solve_theory, theory_summary

    question = _scenario(scenario, trace, settings, skip_bad_rows=skip_bad_rows)
    workload = resolve_workload(question.workload, seed=question.run.seed)
    summary = theory_summary(solve_theory(question, workload))
    if as_json:
        _print_json(summary)
    else:
        print_report(summary, make_console())


@app.command()
def sweep(
    scenario: ScenarioArgument = None,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", help="Swept key: table.key=1..32, =1..32..4 or =a,b. Repeat it."),
    ] = None,
    trace: TraceOption = None,
    settings: SetOption = None,
    skip_bad_rows: SkipOption = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Sweep directory; an unfinished one goes on.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Parallel runs. Default: all cores.")
    ] = None,
    engine: Annotated[
        Executor, typer.Option("--engine", help="Where runs are executed.")
    ] = Executor.PROCESSES,
    as_json: JsonOption = False,
) -> None:
    """A grid over any scenario keys: parallel, resumable, the same results on any executor."""
    from models.scenario_file import scenario_tables
    from twin.command_reports import print_sweep
    from twin.progress import progress_bar
    from twin.report import make_console
    from twin.sweep import parse_axis, run_sweep, sweep_rows

    if not over:
        raise ScenarioError("--over is missing: which key to sweep, e.g. attention_ffn.r=1..32")
    axes = [parse_axis(text) for text in over]
    tables = scenario_tables(_scenario(scenario, trace, settings, skip_bad_rows=skip_bad_rows))
    target = out or Path("results") / ("sweep-" + "-".join(a.key.split(".")[-1] for a in axes))
    with progress_bar() as on_progress:
        try:
            result = run_sweep(
                tables, axes, target, jobs=jobs, engine=engine.value, on_progress=on_progress
            )
        except KeyboardInterrupt:
            _complain(
                f"interrupted: the finished points are in {target}/sweep.csv; "
                "the same command goes on from there"
            )
            sys.exit(130)
    rows = sweep_rows(result)
    if as_json:
        _print_json({"directory": str(target), "reused": result.reused, "rows": rows})
    else:
        print_sweep(rows, [axis.key for axis in axes], make_console())
        reused = f", {result.reused} of them from before" if result.reused else ""
        _complain(f"written: {target}/ ({len(rows)} points{reused})")
    if rows and all(row["error"] for row in rows):
        _complain(f"error: no point could be run: {rows[0]['error']}")
        sys.exit(2)


@app.command()
def validate(
    what: Annotated[Validated, typer.Argument(help="Which published results.")],
    as_json: JsonOption = False,
) -> None:
    """A paper's printed table beside ours: each row reproduced or not, and why."""
    from dataclasses import asdict

    from twin.command_reports import print_validation
    from twin.progress import progress_bar
    from twin.report import make_console
    from twin.validation import validate_afd

    if what is Validated.PTSTORE:
        _validate_ptstore(as_json=as_json)
        return
    with progress_bar() as on_progress:
        rows = validate_afd(on_progress=on_progress)
    if as_json:
        _print_json([asdict(row) for row in rows])
    else:
        print_validation([asdict(row) for row in rows], make_console())


def _validate_ptstore(*, as_json: bool) -> None:
    from dataclasses import asdict

    from twin.progress import progress_bar
    from twin.report import make_console
    from twin.store.validation import PARAMETERS, validate_ptstore
    from twin.store.validation_report import print_claims

    with progress_bar() as on_progress:
        claims = [asdict(row) for row in validate_ptstore(on_progress=on_progress)]
    if as_json:
        _print_json({"parameters": [asdict(p) for p in PARAMETERS], "claims": claims})
    else:
        print_claims(claims, PARAMETERS, make_console())


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="decisions.jsonl.gz, or a run directory.")],
) -> None:
    """Run a decision log through fresh policies; exit code 1 at the first different order."""
    from twin.replay import replay_log

    found = replay_log(log)
    left_out = f" ({found.num_left_out:,} later calls are not in it)" if found.num_left_out else ""
    if found.difference is None:
        calls = "1 call" if found.num_calls == 1 else f"{found.num_calls:,} calls"
        sys.stdout.write(f"{calls}, no difference{left_out}\n")
        return
    call = found.difference
    sys.stdout.write(
        f"call {call.n} ({call.policy}.{call.call} at {call.now:g} s) differs\n"
        f"logged: {json.dumps(call.orders)}\nfresh:  {json.dumps(found.orders)}\n"
    )
    sys.exit(1)


@calibrate_app.command("attention-ffn")
def calibrate_attention_ffn(
    measurements: Annotated[
        Path, typer.Argument(help="CSV with columns stage, tokens, batch and seconds (or ms, us).")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Calibration file to write.")] = None,
    name: Annotated[str, typer.Option(help="Name of the calibration.")] = "",
    device: Annotated[str, typer.Option(help="What was measured.")] = "",
    model: Annotated[str, typer.Option(help="Model whose layer was measured.")] = "",
    num_layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 1,
    communication: Annotated[
        Transfer, typer.Option(help="Whose tokens a transfer's batch counts.")
    ] = Transfer.WORKER,
    as_json: JsonOption = False,
) -> None:
    """Fit the six latency coefficients to measured stage times."""
    from models.calibration import fit_attention_ffn, save_calibration
    from twin.command_reports import print_calibration
    from twin.report import make_console

    found = fit_attention_ffn(
        measurements,
        name=name,
        device=device,
        model=model,
        num_layers=num_layers,
        communication=communication.value,
    )
    if out is not None:
        save_calibration(found, out)
    if as_json:
        from dataclasses import asdict

        _print_json(asdict(found))
        return
    print_calibration(found, make_console())
    if out is not None:
        _complain(f"written: {out} (use it with --set attention_ffn.calibration={out})")


@app.command()
def dashboard(
    port: Annotated[int, typer.Option(help="Port on loopback.", min=1, max=65535)] = 8501,
) -> None:
    """The what-if page in a browser (Streamlit, on loopback, no telemetry)."""
    from twin.dashboard_server import serve_dashboard

    serve_dashboard(port)


if __name__ == "__main__":
    main()
