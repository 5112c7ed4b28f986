"""``twin cache``: hit rates of prefix caches by eviction policy and size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twin.trace_commands import BlockTokensOption, ColumnsOption, FormatOption, TimeUnitOption

if TYPE_CHECKING:
    from twin.cache_workload import CacheWorkload


GENERATOR_LACKS = {
    "block_tokens": None,
    "format": "auto",
    "columns": None,
    "time_unit": None,
    "skip_bad_rows": False,
}
"""Option that only a file has -> its value when it is not given."""


def cache(
    trace: Annotated[
        str,
        typer.Argument(
            help="Trace file that names its prompt blocks, or a generator: docqa, chat, agent, "
            "mixed.",
            show_default=False,
        ),
    ],
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Eviction policy; repeat it. Default: all of them."),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            help="Cache size: 2% of the different blocks, 10000 blocks, or 64GiB; repeat it. "
            "Default: 1, 2, 5, 10, 20, 50 and 100 %.",
        ),
    ] = None,
    bound: Annotated[
        bool, typer.Option(help="Belady's bound, which knows the future, beside the policies.")
    ] = True,
    model: Annotated[
        str,
        typer.Option("--model", help="Model of the catalog, or a config.json: bytes and costs."),
    ] = "Llama-3.1-8B",
    device: Annotated[str, typer.Option("--device", help="Device that computes prefills.")] = (
        "A100-80"
    ),
    mfu: Annotated[
        float, typer.Option("--mfu", help="Share of the device's peak that prefill reaches.")
    ] = 0.5,
    bytes_per_token: Annotated[
        int | None,
        typer.Option(
            "--bytes-per-token", help="Bytes of keys and values a token, in the model's place."
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Take the first so many requests.", min=1)
    ] = None,
    partial_blocks: Annotated[
        bool,
        typer.Option(
            "--partial-blocks",
            help="A prompt's part-full last block can be hit too, as twin trace stats counts. "
            "Stores keep full blocks only.",
        ),
    ] = False,
    categories: Annotated[
        bool,
        typer.Option(
            "--categories",
            help="Tell policies the kind of traffic of each request (generators know it).",
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random streams.", min=0)] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory to write. Default: results/NAME-cache-NNN."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes. Default: all cores.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw the pictures.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    format_name: FormatOption = "auto",
    columns: ColumnsOption = None,
    time_unit: TimeUnitOption = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave bad rows out and say how many.")
    ] = False,
    block_tokens: BlockTokensOption = None,
) -> None:
    """Hit rates of prefix caches: every eviction policy at every size, and the bound above them.

    Example: twin cache docqa --policy lru --policy tree_hd --size 5% --size 64GiB
    """
    from traces.record import (
        check_writable,
        next_run_path,
        write_numbered_run,
        write_run,
    )
    from twin.cache_curves import CacheQuestion, run_curves
    from twin.cache_files import cache_record
    from twin.cache_sizes import DEFAULT_SIZES
    from twin.progress import progress_bar
    from twin.trace_input import read_options

    question = CacheQuestion(
        policies=tuple(policies or ()),
        sizes=tuple(sizes or DEFAULT_SIZES),
        with_bound=bound,
        model=model,
        device=device,
        mfu=mfu,
        token_bytes=bytes_per_token,
        jobs=jobs,
    )
    question.check()
    check_writable(out or next_run_path("results", "cache"))
    try:
        workload = _workload(
            trace,
            read_options(format_name, columns, time_unit, skip_bad_rows, block_tokens),
            seed=seed,
            num_requests=requests,
            counts_partial=partial_blocks,
            tells_category=categories,
        )
        with progress_bar() as on_progress:
            summary = run_curves(question, workload, on_progress=on_progress)
        record = cache_record(summary, plots=plots)
        if out is None:
            target = write_numbered_run("results", f"{workload.name}-cache", record)
        else:
            target = out
            write_run(target, record)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was written\n")
        sys.exit(130)
    if as_json:
        answer = {**summary, "run_directory": str(target)}
        sys.stdout.write(json.dumps(answer, indent=2, allow_nan=False) + "\n")
        return
    from twin.cache_tables import print_cache
    from twin.report import make_console

    console = make_console()
    print_cache(summary, console)
    console.print(
        f"written: {target}/ (run.json, curves.csv{', plots' if plots else ''})",
        markup=False,
        soft_wrap=True,
    )


def _workload(
    name: str,
    options: dict[str, Any],
    *,
    seed: int,
    num_requests: int | None,
    counts_partial: bool,
    tells_category: bool,
) -> CacheWorkload:
    """The generator of that name, else the file."""
    from models.strict_tables import ScenarioError
    from twin.cache_workload import generated_workload, is_generator, traced_workload
    from twin.trace_input import read_file

    if is_generator(name):
        for option, unset in GENERATOR_LACKS.items():
            if options[option] != unset:
                raise ScenarioError(
                    f"--{option.replace('_', '-')}: is for a file; the generator {name} has "
                    f"blocks and rows of its own (./{name} is a file of that name)"
                )
        return generated_workload(
            name, seed=seed, num_requests=num_requests, tells_category=tells_category
        )
    return traced_workload(
        read_file(Path(name), options),
        seed=seed,
        num_requests=num_requests,
        counts_partial=counts_partial,
    )
