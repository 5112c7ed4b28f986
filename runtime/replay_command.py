"""``runtime replay``: a real trace against the engine in this process, or a running server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from runtime.replay_work import ReplayOptions
    from traces.record import RunRecord

DRIVE = "Drive"
MEMORY = "Memory and speed"
POLICY = "Policies"
SERVER = "A running server"
INTERRUPTED = 130


def replay(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TRACE] [MODEL]",
            help="A trace (a bundled name or a file), and the folder of a checkpoint; without "
            "a trace that of the scenario, without a folder the scenario's or the demo model.",
        ),
    ] = None,
    scenario: Annotated[
        Path | None,
        typer.Option("--scenario", help="Scenario file: workload, memory, precision, limits."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change the scenario; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of arrivals and prompts.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory to write. Default: results/replay-NAME-NNN."),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw the pictures.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
    speed: Annotated[
        float,
        typer.Option(
            "--speed",
            help="Times faster than recorded, arrivals and think times.",
            rich_help_panel=DRIVE,
        ),
    ] = 1.0,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            help="Requests per second: stretch the arrivals to it.",
            rich_help_panel=DRIVE,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            min=1,
            help="Closed loop: always so many at a time, whatever the trace's times.",
            rich_help_panel=DRIVE,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, help="Only the first so many.", rich_help_panel=DRIVE),
    ] = None,
    scale_tokens: Annotated[
        float,
        typer.Option(
            "--scale-tokens",
            help="Factor on all lengths, for models smaller than the trace's.",
            rich_help_panel=DRIVE,
        ),
    ] = 1.0,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=2.0, rich_help_panel=DRIVE)
    ] = 0.0,
    settle: Annotated[
        float,
        typer.Option(
            "--settle",
            min=0.0,
            help="Seconds at the end in which bits may come back.",
            rich_help_panel=DRIVE,
        ),
    ] = 2.0,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32 or bfloat16.", rich_help_panel=MEMORY)
    ] = "auto",
    threads: Annotated[
        int,
        typer.Option("--threads", min=0, help="CPU threads; 0: all cores.", rich_help_panel=MEMORY),
    ] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Arena for quantized experts and KV, such as 4GiB.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=2, help="Most tokens of prompt and answer.", rich_help_panel=MEMORY
        ),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(
            "--max-running", min=1, help="Most sequences at a time.", rich_help_panel=MEMORY
        ),
    ] = None,
    prefill_tokens: Annotated[
        int | None,
        typer.Option(
            "--prefill-tokens", min=1, help="Most prompt tokens in a step.", rich_help_panel=MEMORY
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            help="Planner (hull, greedy, uniform, uniform_remainder) or a width.",
            rich_help_panel=POLICY,
        ),
    ] = None,
    preemption: Annotated[
        str, typer.Option("--preemption", help="recompute or swap.", rich_help_panel=POLICY)
    ] = "recompute",
    prefix_store: Annotated[
        str,
        typer.Option(
            "--prefix-store",
            help="memory, none, a folder, or a store's socket.",
            rich_help_panel=POLICY,
        ),
    ] = "memory",
    prefix_memory: Annotated[str, typer.Option("--prefix-memory", rich_help_panel=POLICY)] = (
        "512MiB"
    ),
    prefix_ssd: Annotated[str, typer.Option("--prefix-ssd", rich_help_panel=POLICY)] = "0",
    decision_calls: Annotated[
        int,
        typer.Option(
            "--decision-calls",
            min=0,
            help="Policy calls kept in the decision log at most.",
            rich_help_panel=POLICY,
        ),
    ] = 5_000_000,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="Drive this server instead, http://HOST:PORT.", rich_help_panel=SERVER
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Model to ask for; none: its first.", rich_help_panel=SERVER),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            "--vocabulary",
            min=1,
            help="Prompts' token ids are below it; none: as a MODEL folder or the server says.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option("--api-key", envvar="SERVING_TWIN_API_KEY", rich_help_panel=SERVER),
    ] = "",
) -> None:
    """Drive the engine, or a running server, with a real trace.

    Arrivals, lengths, equal beginnings of prompts and think times are those of the trace; the run
    directory is that of `twin run`, and `twin replay` repeats its decisions.
    """
    from runtime.replay_question import replay_question
    from runtime.replay_requests import ReplayLimits
    from runtime.replay_work import ReplayOptions, trace_and_model
    from runtime.serve_settings import ServeOptions
    from traces.record import check_writable, next_run_path

    trace, model = trace_and_model(inputs or [])
    question = replay_question(trace, scenario, tuple(overrides or ()), seed)
    check_writable(out or next_run_path("results", "replay"))
    options = ReplayOptions(
        question=question,
        limits=ReplayLimits(
            max_requests=requests,
            scale_tokens=scale_tokens,
            context_tokens=context,
            rate_per_s=rate,
        ),
        speed=speed,
        concurrency=concurrency,
        temperature=temperature,
        settle_s=settle,
        plots=plots,
        engine=ServeOptions(
            model=model,
            scenario=scenario,
            overrides=tuple(overrides or ()) if scenario is not None else (),
            dtype=dtype,
            threads=threads,
            memory=memory,
            context=context,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
            precision=precision,
            preemption=preemption,
            prefix_store=prefix_store,
            prefix_memory=prefix_memory,
            prefix_ssd=prefix_ssd,
            decision_calls=decision_calls,
        ),
        url=url,
        name=name,
        vocabulary=vocabulary,
        api_key=api_key,
    )
    record, was_stopped = _run(options)
    target = _write(record, out, question_name=record.summary["workload"]["name"])
    if as_json:
        summary = {**record.summary, "run_directory": str(target)}
        sys.stdout.write(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    else:
        _print(record.summary, target)
    if was_stopped:
        raise typer.Exit(INTERRUPTED)
    row = record.summary["policies"][0]
    if row["refused"] and not row["served"]:
        _say(f"error: not one of {row['arrived']:,} requests was served; see {target}")
        raise typer.Exit(1)


def _run(options: ReplayOptions) -> tuple[RunRecord, bool]:
    from runtime.command_progress import bar
    from runtime.replay_stop import stopped_by_interrupt
    from runtime.replay_work import replay_engine, replay_server

    with bar("replaying", "requests", 1.0) as show, stopped_by_interrupt() as is_stopped:
        work = replay_engine if options.url is None else replay_server
        return work(options, is_stopped=is_stopped, show=show, say=_say)


def _write(record: RunRecord, out: Path | None, *, question_name: str) -> Path:
    from traces.record import write_numbered_run, write_run

    if out is None:
        return write_numbered_run("results", f"replay-{question_name}", record)
    write_run(out, record)
    return out


def _print(summary: Any, target: Path) -> None:
    from runtime.replay_report import make_console, print_replay

    console = make_console()
    print_replay(summary, console)
    what = "run.json, tables, decisions" if summary["decision_calls"] else "run.json, tables"
    console.print(f"\nwritten: {target}/ ({what})", markup=False, soft_wrap=True)
    if summary["decision_calls"]:
        console.print(f"check its decisions: twin replay {target}", markup=False, soft_wrap=True)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
