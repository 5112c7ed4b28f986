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
    source: CheckpointSource, stats: CalibrationStats | None, settings: QuantizeSettings
) -> dict[str, Any]:
    """Plain JSON that goes into the manifest; the same inputs give the same.

    Args:
        source: The checkpoint.
        stats: Its calibration, if there is one.
        settings: Bit widths.
    """
    calibration = None
    if stats is not None:
        calibration = {
            "name": stats.folder.resolve().name,
            "index_sha256": file_sha256(stats.folder / CALIBRATION_INDEX),
        }
    return {
        "source": {
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
    source: CheckpointSource, stats: CalibrationStats | None, settings: QuantizeSettings
) -> dict[str, Any]:
    """What must be the same for a run to be taken up: provenance and the shards' times."""
    times = {name: (source.folder / name).stat().st_mtime_ns for name in source.shards.headers}
    return {**provenance(source, stats, settings), "source_mtime_ns": times}
