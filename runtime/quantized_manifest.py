"""``pagedweight.json``: what a quantized checkpoint consists of. It is written last.

Reading is strict: a missing field, another type or a contradiction is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

MANIFEST = "pagedweight.json"
JOURNAL = "pagedweight-progress.json"
STAGING = "pagedweight-new"  # folder of a result that is to replace a finished one
FORMAT = "pagedweight"
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # 1 has checksums of planes, not of tables and other tensors
MODULES = ("gate_up", "down")

T = TypeVar("T")
TensorLayout = dict[str, tuple[str, tuple[int, ...]]]
Masses = tuple[tuple[float, ...], ...]
DamageKind = Literal["calibrated", "squared_error"]


class QuantizedCheckpointError(ValueError):
    """A quantized checkpoint that cannot be used; the message names the file and the field."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the checkpoint.

    num_bytes: its size.
    sha256: of its bytes.
    tensor_crc32: CRC-32 by tensor, where it is a file of tensors that are no expert's; empty in
        version 1.
    """

    num_bytes: int
    sha256: str
    tensor_crc32: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One weight block.

    layer: the model's layer.
    expert: from 0.
    module: ``gate_up`` or ``down``.
    rows: N.
    columns: K.
    file: the file that holds it.
    plane_crc32: CRC-32 of every plane's bytes.
    damage: damage at every level.
    table_crc32: CRC-32 of every level's table; empty in version 1.
    """

    layer: int
    expert: int
    module: str
    rows: int
    columns: int
    file: str
    plane_crc32: tuple[int, ...]
    damage: tuple[float, ...]
    table_crc32: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What its tensors' names begin with."""
        return f"model.layers.{self.layer}.mlp.experts.{self.expert}.{self.module}"


@dataclass(frozen=True, slots=True)
class RoutingMasses:
    """Traffic that the damages stand for, by layer with experts and expert, per token seen.

    first: mean gate weight.
    second: mean squared gate weight.
    """

    first: Masses
    second: Masses


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of ``pagedweight.json``.

    parent_bits, seed_bits, min_bits: widths of the quantization.
    damage_kind: ``calibrated``, or ``squared_error`` where every weight counts the same.
    blocks: by layer, expert, module.
    files: by name, all files but this one.
    provenance: source, calibration and program, as plain JSON.
    version: of the format.
    routing_mass: of the calibration; None without one, and of checkpoints that do not say.
    """

    parent_bits: int
    seed_bits: int
    min_bits: int
    damage_kind: DamageKind
    blocks: tuple[BlockRecord, ...]
    files: dict[str, FileRecord]
    provenance: dict[str, Any]
    version: int = FORMAT_VERSION
    routing_mass: RoutingMasses | None = None

    @property
    def levels(self) -> tuple[int, ...]:
        """Widths that have a table, ascending."""
        return tuple(range(self.min_bits, self.parent_bits + 1))

    def tensors(self, block: BlockRecord) -> TensorLayout:
        """dtype and shape of a block's tensors, by name."""
        return block_layout(block.name, block.rows, block.columns, self.parent_bits, self.levels)

    def to_json(self) -> bytes:
        """The file's bytes in the newest version; the same manifest gives the same bytes.

        Raises:
            ValueError: If it was read from an older version, which has fewer checksums.
        """
        if self.version != FORMAT_VERSION:
            raise ValueError(f"version: {self.version}, only {FORMAT_VERSION} is written")
        blocks = [
            {
                "layer": block.layer,
                "expert": block.expert,
                "module": block.module,
                "rows": block.rows,
                "columns": block.columns,
                "file": block.file,
                "plane_crc32": list(block.plane_crc32),
                "table_crc32": list(block.table_crc32),
                "damage": list(block.damage),
            }
            for block in self.blocks
        ]
        files = {
            name: {
                "bytes": record.num_bytes,
                "sha256": record.sha256,
                "tensor_crc32": record.tensor_crc32,
            }
            for name, record in self.files.items()
        }
        mass = self.routing_mass
        masses = {} if mass is None else {"first": mass.first, "second": mass.second}
        table = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "parent_bits": self.parent_bits,
            "seed_bits": self.seed_bits,
            "min_bits": self.min_bits,
            "levels": list(self.levels),
            "damage_kind": self.damage_kind,
            **({"routing_mass": masses} if masses else {}),
            "provenance": self.provenance,
            "files": files,
            "blocks": blocks,
        }
        return json.dumps(table, indent=1).encode()


