"""The journal of an unfinished quantization: which files are done, so that a rerun keeps them.

It is rewritten whole after every file. A file that is done but not in it is made again; a file
in it is kept only if its bytes still have the SHA-256 written down.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.checkpoint_tensors import file_sha256, named
from runtime.quantize_provenance import differences
from runtime.quantized_manifest import JOURNAL, FileRecord
from traces.whole_file import write_whole


class JournalError(ValueError):
    """A journal of another run, or none that can be read; the message names it."""


@dataclass(frozen=True, slots=True)
class DoneFile:
    """A finished file.

    record: its size and SHA-256.
    plane_crc32: per block, the CRC-32 of every plane; empty for a file without experts.
    table_crc32: per block, the CRC-32 of every level's table.
    damage: per block and level.
    """

    record: FileRecord
    plane_crc32: list[list[int]] = field(default_factory=list)
    table_crc32: list[list[int]] = field(default_factory=list)
    damage: list[list[float]] = field(default_factory=list)


class Journal:
    """Done files of one run, in a folder.

    Attributes:
        files: By name.
    """

    def __init__(
        self, folder: Path, identity: dict[str, Any], files: dict[str, DoneFile] | None = None
    ) -> None:
        self._folder = folder
        self._identity = identity
        self.files = files or {}

    @classmethod
    def read(cls, folder: Path, identity: dict[str, Any]) -> Journal:
        """The journal of a run that was cut off; files that changed since are left out.

        Args:
            folder: Where the run wrote.
            identity: What decides this run's bytes; must be that run's.

        Raises:
            JournalError: If it cannot be read, or is of another source or other settings.
        """
        path = folder / JOURNAL
        try:
            table = json.loads(path.read_text("utf-8"))
            found, items = table["identity"], table["files"]
            files = {
                name: DoneFile(
                    FileRecord(item["bytes"], item["sha256"], item["tensor_crc32"]),
                    item["plane_crc32"],
                    item["table_crc32"],
                    item["damage"],
                )
                for name, item in items.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise JournalError(f"{path}: cannot be read; start again with --overwrite") from None
        different = differences(found, identity)
        if different:
            raise JournalError(
                f"{path}: the unfinished run had another {', '.join(different)}; start again with"
                " --overwrite"
            )
        kept = {name: done for name, done in files.items() if _is_whole(folder / name, done.record)}
        return cls(folder, identity, kept)

    def add(self, name: str, done: DoneFile) -> None:
        """Write down a finished file.

        Raises:
            OSError: If the disk refuses.
        """
        self.files[name] = done
        self.write()

    def write(self) -> None:
        """Write the journal.

        Raises:
            OSError: If the disk refuses.
        """
        files = {
            name: {
                "bytes": done.record.num_bytes,
                "sha256": done.record.sha256,
                "tensor_crc32": done.record.tensor_crc32,
                "plane_crc32": done.plane_crc32,
                "table_crc32": done.table_crc32,
                "damage": done.damage,
            }
            for name, done in self.files.items()
        }
        table = {"identity": self._identity, "files": files}
        path = self._folder / JOURNAL
        with named(path):
            write_whole(path, json.dumps(table).encode())

    def remove(self) -> None:
        """Remove the journal from the disk."""
        (self._folder / JOURNAL).unlink(missing_ok=True)


def _is_whole(path: Path, record: FileRecord) -> bool:
    try:
        return path.stat().st_size == record.num_bytes and file_sha256(path) == record.sha256
    except OSError:
        return False
