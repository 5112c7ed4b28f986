"""Quantize a checkpoint: from Hugging Face shards to bit planes and tables, file by file.

Memory holds one weight block's planes and tables and one stripe of rows per thread. A run that
is cut off leaves a journal and whole files; the manifest is written last, so a folder with one
is complete. The same source and settings give the same bytes, resumed or not, whatever the
number of threads.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtime.calibration_stats import CalibrationStats
from runtime.checkpoint_required import require_tensors
from runtime.checkpoint_scan import scan_weights
from runtime.checkpoint_shards import INDEX
from runtime.checkpoint_source import CheckpointSource, SourceBlock
from runtime.checkpoint_tensors import file_sha256, named
from runtime.quantize_block import QuantizeError
from runtime.quantize_files import copy_others, write_experts
from runtime.quantize_folder import (
    Existing,
    OutputError,
    State,
    clear,
    made_and_locked,
    move_up,
    output_state,
    remove_partial,
    require_outside,
    require_replaceable,
    require_room,
)
from runtime.quantize_journal import DoneFile, Journal, JournalError
from runtime.quantize_provenance import differences, provenance, run_identity
from runtime.quantize_settings import (
    QuantizeSettings,
    block_bytes,
    expert_files,
    other_files,
)
from runtime.quantized_manifest import (
    JOURNAL,
    MANIFEST,
    STAGING,
    BlockRecord,
    FileRecord,
    Manifest,
    RoutingMasses,
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
    on_read: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Quantize a checkpoint into a folder.

    All that can be known beforehand is checked before anything is written; the source is read
    once for it.

    Args:
        source_folder: A Hugging Face checkpoint.
        output: The folder to write; made if it is not there.
        settings: Bit widths; the defaults if None.
        calibration: Folder of calibration statistics; None for the plain squared error.
        existing: What to do about an earlier run in ``output``: refuse; resume it, keeping its
            finished files (a finished run of the same settings is left as it is); or overwrite.
            A finished result is kept until the one that replaces it is complete.
        threads: Threads over stripes of rows, >= 1.
        progress: Who is told.
        on_read: Told bytes read and bytes to read while the source is checked.

    Returns:
        What ``pagedweight.json`` says.

    Raises:
        SourceError: If the source is not understood, or a weight is not finite or beyond float16.
        CalibrationError: If the calibration is damaged or of another model.
        QuantizeError: If the source changes while it is read.
        OutputError: If the folder is of something else, in use, or the disk too small.
        JournalError: If the unfinished run is of another source or other settings.
    """
    if threads < 1:
        raise ValueError(f"threads: {threads}, must be at least 1")
    source = CheckpointSource.open(source_folder)
    require_tensors(source.folder, source.shape, source.shards)
    stats = None if calibration is None else _open_calibration(calibration, source)
    run = _Run(source, stats, settings or QuantizeSettings(), Path(output), threads)
    return run.execute(existing, progress or _Silent(), on_read)