def block_layout(
    name: str, rows: int, columns: int, parent_bits: int, levels: Sequence[int]
) -> TensorLayout:
    """dtype and shape of a block's tensors by name: planes, then tables by ascending width."""
    layout: TensorLayout = {f"{name}.planes": ("I32", (parent_bits, rows, -(-columns // 32)))}
    for bits in levels:
        layout[f"{name}.table{bits}"] = ("F16", (rows, 1 << bits))
    return layout


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``pagedweight.json`` of a folder.

    Raises:
        QuantizedCheckpointError: If there is none, or it is damaged or of another version.
    """
    path = folder / MANIFEST
    try:
        table = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise QuantizedCheckpointError(_absent(folder)) from None
    except OSError as error:
        raise QuantizedCheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise QuantizedCheckpointError(f"{path}: no JSON: {error}") from None
    fields = _Fields(str(path), "", table)
    if fields.get("format", str) != FORMAT:
        raise fields.error("format", f"{table['format']!r}, must be {FORMAT!r}")
    if fields.get("version", int) not in READABLE_VERSIONS:
        allowed = " and ".join(map(str, READABLE_VERSIONS))
        raise fields.error("version", f"{table['version']}, this program reads {allowed}")
    return _manifest(fields)


def _absent(folder: Path) -> str:
    if (folder / JOURNAL).exists() or (folder / STAGING).exists():
        return f"{folder}: an unfinished quantization; finish it with --resume"
    if not folder.is_dir():
        return f"{folder}: no folder"
    return f"{folder}: no quantized checkpoint ({MANIFEST} is missing)"


def _manifest(fields: _Fields) -> Manifest:
    version = fields.get("version", int)
    parent = fields.whole("parent_bits", 1, 8)
    low = fields.whole("min_bits", 1, parent)
    kind = fields.get("damage_kind", str)
    if kind not in ("calibrated", "squared_error"):
        raise fields.error("damage_kind", f"{kind!r}, must be 'calibrated' or 'squared_error'")
    if fields.get("levels", list) != list(range(low, parent + 1)):
        raise fields.error("levels", f"must be {low}..{parent}")
    files = {}
    for name, item in fields.get("files", dict).items():
        record = _Fields(fields.path, f"files.{name}.", item)
        if Path(name).name != name:
            raise fields.error("files", f"{name!r} is no file of this folder")
        checksums = record.get("tensor_crc32", dict) if version > 1 else {}
        if not _are_crc32(checksums.values()):
            raise record.error("tensor_crc32", "must be numbers of 32 bits")
        files[name] = FileRecord(record.whole("bytes", 0), record.get("sha256", str), checksums)
    blocks = tuple(
        _block(_Fields(fields.path, f"blocks[{i}].", item), parent, low, version)
        for i, item in enumerate(fields.get("blocks", list))
    )
    _require_complete(fields, blocks, files)
    return Manifest(
        parent_bits=parent,
        seed_bits=fields.whole("seed_bits", 1, parent),
        min_bits=low,
        damage_kind="calibrated" if kind == "calibrated" else "squared_error",
        blocks=blocks,
        files=files,
        provenance=fields.get("provenance", dict),
        version=version,
        routing_mass=_routing_mass(fields, blocks) if fields.has("routing_mass") else None,
    )


def _routing_mass(fields: _Fields, blocks: tuple[BlockRecord, ...]) -> RoutingMasses:
    layers = len({block.layer for block in blocks})
    experts = len({block.expert for block in blocks})
    table = _Fields(fields.path, "routing_mass.", fields.get("routing_mass", dict))

    def masses(name: str) -> Masses:
        rows = table.get(name, list)
        if len(rows) != layers or not all(_are_masses(row, experts) for row in rows):
            raise table.error(name, f"must be {layers} rows of {experts} finite numbers >= 0")
        return tuple(tuple(map(float, row)) for row in rows)

    return RoutingMasses(masses("first"), masses("second"))


def _are_masses(row: Any, experts: int) -> bool:
    return isinstance(row, list) and len(row) == experts and all(map(_is_damage, row))


def _block(fields: _Fields, parent_bits: int, min_bits: int, version: int) -> BlockRecord:
    module = fields.get("module", str)
    if module not in MODULES:
        raise fields.error("module", f"{module!r}, must be one of {', '.join(MODULES)}")
    levels = parent_bits - min_bits + 1
    planes = _checksums(fields, "plane_crc32", parent_bits)
    tables = _checksums(fields, "table_crc32", levels) if version > 1 else ()
    damage = fields.get("damage", list)
    if len(damage) != levels or not all(_is_damage(value) for value in damage):
        raise fields.error("damage", "must be one finite number >= 0 per level")
    return BlockRecord(
        layer=fields.whole("layer", 0),
        expert=fields.whole("expert", 0),
        module=module,
        rows=fields.whole("rows", 1),
        columns=fields.whole("columns", 1),
        file=fields.get("file", str),
        plane_crc32=planes,
        damage=tuple(float(value) for value in damage),
        table_crc32=tables,
    )


def _checksums(fields: _Fields, name: str, count: int) -> tuple[int, ...]:
    values = fields.get(name, list)
    if len(values) != count or not _are_crc32(values):
        raise fields.error(name, f"must be {count} numbers of 32 bits")
    return tuple(values)


def _are_crc32(values: Iterable[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 32 for value in values)


def _is_damage(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _require_complete(
    fields: _Fields, blocks: tuple[BlockRecord, ...], files: Mapping[str, FileRecord]
) -> None:
    """Blocks are all pairs of MoE layers and experts, each with both modules, in order."""
    layers = sorted({block.layer for block in blocks})
    experts = len({block.expert for block in blocks})
    wanted = [(a, b, c) for a in layers for b in range(experts) for c in MODULES]
    found = [(block.layer, block.expert, block.module) for block in blocks]
    if not found or found != wanted:
        raise fields.error("blocks", "must be every layer's experts, gate_up before down, in order")
    for i, block in enumerate(blocks):
        if block.file not in files:
            raise fields.error(f"blocks[{i}].file", f"{block.file!r} is not among files")


class _Fields:
    """A JSON table read with its path in every message."""

    def __init__(self, path: str, prefix: str, table: Any) -> None:
        self.path = path
        self._prefix = prefix
        if not isinstance(table, dict):
            raise QuantizedCheckpointError(f"{path}: {prefix.rstrip('.') or 'content'}: no table")
        self._table = table

    def has(self, name: str) -> bool:
        return name in self._table

    def get(self, name: str, kind: type[T]) -> T:
        if name not in self._table:
            raise self.error(name, "missing")
        value = self._table[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"must be of type {kind.__name__}, found {value!r:.60}")
        return value

    def whole(self, name: str, low: int, high: int | None = None) -> int:
        value = self.get(name, int)
        if value < low or (high is not None and value > high):
            raise self.error(name, f"{value}, must be within {low}..{'' if high is None else high}")
        return value

    def error(self, name: str, message: str) -> QuantizedCheckpointError:
        return QuantizedCheckpointError(f"{self.path}: {self._prefix}{name}: {message}")
