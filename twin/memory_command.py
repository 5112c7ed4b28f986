"""``twin memory``: what fewer bits per expert weight free for the KV cache."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Tables(StrEnum):
    """Which tables of values are resident."""

    ACTIVE = "active"
    ALL = "all"


class Entry(StrEnum):
    """What an entry of a table is."""

    FP16 = "fp16"
    INT8 = "int8"


def memory(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models of the catalog, config.json files, or folders with one. "
            "Default: the three of the PagedWeight paper.",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        str, typer.Option("--bits", help="Average bits per expert weight, 2..8, by commas.")
    ] = "2,3,4,6,8",
    page_bytes: Annotated[
        int, typer.Option("--page-bytes", help="Bytes of a page, a power of two.")
    ] = 32 * 1024,
    tables: Annotated[
        Tables, typer.Option("--tables", help="Resident tables: of the width in use, or of all.")
    ] = Tables.ACTIVE,
    entry: Annotated[Entry, typer.Option("--entry", help="Entry of a table.")] = Entry.FP16,
    saving: Annotated[
        float, typer.Option("--saving", help="Saving whose width is asked for, in percent.")
    ] = 72.0,
    budget: Annotated[
        float | None,
        typer.Option("--budget", help="Memory for weights and KV cache, in GB (10^9 bytes)."),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences",
            help="Equally long sequences that share what --budget leaves. Default: 1.",
            show_default=False,
        ),
    ] = None,
    kv_bytes: Annotated[int, typer.Option("--kv-bytes", help="Bytes per cached number.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Picture to write (PNG).")] = None,
) -> None:
    """Bytes of weights at fewer bits per expert weight, and the KV cache they make room for."""
    from models.llm_catalog import PAGEDWEIGHT_MODELS, load_llm
    from models.memory_report import MemoryQuestion, memory_report, parse_bits
    from models.weight_memory import BlockStorage, WeightMemoryError
    from twin.memory_summary import summarize

    if plot is not None and plot.suffix.lower() != ".png":
        raise WeightMemoryError(f"--plot: must end in .png, found {plot.name}")
    if plot is not None and not plot.parent.is_dir():
        raise WeightMemoryError(f"--plot: there is no folder {plot.parent}")
    if sequences is not None and budget is None:
        raise WeightMemoryError("--sequences: share what --budget leaves, and it is not given")
    question = MemoryQuestion(
        bits=parse_bits(bits),
        storage=BlockStorage(tables=tables.value, entry=entry.value, page_bytes=page_bytes),
        saving=saving / 100.0,
        budget_bytes=None if budget is None else _bytes_of(budget),
        num_sequences=1 if sequences is None else sequences,
        kv_value_bytes=kv_bytes,
    )
    shapes = [load_llm(model) for model in models or PAGEDWEIGHT_MODELS]
    summaries = [summarize(memory_report(shape, question), question) for shape in shapes]
    if as_json:
        sys.stdout.write(json.dumps(summaries, indent=2, allow_nan=False) + "\n")
    else:
        from twin.memory_tables import print_memory
        from twin.report import make_console

        print_memory(summaries, make_console())
    if plot is not None:
        from traces.whole_file import write_whole
        from twin.memory_plots import draw_memory

        write_whole(plot, draw_memory(summaries))
        sys.stderr.write(f"written: {plot}\n")


def _bytes_of(gigabytes: float) -> int:
    from models.weight_memory import WeightMemoryError

    if not 0.0 < gigabytes <= 1e9:
        raise WeightMemoryError(f"--budget: must be within 0..1e9 GB, found {gigabytes:g}")
    return round(gigabytes * 1e9)
