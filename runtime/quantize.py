"""Quantize a checkpoint: from Hugging Face shards to bit planes and tables, file by file.

Memory holds one weight block's planes and tables and one stripe of rows per thread. A run that
is cut off leaves a journal and whole files; the manifest is written last, so a folder with one
is complete. The same source and settings give the same bytes, resumed or not, whatever the
number of threads.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtime.calibration_stats import CalibrationStats
from runtime.checkpoint_shards import INDEX
from runtime.checkpoint_source import CheckpointSource, SourceBlock
from runtime.quantize_block import QuantizeError
from runtime.quantize_files import copy_others, write_experts
from runtime.quantize_folder import (
    Existing,
    OutputError,
    clear,
    locked,
    output_state,
    remove_partial,
    require_room,
)
from runtime.quantize_journal import DoneFile, Journal, JournalError
from runtime.quantize_provenance import provenance, run_identity
from runtime.quantize_settings import (
    ExpertFile,
    OtherFile,
    QuantizeSettings,
    block_bytes,
    expert_files,
    other_files,
)
from runtime.quantized_manifest import (
    JOURNAL,
    MANIFEST,
    BlockRecord,
    FileRecord,
    Manifest,
    read_manifest,
)
from traces.whole_file import write_whole

__all__ = [
    "JournalError",
    "OutputError",
    "QuantizeError",
    "QuantizeProgress",
    "QuantizeSettings",
    "quantize_checkpoint",
]

KEPT_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*", "NOTICE*")


class QuantizeProgress(Protocol):
    """Who is told how far a run is."""

    def on_start(self, weights: int, kept_weights: int, kept_files: int) -> None:
        """A run begins: weights in all, and those that an earlier run has done."""

    def on_weights(self, weights: int) -> None:
        """So many more weights are done."""

    def on_file(self, name: str) -> None:
        """A file is whole and in the journal."""


class _Silent:
    def on_start(self, weights: int, kept_weights: int, kept_files: int) -> None: ...
    def on_weights(self, weights: int) -> None: ...
    def on_file(self, name: str) -> None: ...


def quantize_checkpoint(
    source_folder: Path | str,
    output: Path | str,
    settings: QuantizeSettings | None = None,
    *,
    calibration: Path | str | None = None,
    existing: Existing = "refuse",
    threads: int = 1,
    progress: QuantizeProgress | None = None,
) -> Manifest:
    """Quantize a checkpoint into a folder.

    Args:
        source_folder: A Hugging Face checkpoint.
        output: The folder to write; made if it is not there.
        settings: Bit widths; the defaults if None.
        calibration: Folder of calibration statistics; None for the plain squared error.
        existing: What to do about an earlier run in ``output``: refuse; resume it, keeping its
            finished files (a finished run of the same settings is left as it is); or overwrite.
        threads: Threads over stripes of rows, >= 1.
        progress: Who is told.

    Returns:
        What ``pagedweight.json`` says.

    Raises:
        SourceError: If the source is not understood.
        CalibrationError: If the calibration is damaged or of another model.
        QuantizeError: If a weight is not finite or beyond float16.
        OutputError: If the folder is of something else, in use, or the disk too small.
        JournalError: If the unfinished run is of another source or other settings.
    """
    if threads < 1:
        raise ValueError(f"threads: {threads}, must be at least 1")
    source = CheckpointSource.open(source_folder)
    stats = _open_calibration(calibration, source)
    run = _Run(source, stats, settings or QuantizeSettings(), Path(output), threads)
    return run.execute(existing, progress or _Silent())


def _open_calibration(
    folder: Path | str | None, source: CheckpointSource
) -> CalibrationStats | None:
    if folder is None:
        return None
    stats = CalibrationStats.open(folder)
    moe = source.shape.moe_layers[0]
    stats.require(
        layers=len(source.shape.moe_layers),
        experts=moe.num_experts,
        hidden=source.shape.hidden_size,
        intermediate=moe.intermediate_size,
    )
    return stats


@dataclass(frozen=True)
class _Run:
    source: CheckpointSource
    stats: CalibrationStats | None
    settings: QuantizeSettings
    output: Path
    threads: int

    def execute(self, existing: Existing, progress: QuantizeProgress) -> Manifest:
        if self.output.resolve() == self.source.folder.resolve():
            raise OutputError(f"{self.output}: is the source itself")
        self._require_usable(output_state(self.output), existing)
        self.output.mkdir(parents=True, exist_ok=True)
        with locked(self.output):
            state = output_state(self.output)
            self._require_usable(state, existing)
            if state == "finished" and existing == "resume":
                (self.output / JOURNAL).unlink(missing_ok=True)
                return self._finished()
            identity = run_identity(self.source, self.stats, self.settings)
            if state == "unfinished" and existing == "resume":
                journal = Journal.read(self.output, identity)
            else:
                journal = Journal(self.output, identity)
                journal.write()  # from here on the folder is an unfinished run, not a foreign one
                clear(self.output)
            remove_partial(self.output)
            self._write_files(journal, progress)
            manifest = self._manifest(journal)
            write_whole(self.output / MANIFEST, manifest.to_json())
            (self.output / JOURNAL).unlink()
            return manifest

    def _require_usable(self, state: str, existing: Existing) -> None:
        if existing == "refuse" and state != "empty":
            raise OutputError(
                f"{self.output}: holds {state} work; take it up with --resume or replace it with"
                " --overwrite"
            )

    def _finished(self) -> Manifest:
        manifest = read_manifest(self.output)
        wanted = provenance(self.source, self.stats, self.settings)
        for key in ("settings", "source", "calibration"):
            if manifest.provenance.get(key) != wanted[key]:
                raise OutputError(
                    f"{self.output}: finished, with another {key}; replace it with --overwrite"
                )
        return manifest

    def _write_files(self, journal: Journal, progress: QuantizeProgress) -> None:
        experts = expert_files(self.source.blocks, self.settings)
        others = other_files(self.source)
        names = {file.name for file in experts} | {file.name for file in others}
        kept = [file for file in experts if file.name in journal.files]
        progress.on_start(
            sum(_weights(block) for block in self.source.blocks),
            sum(_weights(block) for file in kept for block in file.blocks),
            len(names & set(journal.files)),
        )
        self._require_room(journal, experts, others)
        with ThreadPoolExecutor(self.threads) as pool:
            for file in experts:
                if file.name not in journal.files:
                    done = write_experts(
                        file,
                        self.output,
                        self.source,
                        self.stats,
                        self.settings,
                        pool,
                        progress.on_weights,
                    )
                    journal.add(file.name, done)
                    progress.on_file(file.name)
        for other in others:
            if other.name not in journal.files:
                journal.add(other.name, copy_others(other, self.output, self.source))
                progress.on_file(other.name)
        for path in _kept_files(self.source.folder):
            content = path.read_bytes()
            write_whole(self.output / path.name, content)
            record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
            journal.files[path.name] = DoneFile(record)

    def _require_room(
        self, journal: Journal, experts: tuple[ExpertFile, ...], others: tuple[OtherFile, ...]
    ) -> None:
        needed = sum(
            block_bytes(block, self.settings)
            for file in experts
            if file.name not in journal.files
            for block in file.blocks
        )
        for other in others:
            if other.name not in journal.files:
                tensors = self.source.other_tensors[other.source].values()
                needed += sum(entry.num_bytes for entry in tensors)
        require_room(self.output, needed)

    def _manifest(self, journal: Journal) -> Manifest:
        blocks = []
        for file in expert_files(self.source.blocks, self.settings):
            done = journal.files[file.name]
            for block, crc32, damage in zip(
                file.blocks, done.plane_crc32, done.damage, strict=True
            ):
                blocks.append(
                    BlockRecord(
                        layer=block.layer,
                        expert=block.expert,
                        module=block.module,
                        rows=block.rows,
                        columns=block.columns,
                        file=file.name,
                        plane_crc32=tuple(crc32),
                        damage=tuple(damage),
                    )
                )
        return Manifest(
            parent_bits=self.settings.parent_bits,
            seed_bits=self.settings.seed_bits,
            min_bits=self.settings.min_bits,
            damage_kind="squared_error" if self.stats is None else "calibrated",
            blocks=tuple(blocks),
            files={name: journal.files[name].record for name in sorted(journal.files)},
            provenance=provenance(self.source, self.stats, self.settings),
        )


def _weights(block: SourceBlock) -> int:
    return block.rows * block.columns


def _kept_files(folder: Path) -> list[Path]:
    """Configuration, tokenizer, licence and card; not the index of the shards."""
    found = {path for pattern in KEPT_FILES for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name not in (INDEX, JOURNAL))
