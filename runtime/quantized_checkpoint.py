"""A quantized checkpoint: weight blocks as bit planes and tables, read when asked for.

A folder with ``pagedweight.json``, safetensors files, and the source's configuration and tokenizer
files. Per block, ``{name}.planes`` is int32 (the bits of uint32) [B, N, ceil(K/32)], plane p
holding bit B-1-p of every code, and ``{name}.table{q}`` is float16 [N, 2**q]. All other tensors
are the source's, bit for bit.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoint_source import FLOAT_DTYPES, as_float32
from runtime.checkpoint_tensors import TensorEntry, TensorFileError, file_sha256, read_header
from runtime.quantized_manifest import (
    BlockRecord,
    Manifest,
    QuantizedCheckpointError,
    read_manifest,
)

__all__ = ["QuantizedBlock", "QuantizedCheckpoint", "QuantizedCheckpointError"]


@dataclass(frozen=True, slots=True)
class QuantizedBlock:
    """One weight block; its arrays are views of the file, read-only.

    planes: [B, N, ceil(K/32)] uint32.
    tables: by width, [N, 2**q] float16.
    columns: K.
    """

    planes: NDArray[np.uint32]
    tables: dict[int, NDArray[np.float16]]
    columns: int


class QuantizedCheckpoint:
    """An opened quantized checkpoint.

    Attributes:
        folder: Where it lies.
        manifest: ``pagedweight.json``.
        blocks: What is known of every block, by layer, expert, module (gate_up before down).
        levels: Widths that can be served, ascending.
        damage: [blocks, levels] float64.
        routing_mass: Two [L, E] float64, mean gate weights and mean squared ones of the traffic
            that the damages stand for, by layer with experts; None if the checkpoint does not say.
        config: The model's ``config.json``.
        other_tensors: The file and place of every tensor that is no expert's.
    """

    def __init__(self, folder: Path, manifest: Manifest, config: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.blocks: tuple[BlockRecord, ...] = manifest.blocks
        self.levels = manifest.levels
        self.damage = np.array([block.damage for block in manifest.blocks], dtype=np.float64)
        mass = manifest.routing_mass
        self.routing_mass = None if mass is None else (np.array(mass.first), np.array(mass.second))
        self.config = config
        self._views: dict[str, mmap.mmap] = {}
        self._entries = _checked_entries(folder, manifest)
        expert_names = {name for block in self.blocks for name in manifest.tensors(block)}
        self.other_tensors = {
            name: place for name, place in self._entries.items() if name not in expert_names
        }

    @classmethod
    def open(cls, folder: Path | str, *, verify: bool = False) -> QuantizedCheckpoint:
        """Open a checkpoint; every file's size and every tensor's place and shape are checked.

        Args:
            folder: Its folder.
            verify: Also read all files and compare their SHA-256.

        Raises:
            QuantizedCheckpointError: If it is unfinished, damaged or of another version.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        for name, record in manifest.files.items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                raise QuantizedCheckpointError(
                    f"{folder / name}: cannot be read: {error.strerror}"
                ) from None
            if size != record.num_bytes:
                raise QuantizedCheckpointError(
                    f"{folder / name}: {size} bytes, pagedweight.json has {record.num_bytes}"
                )
        checkpoint = cls(folder, manifest, _read_config(folder))
        if verify:
            checkpoint.verify()
        return checkpoint

    def verify(self, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Compare the SHA-256 of every file.

        Args:
            on_bytes: Told the size of every file that is done.

        Raises:
            QuantizedCheckpointError: For the first file that differs; names the first damaged
                tensor in it.
        """
        for name, record in self.manifest.files.items():
            if file_sha256(self.folder / name) != record.sha256:
                raise QuantizedCheckpointError(
                    f"{self.folder / name}: SHA-256 differs from pagedweight.json"
                    + self._damaged_tensor(name)
                )
            on_bytes(record.num_bytes)

    def block(self, index: int, *, verify: bool = False) -> QuantizedBlock:
        """Planes and tables of a block.

        Args:
            index: Its number, layer by layer, expert by expert, gate_up before down.
            verify: Also compare the CRC-32 of its planes and tables.

        Raises:
            IndexError: If there is no such block.
            QuantizedCheckpointError: If a plane or table is damaged.
        """
        record = self.blocks[index]
        arrays: dict[str, NDArray[Any]] = {}
        for name, (dtype, shape) in self.manifest.tensors(record).items():
            numpy_dtype = "<u4" if dtype == "I32" else "<f2"
            arrays[name] = np.frombuffer(self._bytes(name), numpy_dtype).reshape(shape)
        planes = arrays[f"{record.name}.planes"]
        tables = {q: arrays[f"{record.name}.table{q}"] for q in self.levels}
        block = QuantizedBlock(planes, tables, record.columns)
        if verify:
            damaged = damaged_parts(block, record)
            if damaged:
                raise QuantizedCheckpointError(
                    f"{self.folder / record.file}: {record.name}: CRC-32 of {damaged[0]} differs"
                    " from pagedweight.json"
                )
        return block

    def other_tensor(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        """dtype as safetensors spells it, shape and bytes of a tensor that is no expert's.

        Raises:
            KeyError: If there is no such tensor.
        """
        _, entry = self.other_tensors[name]
        return entry.dtype, entry.shape, self._bytes(name)

    def other_float32(self, name: str) -> NDArray[np.float32]:
        """A bfloat16, float16 or float32 tensor that is no expert's, as float32.

        Raises:
            KeyError: If there is no such tensor.
            QuantizedCheckpointError: If it has another dtype.
        """
        dtype, shape, content = self.other_tensor(name)
        if dtype not in FLOAT_DTYPES:
            raise QuantizedCheckpointError(f"{self.folder}: tensor {name}: dtype {dtype}")
        return as_float32(content, dtype).reshape(shape)

    def _bytes(self, name: str) -> memoryview:
        file, entry = self._entries[name]
        if file not in self._views:
            with (self.folder / file).open("rb") as stream:
                self._views[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._views[file])[entry.start : entry.start + entry.num_bytes]

    def _damaged_tensor(self, file: str) -> str:
        for index, record in enumerate(self.blocks):
            if record.file == file:
                damaged = damaged_parts(self.block(index), record)
                if damaged:
                    return f"; {damaged[0]} of {record.name} is damaged"
        for name, checksum in self.manifest.files[file].tensor_crc32.items():
            if name in self._entries and zlib.crc32(self._bytes(name)) != checksum:
                return f"; tensor {name} is damaged"
        return ""


def damaged_parts(block: QuantizedBlock, record: BlockRecord) -> list[str]:
    """Planes and tables whose CRC-32 differs from the manifest's; version 1 knows planes only."""
    planes = zip(block.planes, record.plane_crc32, strict=True)
    damaged = [
        f"plane {number}"
        for number, (plane, checksum) in enumerate(planes)
        if zlib.crc32(plane.tobytes()) != checksum
    ]
    if record.table_crc32:
        tables = zip(block.tables.items(), record.table_crc32, strict=True)
        damaged += [
            f"table{bits}"
            for (bits, table), checksum in tables
            if zlib.crc32(table.tobytes()) != checksum
        ]
    return damaged


def _checked_entries(folder: Path, manifest: Manifest) -> dict[str, tuple[str, TensorEntry]]:
    """File and place of every tensor; the blocks' are held to their shapes."""
    entries: dict[str, tuple[str, TensorEntry]] = {}
    for file in manifest.files:
        if file.endswith(".safetensors"):
            try:
                header, _ = read_header(folder / file)
            except TensorFileError as error:
                raise QuantizedCheckpointError(str(error)) from None
            for name, entry in header.items():
                if name in entries:
                    raise QuantizedCheckpointError(
                        f"{folder / file}: tensor {name} is also in {entries[name][0]}"
                    )
                entries[name] = (file, entry)
    for block in manifest.blocks:
        for name, (dtype, shape) in manifest.tensors(block).items():
            if name not in entries or entries[name][0] != block.file:
                raise QuantizedCheckpointError(f"{folder / block.file}: tensor {name} is missing")
            entry = entries[name][1]
            if entry.dtype != dtype or entry.shape != shape:
                raise QuantizedCheckpointError(
                    f"{folder / block.file}: tensor {name}: {entry.dtype} {list(entry.shape)},"
                    f" must be {dtype} {list(shape)}"
                )
    return entries


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise QuantizedCheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise QuantizedCheckpointError(f"{path}: no JSON object")
    return config
