"""The calibration file: one JSON object, read strictly, written in full."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from models.bundle import LatencyCoefficients
from models.engine_profile import EngineProfile, profile_content
from models.measurements import QUANTITY_BY_STAGE, CalibrationError
from models.stage_fit import StageFit
from models.strict_tables import build_table, require_shallow

FormatName = Literal["serving-twin calibration"]
FormatVersion = Literal[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Coefficients with their origin.

    Attributes:
        name: What reports call it.
        coefficients: Seconds per layer.
        num_layers: Layers of the model, >= 1.
        device: What was measured.
        model: Model whose layer was measured.
        source: Where the numbers came from.
        fits: Stage -> quality of its fit and measured range; empty where neither is known.
        notes: Facts a user should know.
        engine: What ``runtime profile`` measured besides; None for other calibrations.
    """

    name: str
    coefficients: LatencyCoefficients
    num_layers: int
    device: str
    model: str
    source: str
    fits: Mapping[str, StageFit] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    engine: EngineProfile | None = None

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be >= 1, found {self.num_layers!r}")
        unknown = sorted(set(self.fits) - set(QUANTITY_BY_STAGE))
        if unknown:
            raise ValueError(
                f"fits: unknown stage {unknown[0]!r}; known: {', '.join(QUANTITY_BY_STAGE)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    quantity: Literal["tokens", "batch"]
    min: float
    max: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.min <= self.max:
            raise ValueError(f"range must satisfy 0 <= min <= max, found {self.min}, {self.max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    points: int
    residual_std_s: float
    max_relative_error: float
    r2: float
    slope_s: float
    intercept_s: float
    range: _Range
    slope_se_s: float | None = None
    intercept_se_s: float | None = None
    warning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    format: FormatName
    version: FormatVersion
    name: str
    device: str
    model: str
    num_layers: int
    unit: Literal["s"]
    coefficients: LatencyCoefficients
    fits: Mapping[str, _Fit]
    source: str
    notes: Sequence[str]
    engine: EngineProfile | None = None
    content_hash: str | None = None


def parse_calibration(path: Path, text: str) -> Calibration:
    """The calibration in the text of a file.

    Raises:
        CalibrationError: Naming file and field, what was found and what is allowed.
    """
    try:
        content = json.loads(text, object_pairs_hook=_object, parse_constant=_not_a_number)
    except RecursionError:
        raise CalibrationError(f"{path}: lists or objects are nested too deep") from None
    except json.JSONDecodeError as error:
        raise CalibrationError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise CalibrationError(f"{path}: {error}") from error
    try:
        require_shallow(content)
        file: _File = build_table(_File, content, "calibration")
        if file.content_hash is not None and file.content_hash != content_hash(content):
            raise CalibrationError(
                "content_hash: is that of other content; the file has been changed since it was "
                f"written (take the key out to use it as it is), found {file.content_hash!r}"
            )
        file.coefficients.require_plausible_seconds()
        return Calibration(
            name=file.name,
            coefficients=file.coefficients,
            num_layers=file.num_layers,
            device=file.device,
            model=file.model,
            source=file.source,
            fits={stage: _stage_fit(fit) for stage, fit in file.fits.items()},
            notes=tuple(file.notes),
            engine=file.engine,
        )
    except ValueError as error:
        raise CalibrationError(f"{path}: {error}") from error


def write_calibration(calibration: Calibration) -> str:
    """The text of the file; what is not known is left out."""
    content: dict[str, Any] = {
        "format": get_args(FormatName)[0],
        "version": get_args(FormatVersion)[0],
        "name": calibration.name,
        "device": calibration.device,
        "model": calibration.model,
        "num_layers": calibration.num_layers,
        "unit": "s",
        "coefficients": dataclasses.asdict(calibration.coefficients),
        "fits": {stage: _fit_content(fit) for stage, fit in calibration.fits.items()},
        "source": calibration.source,
        "notes": list(calibration.notes),
    }
    if calibration.engine is not None:
        content["engine"] = profile_content(calibration.engine)
        content["content_hash"] = content_hash(content)
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def content_hash(content: Mapping[str, Any]) -> str:
    """sha256 over everything but the hash itself: the same numbers, whenever they were measured."""
    rest = {name: value for name, value in content.items() if name != "content_hash"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _fit_content(fit: StageFit) -> dict[str, Any]:
    content = dataclasses.asdict(fit)
    quantity, low, high = (content.pop(name) for name in ("quantity", "min_load", "max_load"))
    content["range"] = {"quantity": quantity, "min": low, "max": high}
    return {name: value for name, value in content.items() if value is not None}


def _stage_fit(fit: _Fit) -> StageFit:
    values = {f.name: getattr(fit, f.name) for f in dataclasses.fields(fit) if f.name != "range"}
    return StageFit(
        **values, quantity=fit.range.quantity, min_load=fit.range.min, max_load=fit.range.max
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without its nulls; a repeated key is an error."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"key {name!r} appears twice")
    return {name: value for name, value in pairs if value is not None}


def _not_a_number(text: str) -> float:
    raise ValueError(f"numbers must be finite, found {text}")
