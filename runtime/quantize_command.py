"""``runtime quantize``: a checkpoint's experts as bit planes and tables."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from runtime.quantized_manifest import Manifest


def quantize(
    source: Annotated[
        Path, typer.Argument(help="Hugging Face checkpoint: a folder with safetensors shards.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    parent_bits: Annotated[
        int, typer.Option("--parent-bits", min=1, max=8, help="Bits of a code, the widest width.")
    ] = 8,
    seed_bits: Annotated[
        int, typer.Option("--seed-bits", min=1, max=8, help="Width that is clustered exactly.")
    ] = 3,
    min_bits: Annotated[int, typer.Option("--min-bits", min=1, max=8, help="Narrowest width.")] = 2,
    keep_gain: Annotated[
        bool,
        typer.Option(
            "--keep-gain/--plain-centroids",
            help="Scale every row's tables so that its output does not shrink, or leave them.",
        ),
    ] = True,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", help="Statistics of runtime calibrate; without them, squared error."
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Threads; 0 for one per core.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take up an unfinished run; keep its whole files.")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier run, once the new one is complete."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Quantize the experts of a checkpoint to bit planes that every width shares.

    Everything else is copied bit for bit. A run that was cut off is taken up with --resume.
    """
    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other")
    from runtime.command_progress import phases
    from runtime.quantize import QuantizeSettings, quantize_checkpoint
    from runtime.quantize_settings import SettingsError

    try:
        settings = QuantizeSettings(
            parent_bits=parent_bits, seed_bits=seed_bits, min_bits=min_bits, keep_gain=keep_gain
        )
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    began = time.perf_counter()
    with phases() as phase:
        watch = _Watch(phase("quantizing", "M weights", 1e6))
        manifest = quantize_checkpoint(
            source,
            output,
            settings,
            calibration=calibration,
            existing="resume" if resume else "overwrite" if overwrite else "refuse",
            threads=threads or len(os.sched_getaffinity(0)),
            progress=watch,
            on_read=phase("checking", "MB", 1e6),
        )
    result = _result(output, manifest, watch, time.perf_counter() - began)
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        sys.stdout.write(_text(result))


class _Watch:
    """Counts weights for the bar and the result; off the terminal, tells of every file."""

    def __init__(self, show: Callable[[float, float], None]) -> None:
        self._show = show
        self.total = 0
        self.kept = 0
        self.done = 0
        self.kept_files = 0

    def on_start(self, weights: int, kept_weights: int, kept_files: int) -> None:
        self.total, self.kept, self.done = weights, kept_weights, kept_weights
        self.kept_files = kept_files
        self._show(self.done, self.total)

    def on_weights(self, weights: int) -> None:
        self.done += weights
        self._show(self.done, self.total)

    def on_file(self, name: str) -> None:
        if not sys.stderr.isatty():
            share = self.done / self.total
            sys.stderr.write(f"{name} written, {share:.1%} of the expert weights done\n")


def _result(output: Path, manifest: Manifest, watch: _Watch, seconds: float) -> dict[str, Any]:
    from runtime.inspect_sizes import checkpoint_sizes

    fresh = watch.done - watch.kept
    return {
        "output": str(output),
        "was_finished": watch.total == 0,
        "weights": watch.total,
        "kept_weights": watch.kept,
        "kept_files": watch.kept_files,
        "seconds": seconds,
        "weights_per_s": fresh / seconds,
        "damage_kind": manifest.damage_kind,
        "sizes": checkpoint_sizes(manifest),
    }


def _text(result: dict[str, Any]) -> str:
    from runtime.inspect_tables import render, size_table

    if result["was_finished"]:
        return f"{result['output']} was finished already\n"
    kept = ""
    if result["kept_files"]:
        kept = f", {result['kept_weights'] / 1e6:.1f} M kept from {result['kept_files']} files"
    line = (
        f"{result['output']}: {result['weights'] / 1e6:.1f} M expert weights in"
        f" {result['seconds']:.1f} s ({result['weights_per_s'] / 1e6:.2f} M/s){kept};"
        f" damage: {result['damage_kind'].replace('_', ' ')}\n"
    )
    return line + render(size_table(result["sizes"]))
