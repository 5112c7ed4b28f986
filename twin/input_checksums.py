"""Checksums of the files that a scenario reads: its trace and its calibration."""

from __future__ import annotations

import hashlib
from pathlib import Path

from models.calibration import NAMED
from models.scenario import Scenario
from traces.workloads import BUNDLED


def input_files(scenario: Scenario) -> tuple[Path, ...]:
    """Trace (a file, or a folder of client statistics) and calibration; not what is bundled."""
    found = []
    trace, calibration = scenario.workload.trace, scenario.attention_ffn.calibration
    if scenario.workload.lengths is None and trace is not None and trace not in BUNDLED:
        found.append(Path(trace))
    if calibration is not None and calibration not in NAMED:
        found.append(Path(calibration))
    return tuple(found)


def checksum(path: Path) -> str:
    """sha256 in hexadecimal; of a folder: of the names and contents of its files, by name.

    Raises:
        OSError: If something cannot be read.
    """
    if not path.is_dir():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    whole = hashlib.sha256()
    for file in sorted(entry for entry in path.iterdir() if entry.is_file()):
        whole.update(f"{file.name}\0{checksum(file)}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()


def input_checksums(scenario: Scenario) -> dict[str, str]:
    """Path -> sha256 of what was read; a file that has gone since then is left out."""
    found = {}
    for path in input_files(scenario):
        try:
            found[str(path)] = checksum(path)
        except OSError:
            continue
    return found