def _open_calibration(folder: Path | str, source: CheckpointSource) -> CalibrationStats:
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

    def execute(
        self,
        existing: Existing,
        progress: QuantizeProgress,
        on_read: Callable[[int, int], None],
    ) -> Manifest:
        require_outside(self.output, self.source.folder)
        state = self._usable_state(existing)
        if self._is_done(state, existing):
            return self._finished()
        weights_sha256 = self._checked_inputs(on_read)
        if state != "unfinished":
            self._require_room({})
        with made_and_locked(self.output):
            state = self._usable_state(existing)
            if self._is_done(state, existing):
                return self._finished()
            remove_partial(self.output)
            staging = self.output / STAGING
            if existing == "resume" and (staging / MANIFEST).exists():
                move_up(self.output)  # was cut off in doing so
                return self._finished()
            folder = staging if state == "finished" else self.output
            manifest = self._write(folder, existing, weights_sha256, progress)
            if folder == staging:
                move_up(self.output)
            return manifest

    def _usable_state(self, existing: Existing) -> State:
        state = output_state(self.output)
        if existing == "refuse" and state != "empty":
            raise OutputError(
                f"{self.output}: holds {state} work; take it up with --resume or replace it with"
                " --overwrite"
            )
        if existing == "overwrite" and state == "finished":
            require_replaceable(self.output)
        return state

    def _is_done(self, state: State, existing: Existing) -> bool:
        replaced = (self.output / STAGING).exists()
        return state == "finished" and existing == "resume" and not replaced

    def _checked_inputs(self, on_read: Callable[[int, int], None]) -> str:
        """Read all that the result depends on once; returns the digest of the weights."""
        total = self.source.expert_bytes + self.source.other_bytes
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            on_read(done, total)

        digest = scan_weights(self.source, experts_in_float16=True, on_bytes=advance)
        if self.stats is not None:
            config = file_sha256(self.source.folder / "config.json")
            self.stats.require_model(weights_sha256=digest, config_sha256=config)
            self.stats.check()
        return digest

    def _write(
        self, folder: Path, existing: Existing, weights_sha256: str, progress: QuantizeProgress
    ) -> Manifest:
        """Write a whole result into a folder; without one finished file nothing is left there."""
        identity = run_identity(self.source, self.stats, self.settings, weights_sha256)
        if existing == "resume" and (folder / JOURNAL).exists():
            journal = Journal.read(folder, identity)
        else:
            journal = Journal(folder, identity)
            if folder.name == STAGING:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            journal.write()  # from here on the folder is an unfinished run, not a foreign one
            clear(folder)
        try:
            remove_partial(folder)
            self._require_room(journal.files)
            self._write_files(folder, journal, progress)
            manifest = self._manifest(journal, weights_sha256)
            with named(folder / MANIFEST):
                write_whole(folder / MANIFEST, manifest.to_json())
        except BaseException:
            if not journal.files:
                journal.remove()
                if folder.name == STAGING:
                    shutil.rmtree(folder, ignore_errors=True)
            raise
        journal.remove()
        return manifest

    def _finished(self) -> Manifest:
        manifest = read_manifest(self.output)
        found = manifest.provenance
        digest = found["source"].get("weights_sha256")  # not taken again: a long reading
        wanted = provenance(self.source, self.stats, self.settings, digest)
        different = [
            name
            for key in ("settings", "source", "calibration")
            for name in differences(found.get(key), wanted[key], key)
        ]
        if different:
            raise OutputError(
                f"{self.output}: finished, with another {', '.join(different)}; replace it with"
                " --overwrite"
            )
        (self.output / JOURNAL).unlink(missing_ok=True)
        return manifest

    def _write_files(self, folder: Path, journal: Journal, progress: QuantizeProgress) -> None:
        experts = expert_files(self.source.blocks, self.settings)
        others = other_files(self.source)
        names = {file.name for file in experts} | {file.name for file in others}
        kept = [file for file in experts if file.name in journal.files]
        progress.on_start(
            sum(_weights(block) for block in self.source.blocks),
            sum(_weights(block) for file in kept for block in file.blocks),
            len(names & set(journal.files)),
        )
        with ThreadPoolExecutor(self.threads) as pool:
            for file in experts:
                if file.name not in journal.files:
                    done = write_experts(
                        file,
                        folder,
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
                journal.add(other.name, copy_others(other, folder, self.source))
                progress.on_file(other.name)
        for path in _kept_files(self.source.folder):
            content = path.read_bytes()
            with named(folder / path.name):
                write_whole(folder / path.name, content)
            record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
            journal.files[path.name] = DoneFile(record)

    def _require_room(self, done: Mapping[str, DoneFile]) -> None:
        needed = sum(
            block_bytes(block, self.settings)
            for file in expert_files(self.source.blocks, self.settings)
            if file.name not in done
            for block in file.blocks
        )
        for other in other_files(self.source):
            if other.name not in done:
                tensors = self.source.other_tensors[other.source].values()
                needed += sum(entry.num_bytes for entry in tensors)
        require_room(self.output, needed)

    def _manifest(self, journal: Journal, weights_sha256: str) -> Manifest:
        blocks = []
        for file in expert_files(self.source.blocks, self.settings):
            done = journal.files[file.name]
            for block, planes, tables, damage in zip(
                file.blocks, done.plane_crc32, done.table_crc32, done.damage, strict=True
            ):
                blocks.append(
                    BlockRecord(
                        layer=block.layer,
                        expert=block.expert,
                        module=block.module,
                        rows=block.rows,
                        columns=block.columns,
                        file=file.name,
                        plane_crc32=tuple(planes),
                        damage=tuple(damage),
                        table_crc32=tuple(tables),
                    )
                )
        return Manifest(
            parent_bits=self.settings.parent_bits,
            seed_bits=self.settings.seed_bits,
            min_bits=self.settings.min_bits,
            damage_kind="squared_error" if self.stats is None else "calibrated",
            blocks=tuple(blocks),
            files={name: journal.files[name].record for name in sorted(journal.files)},
            provenance=provenance(self.source, self.stats, self.settings, weights_sha256),
            routing_mass=None if self.stats is None else _routing_mass(self.stats),
        )


def _routing_mass(stats: CalibrationStats) -> RoutingMasses:
    layers, experts = range(stats.layers), range(stats.experts)
    return RoutingMasses(
        first=tuple(tuple(stats.first_mass(i, e) for e in experts) for i in layers),
        second=tuple(tuple(stats.mass(i, e) for e in experts) for i in layers),
    )


def _weights(block: SourceBlock) -> int:
    return block.rows * block.columns


def _kept_files(folder: Path) -> list[Path]:
    """Configuration, tokenizer, licence and card; not the index of the shards."""
    found = {path for pattern in KEPT_FILES for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name not in (INDEX, JOURNAL))
