"""``twin trace``: look at traces, fetch public ones, convert and generate them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twin.trace_input import input_errors, read_file, read_options

if TYPE_CHECKING:
    from traces.request import Trace

trace_app = typer.Typer(
    name="trace",
    help="Look at request traces, fetch public ones, convert and generate them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FormatOption = Annotated[
    str, typer.Option("--format", help="Format of the file; auto tells it by the content.")
]
ColumnsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--columns",
        help="role=NAME for a file of no known format; roles: prompt, output, arrival, "
        "request_id, session, hash_ids. Repeat it, or separate by commas.",
    ),
]
TimeUnitOption = Annotated[
    str | None, typer.Option("--time-unit", help="Unit of numeric arrival times: s, ms, us, ns.")
]
SkipOption = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Leave bad rows out and say how many.")
]
BlockTokensOption = Annotated[
    int | None, typer.Option("--block-tokens", help="Tokens per prompt block of the file.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the random streams.", min=0)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@trace_app.command()
def stats(
    files: Annotated[list[Path], typer.Argument(help="Trace files.", show_default=False)],
    as_json: JsonOption = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for pictures and stats.json.")
    ] = None,
    format_name: FormatOption = "auto",
    columns: ColumnsOption = None,
    time_unit: TimeUnitOption = None,
    skip_bad_rows: SkipOption = False,
    block_tokens: BlockTokensOption = None,
) -> None:
    """Lengths, slot load, arrivals, burstiness, shared prefixes, sessions, latencies.

    JSON of one file is an object; of several, a list of objects.
    """
    from traces.statistics import trace_statistics
    from twin.report import make_console
    from twin.trace_report import print_statistics

    with input_errors():
        options = read_options(format_name, columns, time_unit, skip_bad_rows, block_tokens)
        folders = _picture_folders(files, out)
        reports = []
        for file, folder in zip(files, folders, strict=True):
            trace = read_file(file, options)
            found = trace_statistics(trace)
            if folder is not None:
                _write_pictures(trace, found.as_dict(), folder)
                sys.stderr.write(f"written: {folder}/\n")
            if not as_json:
                print_statistics(found, make_console())
            reports.append(found.as_dict())
        if as_json:
            _print_json(reports[0] if len(reports) == 1 else reports)


@trace_app.command()
def fetch(
    name: Annotated[str | None, typer.Argument(help="Name of the catalog.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what can be fetched.")] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache", help="Folder to keep it in. Default: ~/.cache/serving-twin/traces."
        ),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="Another server with the same paths.")
    ] = None,
    catalog: Annotated[
        Path | None, typer.Option("--catalog", help="Another catalog file (JSON).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Download a public trace from its own repository into the cache, checked by its sha256."""
    from dataclasses import asdict

    from twin.fetch import fetch as fetch_entry
    from twin.fetch_catalog import find_entry, load_catalog
    from twin.report import make_console
    from twin.trace_report import print_catalog

    with input_errors():
        known = load_catalog(catalog)
        if name is None or show_list:
            if as_json:
                _print_json([asdict(entry) for entry in known.values()])
            else:
                print_catalog(known.values(), make_console())
            return
        entry = find_entry(known, name)
        with _download_bar(entry.title) as on_progress:
            found = fetch_entry(entry, cache=cache, base_url=base_url, on_progress=on_progress)
        if as_json:
            _print_json({**asdict(entry), **asdict(found), "path": str(found.path)})
            return
        state = "already there" if found.was_cached else f"{entry.size_bytes:,} bytes"
        if found.resumed_from_bytes:
            state += f", of which {found.resumed_from_bytes:,} from an earlier try"
        if found.replaced_damaged:
            state += ", in place of a damaged file"
        sys.stdout.write(f"{found.path} ({state}, checksum right)\n")
        sys.stdout.write(
            f"licence {entry.licence}, by {entry.attribution}; cite: {entry.citation}\n"
        )


@trace_app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Trace file.", show_default=False)],
    target: Annotated[
        Path, typer.Argument(help="New file: .csv or .jsonl, each perhaps .gz.", show_default=False)
    ],
    format_name: FormatOption = "auto",
    columns: ColumnsOption = None,
    time_unit: TimeUnitOption = None,
    skip_bad_rows: SkipOption = False,
    block_tokens: BlockTokensOption = None,
) -> None:
    """Write a trace in plain columns: arrival_s, prompt_tokens, output_tokens and what there is."""
    from traces.writer import check_new, write_trace

    with input_errors():
        check_new(target)
        options = read_options(format_name, columns, time_unit, skip_bad_rows, block_tokens)
        trace = read_file(source, options)
        _say_written(trace, target, (*write_trace(trace, target), *_skipped(trace)))


