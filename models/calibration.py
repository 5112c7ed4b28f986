"""Latency coefficients of a device and model: where they came from, how well they fit, the file.

A calibration is a JSON file, read strictly. The paper's own values are a named entry.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from models.bundle import CommunicationForm, LatencyCoefficients
from models.calibration_file import Calibration, parse_calibration, write_calibration
from models.measurements import (
    QUANTITY_BY_STAGE,
    CalibrationError,
    read_measurements,
    require_readable,
)
from models.stage_fit import StageFit, fit_stage
from traces.whole_file import write_whole

__all__ = [
    "NAMED",
    "Calibration",
    "CalibrationError",
    "StageFit",
    "fit_attention_ffn",
    "load_calibration",
    "outside_range",
    "save_calibration",
]

NAMED = ("deepseek-v3-ascend-910c",)

_ENTRIES = Path(__file__).parent / "calibrations"


def load_calibration(name_or_path: str | Path) -> Calibration:
    """A named entry, or a file.

    Raises:
        CalibrationError: If there is no such entry or file, or it is not a valid calibration;
            names file and field.
    """
    path = _ENTRIES / f"{name_or_path}.json" if name_or_path in NAMED else Path(name_or_path)
    require_readable(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not a text file ({error.reason})") from error
    except OSError as error:
        known = ", ".join(NAMED)
        raise CalibrationError(f"{path}: {error.strerror} (named entries: {known})") from error
    return parse_calibration(path, text)


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a new file under a temporary name, flush it, and put it in place.

    Raises:
        CalibrationError: If there is something of that name, or it cannot be written there.
    """
    path = Path(path)
    if os.path.lexists(path):
        raise CalibrationError(f"{path}: exists already; choose another name or remove it")
    try:
        write_whole(path, write_calibration(calibration).encode())
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from error


def fit_attention_ffn(
    path: str | Path,
    *,
    name: str = "",
    device: str = "",
    model: str = "",
    num_layers: int = 1,
    communication: CommunicationForm = "worker",
) -> Calibration:
    """Coefficients by least squares per stage from measured (stage, tokens, batch, time) rows.

    Args:
        path: CSV file as ``models.measurements.read_measurements`` describes it; times per layer.
        name: Name of the calibration; the file's without its ending where empty.
        device: What was measured.
        model: Model whose layer was measured.
        num_layers: Layers of the model.
        communication: Whether a transfer's batch is that of one worker or of the bundle.

    Raises:
        CalibrationError: If the file is bad, attention or FFN rows are missing, or a stage has
            fewer than three distinct loads.
    """
    path = Path(path)
    measured, unused = read_measurements(path)
    for stage in ("attention", "ffn"):
        if stage not in measured:
            raise CalibrationError(f"{path}: no {stage} rows; attention and ffn are both needed")
    fits = {}
    for stage, rows in measured.items():
        try:
            fits[stage] = fit_stage(rows.load, rows.seconds, rows.quantity)
        except ValueError as error:
            raise CalibrationError(f"{path}: stage {stage}: {error}") from error
    notes = []
    if "communication" not in fits:
        notes.append("No communication rows were measured: transfers take no time.")
    if unused:
        notes.append(f"Columns not used: {', '.join(unused)}.")
    return Calibration(
        name=name or path.stem,
        coefficients=_coefficients(fits, communication),
        num_layers=num_layers,
        device=device,
        model=model,
        source=f"least squares on {path.name}",
        fits=fits,
        notes=tuple(notes),
    )


def outside_range(calibration: Calibration, stage: str, values: ArrayLike) -> float | None:
    """Share of ``values`` outside the loads that were measured for a stage.

    Args:
        calibration: Where the ranges are.
        stage: ``attention`` (KV tokens of a worker), ``ffn`` or ``communication`` (batch).
        values: [n] loads of a run.

    Returns:
        0.0 for no values; None where no measured range is known.
    """
    if stage not in QUANTITY_BY_STAGE:
        raise ValueError(f"stage must be one of {', '.join(QUANTITY_BY_STAGE)}, found {stage!r}")
    fit = calibration.fits.get(stage)
    if fit is None:
        return None
    load = np.asarray(values, dtype=np.float64)
    if load.size == 0:
        return 0.0
    return float(np.mean((load < fit.min_load) | (load > fit.max_load)))


def _coefficients(
    fits: Mapping[str, StageFit], communication: CommunicationForm
) -> LatencyCoefficients:
    transfer = fits.get("communication")
    return LatencyCoefficients(
        alpha_attention=fits["attention"].slope_s,
        beta_attention=fits["attention"].intercept_s,
        alpha_ffn=fits["ffn"].slope_s,
        beta_ffn=fits["ffn"].intercept_s,
        alpha_communication=0.0 if transfer is None else transfer.slope_s,
        beta_communication=0.0 if transfer is None else transfer.intercept_s,
        communication=communication,
    )
