"""``runtime bench``: offline throughput of the engine in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def bench(
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder of a checkpoint, plain or quantized; none: the demo model."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Of a prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="Of an answer.")] = 64,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", help="Requests of one measurement.")
    ] = 64,
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at a time: one number or several.")
    ] = "1,8",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Rounds; medians are reported.")
    ] = 3,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the prompts.")] = 1,
    scenario: Annotated[
        Path | None, typer.Option("--scenario", help="Scenario file: memory, precision, limits.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change the scenario; repeatable."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="CPU threads; 0: all cores.")
    ] = 0,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Arena for quantized experts and KV.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Planner, or one width such as 4.")
    ] = None,
    prefill_tokens: Annotated[
        int | None,
        typer.Option("--prefill-tokens", min=1, help="Most prompt tokens in a step."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
) -> None:
    """Tokens per second of wall clock and of CPU time, prefill and decoding apart.

    Prompts are random and new in every round; no prefix is kept, answers have all their tokens.
    """
    from runtime.bench_throughput import BenchLoad, concurrencies, measure
    from runtime.command_progress import bar
    from runtime.engine.build import build_engine
    from runtime.engine.core import EngineCore
    from runtime.replay_record import ENGINE_PACKAGES, engine_deployment
    from runtime.serve_settings import ServeOptions, engine_settings
    from traces.environment import commit, versions

    loads = [
        BenchLoad(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            num_prompts=num_prompts,
            concurrency=at_a_time,
        )
        for at_a_time in concurrencies(concurrency)
    ]
    settings = engine_settings(
        ServeOptions(
            model=model,
            scenario=scenario,
            overrides=tuple(overrides or ()),
            dtype=dtype,
            threads=threads,
            memory=memory,
            precision=precision,
            prefill_tokens=prefill_tokens,
            max_running=max(64, *(load.concurrency for load in loads)),
            prefix_store="none",
            decision_calls=0,
        ),
        say=_say,
    )
    _say(f"loading {settings.model}")
    parts = build_engine(settings)
    try:
        core = EngineCore(parts)
        rows = []
        with bar("measuring", "rounds", 1.0) as show:
            for at, load in enumerate(loads):
                before, total = at * repeats, len(loads) * repeats
                rows.append(
                    measure(
                        core,
                        load,
                        repeats=repeats,
                        seed=seed,
                        show=lambda done, _, before=before, total=total: show(  # type: ignore[misc]
                            before + done, total
                        ),
                    )
                )
        result: dict[str, Any] = {
            "kind": "runtime-bench",
            "versions": versions(ENGINE_PACKAGES),
            "commit": commit(),
            "seed": seed,
            "deployment": engine_deployment(parts),
            "loads": rows,
        }
    finally:
        parts.close()
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
    else:
        _print(result["deployment"]["text"], rows)


def _print(engine: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.text import Text

    from runtime.replay_report import make_console, new_table

    console = make_console()
    first = rows[0]
    table = new_table(
        f"Median of {first['repeats']}: {first['num_prompts']} prompts of "
        f"{first['prompt_tokens']} tokens, {first['output_tokens']} tokens each",
        not console.is_terminal,
        "at a time",
        "prefill/s",
        "decode/s",
        "output/s",
        "prefill/CPU s",
        "decode/CPU s",
        "output/CPU s",
    )
    for row in rows:
        cells = [
            f"{row[f'{what}_tokens_per_{unit}']['median']:,.4g}"
            for unit in ("wall_s", "cpu_s")
            for what in ("prefill", "decode", "output")
        ]
        table.add_row(str(row["concurrency"]), *cells)
    console.print()
    console.print(Text(engine))
    console.print(table)
    console.print("tokens per second of wall clock, and per second of CPU time")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
