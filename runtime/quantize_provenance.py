"""Where a quantized checkpoint comes from: source, calibration, settings, program."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from runtime.calibration_stats import INDEX as CALIBRATION_INDEX
from runtime.calibration_stats import CalibrationStats
from runtime.checkpoint_source import CheckpointSource
from runtime.checkpoint_tensors import file_sha256
from runtime.quantize_settings import QuantizeSettings

PACKAGES = ("serving-twin", "numpy", "numba")


def provenance(
    source: CheckpointSource,
    stats: CalibrationStats | None,
    settings: QuantizeSettings,
    weights_sha256: str | None,
) -> dict[str, Any]:
    """Plain JSON that goes into the manifest; the same inputs give the same.

    Args:
        source: The checkpoint.
        stats: Its calibration, if there is one.
        settings: Bit widths.
        weights_sha256: Digest of the source's tensors; None where none was taken.
    """
    calibration = None
    if stats is not None:
        calibration = {
            "name": stats.folder.resolve().name,
            "index_sha256": file_sha256(stats.folder / CALIBRATION_INDEX),
        }
    digest = {} if weights_sha256 is None else {"weights_sha256": weights_sha256}
    return {
        "source": {
            **digest,
            "name": source.folder.resolve().name,
            "model_type": source.shape.model_type,
            "dtypes": sorted({part.dtype for block in source.blocks for part in block.parts}),
            "expert_bytes": source.expert_bytes,
            "other_bytes": source.other_bytes,
            "config_sha256": file_sha256(source.folder / "config.json"),
            "file_bytes": {
                name: (source.folder / name).stat().st_size for name in source.shards.headers
            },
        },
        "calibration": calibration,
        "settings": settings.as_dict(),
        "program": {name: version(name) for name in PACKAGES},
    }


def run_identity(
    source: CheckpointSource,
    stats: CalibrationStats | None,
    settings: QuantizeSettings,
    weights_sha256: str,
) -> dict[str, Any]:
    """What must be the same for a run to be taken up: provenance and the shards' times."""
    times = {name: (source.folder / name).stat().st_mtime_ns for name in source.shards.headers}
    found = provenance(source, stats, settings, weights_sha256)
    return {**found, "source_mtime_ns": times}


def differences(found: Any, wanted: Any, place: str = "") -> list[str]:
    """Dotted names of all entries in which two tables of plain JSON differ, with both values."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        result = []
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            name = f"{place}.{key}" if place else key
            if key not in found or key not in wanted:
                result.append(name)
            else:
                result += differences(found[key], wanted[key], name)
        return result
    if isinstance(wanted, tuple):
        wanted = list(wanted)
    return [] if found == wanted else [f"{place} ({_short(found)}, now {_short(wanted)})"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
