"""``runtime calibrate``: run text through a checkpoint, keep what damage depends on."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Weighting(StrEnum):
    """How a token counts."""

    GRADIENT = "gradient"
    GATE = "gate"


class ModelDtype(StrEnum):
    """In which numbers the model runs."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def calibrate(
    source: Annotated[
        Path, typer.Argument(help="Hugging Face checkpoint: a folder with its tokenizer.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder of the statistics.")],
    texts: Annotated[
        list[Path], typer.Option("--text", help="Text file (UTF-8). May be repeated.")
    ],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to run.")] = 65_536,
    sequence_tokens: Annotated[
        int, typer.Option("--sequence-tokens", min=2, help="Tokens of a sequence.")
    ] = 512,
    weighting: Annotated[
        Weighting,
        typer.Option("--weighting", help="A token counts by its loss gradient or its gate."),
    ] = Weighting.GRADIENT,
    dtype: Annotated[
        ModelDtype, typer.Option("--dtype", help="Numbers the model runs in.")
    ] = ModelDtype.FLOAT32,
    memory_bytes: Annotated[
        int, typer.Option("--memory-bytes", min=1, help="Memory for accumulators.")
    ] = 8 << 30,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=(1 << 63) - 1, help="Chooses the sequences.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take up an unfinished run; keep its whole layers.")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier run, once the new one is complete."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a line.")] = False,
) -> None:
    """Measure on text what every expert matrix's quantization damage depends on.

    Layers that a run that was cut off has written are kept with --resume.
    """
    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other")
    from runtime.calibration import (
        CalibrationError,
        CalibrationSettings,
        calibrate_checkpoint,
    )
    from runtime.command_progress import phases

    try:
        settings = CalibrationSettings(
            tokens=tokens,
            sequence_tokens=sequence_tokens,
            weighting=weighting.value,
            memory_bytes=memory_bytes,
            seed=seed,
        )
    except CalibrationError:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    began = time.perf_counter()
    with phases() as phase:
        stats = calibrate_checkpoint(
            source,
            texts,
            output,
            settings,
            dtype=dtype.value,
            existing="resume" if resume else "overwrite" if overwrite else "refuse",
            on_read=phase("checking", "MB", 1e6),
            progress=phase("calibrating", "k tokens", 1e3),
        )
    thin = stats.thin_experts()
    result = {
        "output": str(output),
        "layers": stats.layers,
        "experts": stats.experts,
        "tokens": stats.index["tokens"],
        "seconds": time.perf_counter() - began,
        "thin_experts": thin,
        "settings": dataclasses.asdict(settings),
    }
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    sys.stdout.write(
        f"{output}: {stats.layers} layers of {stats.experts} experts on"
        f" {result['tokens']} tokens in {result['seconds']:.1f} s;"
        f" {_thin_text(len(thin))}\n"
    )


def _thin_text(count: int) -> str:
    if count == 1:
        return "1 expert saw too few tokens and leans on its layer's mean"
    return f"{count} experts saw too few tokens and lean on their layer's mean"
