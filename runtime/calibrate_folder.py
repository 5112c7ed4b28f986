"""The folder of calibration statistics: what may lie there and how it is replaced.

As with quantized checkpoints: ``calibration.json`` comes last, a finished result is replaced only
by a finished one, and nothing of somebody else's is touched.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from runtime.calibration_stats import INDEX, CalibrationError, layer_file, layer_fingerprint
from runtime.quantize_folder import Existing, OutputError, State, names_in

STAGING = "calibration-new"
_LAYER_FILE = re.compile(r"layer_\d{3,}\.safetensors")


def statistics_state(folder: Path) -> State:
    """What lies in a folder: nothing, unfinished statistics, or finished ones.

    Raises:
        OutputError: If it holds anything else, or cannot be looked into.
    """
    names = names_in(folder)
    if INDEX in names:
        return "finished"
    if names - {STAGING} and not all(_LAYER_FILE.fullmatch(name) for name in names - {STAGING}):
        raise OutputError(f"{folder}: not empty, and what it holds was not written by calibrate")
    return "unfinished" if names else "empty"


def usable_state(folder: Path, existing: Existing) -> State:
    """The state of a folder in which a run may go on.

    Raises:
        OutputError: If it may not.
    """
    state = statistics_state(folder)
    if existing == "refuse" and state != "empty":
        raise OutputError(
            f"{folder}: holds {state} statistics; take them up with --resume or replace them with"
            " --overwrite"
        )
    return state


def prepare(folder: Path, state: State, existing: Existing, fingerprint: str) -> Path:
    """Make room for a run; the folder to write layers into.

    Args:
        folder: The folder of the result.
        state: What lies there.
        existing: What to do about it; ``resume`` keeps layers of the same fingerprint.
        fingerprint: Of this run.

    Raises:
        OutputError: If unfinished statistics are of another run and ``existing`` is ``resume``.
        OSError: If the disk refuses.
    """
    place = folder / STAGING if state == "finished" else folder
    place.mkdir(exist_ok=True)
    for path in place.glob("layer_*.safetensors"):
        mark = layer_fingerprint(path)
        if existing == "resume" and mark not in (None, fingerprint):
            raise OutputError(
                f"{path}: of another model, text or settings; start again with --overwrite"
            )
        if mark != fingerprint or existing == "overwrite":
            path.unlink()
    if place == folder:
        shutil.rmtree(folder / STAGING, ignore_errors=True)
    return place


def is_complete(folder: Path) -> bool:
    """Whether a result that is to replace another one waits to be moved up."""
    return (folder / STAGING / INDEX).exists()


def move_up(folder: Path) -> None:
    """Put the complete statistics in ``STAGING`` in the place of the old ones.

    Cut off in between, the folder holds unfinished statistics and the same call finishes them.

    Raises:
        CalibrationError: If the new index cannot be read.
        OSError: If the disk refuses.
    """
    new = folder / STAGING
    try:
        count = int(json.loads((new / INDEX).read_text("utf-8"))["layers"])
    except (ValueError, KeyError, TypeError):
        raise CalibrationError(f"{new / INDEX}: cannot be read") from None
    wanted = [layer_file(layer) for layer in range(count)]
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.glob("layer_*.safetensors"):
        if _LAYER_FILE.fullmatch(path.name) and path.name not in wanted:
            path.unlink()
    for name in wanted:
        if (new / name).exists():
            (new / name).replace(folder / name)
    (new / INDEX).replace(folder / INDEX)
    shutil.rmtree(new)


def drop_empty_staging(folder: Path) -> None:
    """Remove a replacement of which no layer is done."""
    if not any((folder / STAGING).glob("layer_*.safetensors")):
        shutil.rmtree(folder / STAGING, ignore_errors=True)
