"""Settings of a quantization and where its result lies in files; both known before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from models.plane_bytes import plane_bytes, table_bytes
from runtime.checkpoint_source import CheckpointSource, SourceBlock
from runtime.quantized_manifest import TensorLayout, block_layout

SHARD_BYTES = 1 << 30


class SettingsError(ValueError):
    """Settings that do not fit; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """What decides the bytes of a quantized checkpoint, besides its source.

    Attributes:
        parent_bits: Bits of a code, 2..8.
        seed_bits: Width that is clustered exactly.
        min_bits: Narrowest width that can be served.
        keep_gain: Whether tables are scaled so that rows do not shrink, see runtime/row_gain.py.
        shard_bytes: A file of experts is closed before it grows beyond; one block may exceed it.
    """

    parent_bits: int = 8
    seed_bits: int = 3
    min_bits: int = 2
    keep_gain: bool = True
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        _require_within("parent_bits", self.parent_bits, 1, 8)
        _require_within("seed_bits", self.seed_bits, 1, self.parent_bits)
        _require_within("min_bits", self.min_bits, 1, self.parent_bits)
        if self.shard_bytes < 1:
            raise SettingsError(f"shard_bytes: {self.shard_bytes}, must be at least 1")

    @property
    def levels(self) -> tuple[int, ...]:
        """Widths that have a table, ascending."""
        return tuple(range(self.min_bits, self.parent_bits + 1))

    def as_dict(self) -> dict[str, int]:
        """For the manifest."""
        return asdict(self)


def _require_within(name: str, value: Any, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SettingsError(f"{name}: {value}, must be within {low}..{high}")


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """A file of consecutive blocks.

    name: its name.
    first_block: number of the first one.
    blocks: the blocks.
    """

    name: str
    first_block: int
    blocks: tuple[SourceBlock, ...]


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file of tensors copied from one source shard.

    name: its name.
    source: the shard's name.
    """

    name: str
    source: str


def block_tensors(block: SourceBlock, settings: QuantizeSettings) -> TensorLayout:
    """dtype and shape of a block's tensors by name, in the order of their bytes."""
    return block_layout(
        block.name, block.rows, block.columns, settings.parent_bits, settings.levels
    )


def block_bytes(block: SourceBlock, settings: QuantizeSettings) -> int:
    """Bytes of a block's planes and tables on disk."""
    tables = sum(table_bytes(block.rows, bits) for bits in settings.levels)
    return settings.parent_bits * plane_bytes(block.rows, block.columns) + tables


def expert_files(
    blocks: Sequence[SourceBlock], settings: QuantizeSettings
) -> tuple[ExpertFile, ...]:
    """Blocks in order, cut into files of at most ``shard_bytes``."""
    groups: list[list[SourceBlock]] = []
    room = 0
    for block in blocks:
        size = block_bytes(block, settings)
        if not groups or size > room:
            groups.append([])
            room = settings.shard_bytes
        groups[-1].append(block)
        room -= size
    files = []
    first = 0
    for number, group in enumerate(groups, 1):
        name = f"experts-{number:05}-of-{len(groups):05}.safetensors"
        files.append(ExpertFile(name, first, tuple(group)))
        first += len(group)
    return tuple(files)


def other_files(source: CheckpointSource) -> tuple[OtherFile, ...]:
    """One file for every shard that holds other tensors than experts."""
    count = len(source.other_tensors)
    return tuple(
        OtherFile(f"others-{number:05}-of-{count:05}.safetensors", shard)
        for number, shard in enumerate(source.other_tensors, 1)
    )
