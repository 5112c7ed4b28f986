"""``runtime inspect``: what a quantized checkpoint holds, and whether it is whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


class PlotPathError(ValueError):
    """A picture cannot be written there; says why."""


def inspect(
    folder: Annotated[Path, typer.Argument(help="Quantized checkpoint, from runtime quantize.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Picture to write (PNG).")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all files and compare their checksums.")
    ] = False,
) -> None:
    """Show sizes at every width, damage curves and origin of a quantized checkpoint."""
    from runtime.command_progress import bar
    from runtime.inspect_report import inspect_report
    from runtime.quantized_checkpoint import QuantizedCheckpoint
    from traces.whole_file import write_whole

    if plot is not None:
        _require_plot_path(plot)
    checkpoint = QuantizedCheckpoint.open(folder)
    if verify:
        total = sum(record.num_bytes for record in checkpoint.manifest.files.values())
        done = 0
        with bar("verifying", "MB", 1e6) as show:

            def on_bytes(num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                show(done, total)

            checkpoint.verify(on_bytes)
    report = inspect_report(checkpoint, verified=verify)
    if plot is not None:
        from runtime.inspect_plot import draw_checkpoint

        try:
            write_whole(plot, draw_checkpoint(checkpoint))
        except OSError as error:
            raise PlotPathError(f"--plot: {plot}: {error.strerror}") from None
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    from runtime.inspect_tables import damage_table, facts_table, render, size_table

    sys.stdout.write(render(facts_table(report), size_table(report["sizes"]), damage_table(report)))


def _require_plot_path(plot: Path) -> None:
    if plot.suffix.lower() != ".png":
        raise PlotPathError(f"--plot: must end in .png, found {plot.name}")
    if not plot.parent.is_dir():
        raise PlotPathError(f"--plot: there is no folder {plot.parent}")
    if plot.is_dir():
        raise PlotPathError(f"--plot: {plot} is a folder")