@trace_app.command()
def generate(
    target: Annotated[
        Path, typer.Argument(help="New file: .csv or .jsonl, each perhaps .gz.", show_default=False)
    ],
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths",
            help="Length law: a bundled workload's name, or LAW:key=value,... with LAW one of "
            "fixed, two_point, uniform, geometric, lognormal, pareto.",
        ),
    ] = "azure-2023-conversation",
    arrivals: Annotated[
        str,
        typer.Option(
            "--arrivals",
            help="Arrivals: a bundled workload's name, or PROCESS:key=value,... with PROCESS one "
            "of poisson, gamma, on_off.",
        ),
    ] = "azure-2023-conversation",
    num_requests: Annotated[
        int, typer.Option("--num-requests", help="How many requests.", min=1, max=100_000_000)
    ] = 10_000,
    seed: SeedOption = 1,
) -> None:
    """Make a synthetic trace from a length law and an arrival process.

    Example: twin trace generate t.csv --lengths geometric:prompt_tokens=100,mean_output_tokens=500
    --arrivals gamma:rate_per_s=5,cv=2
    """
    from traces.writer import check_new, write_trace
    from twin.trace_generation import generate_trace

    with input_errors():
        check_new(target)
        trace = generate_trace(lengths, arrivals, num_requests=num_requests, seed=seed)
        _say_written(trace, target, write_trace(trace, target))


@trace_app.command()
def servegen(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of chunk-N-trace.csv and chunk-N-dataset.json, or of their tar archives.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path, typer.Argument(help="New file: .csv or .jsonl, each perhaps .gz.", show_default=False)
    ],
    start_s: Annotated[float, typer.Option("--start-s", help="Begin, on the files' clock.")] = 0.0,
    duration_s: Annotated[float, typer.Option("--duration-s", help="Length of the span.")] = 3600.0,
    rate_scale: Annotated[float, typer.Option("--rate-scale", help="Factor on the rate.")] = 1.0,
    clients: Annotated[
        list[int] | None, typer.Option("--client", help="Take this client only; repeatable.")
    ] = None,
    seed: SeedOption = 1,
) -> None:
    """Draw a trace from ServeGen client statistics, client by client."""
    from traces.writer import check_new, write_trace
    from twin.trace_generation import servegen_trace

    with input_errors():
        check_new(target)
        trace = servegen_trace(
            source,
            seed=seed,
            start_s=start_s,
            duration_s=duration_s,
            rate_scale=rate_scale,
            clients=clients,
        )
        lost = (*write_trace(trace, target), *_skipped(trace), *trace.notes)
        _say_written(trace, target, lost)


def _skipped(trace: Trace) -> tuple[str, ...]:
    return tuple(f"left out: {number:,} rows, {rule}" for rule, number in trace.skipped.items())


def _picture_folders(files: list[Path], out: Path | None) -> list[Path | None]:
    """One folder for each file: ``out`` itself for one, a folder by name in it for several."""
    from traces.errors import TraceError

    if out is None:
        return [None] * len(files)
    if out.exists() and not out.is_dir():
        raise TraceError(f"{out}: --out must be a folder, found a file")
    if len(files) == 1:
        folders = [out]
    else:
        names: list[str] = []
        for file in files:
            stem = file.name.split(".")[0]
            names.append(stem if stem not in names else f"{stem}-{len(names) + 1}")
        folders = [out / name for name in names]
    for folder in folders:
        _require_no_pictures(folder)
    return list(folders)


def _require_no_pictures(folder: Path) -> None:
    from traces.errors import TraceError
    from twin.trace_plots import PICTURES

    for name in (*PICTURES, "stats.json"):
        if os.path.lexists(folder / name):
            raise TraceError(
                f"{folder / name}: exists already; choose another --out folder or remove it"
            )


def _write_pictures(trace: Trace, statistics: Mapping[str, object], folder: Path) -> None:
    from traces.errors import TraceError
    from traces.whole_file import write_flushed
    from twin.trace_plots import draw_trace

    pictures = draw_trace(trace)
    pictures["stats.json"] = (json.dumps(statistics, indent=2, allow_nan=False) + "\n").encode()
    partials = {name: folder / f".{name}.partial-{os.getpid()}" for name in pictures}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in pictures.items():
            write_flushed(partials[name], content)
        for name, partial in partials.items():
            partial.replace(folder / name)
    except OSError as error:
        raise TraceError(f"{folder}: cannot be written ({error.strerror or error})") from error
    finally:
        for partial in partials.values():
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def _say_written(trace: Trace, target: Path, remarks: tuple[str, ...]) -> None:
    sys.stdout.write(f"written: {target} ({len(trace):,} requests)\n")
    for remark in remarks:
        sys.stdout.write(f"- {remark}\n")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def _download_bar(title: str) -> Iterator[Any]:
    """``on_progress(done, size)``; draws nothing unless standard error is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(title[:40], total=None)

        def on_progress(done: int, size: int) -> None:
            bar.update(task, completed=done, total=size)

        yield on_progress
