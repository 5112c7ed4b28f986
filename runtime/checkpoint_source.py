"""A Hugging Face mixture-of-experts checkpoint as a list of weight blocks, refused unless whole.

Opening reads ``config.json`` and the headers of the shards only. Every expert matrix that the
configuration promises must be there once, in its shape, as bfloat16, float16 or float32; nothing
that looks like an expert may be left over. Rows are read when asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from models.hf_config import HfConfigError, read_hf_config
from models.llm_shape import LlmShape
from runtime.checkpoint_expert_names import (
    MODEL_TYPES,
    ExpertTensorName,
    Part,
    is_expert_tensor,
    parse_expert_tensor,
)
from runtime.checkpoint_shards import Shards, SourceError, open_shards
from runtime.checkpoint_tensors import DTYPE_BYTES, TensorEntry, read_bytes

__all__ = ["BlockPart", "CheckpointSource", "SourceBlock", "SourceError"]

Module = Literal["gate_up", "down"]
MODULES: tuple[Module, Module] = ("gate_up", "down")
FLOAT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Consecutive rows of a block as they lie in one source tensor.

    name: the source tensor.
    file: the shard that holds it.
    dtype: BF16, F16 or F32.
    start: the first row's first byte in the file.
    rows: how many.
    """

    name: str
    file: Path
    dtype: str
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """One weight block: [rows, columns], its parts from the first row to the last.

    moe_layer: place among the layers that have experts; ``layer`` is the model's own number.
    """

    layer: int
    moe_layer: int
    expert: int
    module: Module
    rows: int
    columns: int
    parts: tuple[BlockPart, ...]

    @property
    def name(self) -> str:
        """Its name in a quantized checkpoint, the same for every family."""
        return f"model.layers.{self.layer}.mlp.experts.{self.expert}.{self.module}"

    def part_of_row(self, row: int) -> tuple[BlockPart, int]:
        """The part that holds a row, and the row's number inside it."""
        for part in self.parts:
            if row < part.rows:
                return part, row
            row -= part.rows
        raise IndexError(row)


@dataclass(frozen=True)
class CheckpointSource:
    """An opened checkpoint.

    folder: where it lies.
    config: ``config.json`` as it is.
    shape: the model's shape.
    blocks: weight blocks by layer, expert, module (gate_up before down).
    other_tensors: by shard, the tensors that are no expert's.
    shards: the shards and their headers.
    """

    folder: Path
    config: dict[str, Any]
    shape: LlmShape
    blocks: tuple[SourceBlock, ...]
    other_tensors: dict[str, dict[str, TensorEntry]]
    shards: Shards

    @classmethod
    def open(cls, folder: Path | str) -> CheckpointSource:
        """Open and check a checkpoint.

        Raises:
            SourceError: If it is not understood; names the file, and the tensor or field.
        """
        folder = Path(folder)
        config, shape = _read_config(folder)
        shards = open_shards(folder)
        experts: dict[ExpertTensorName, str] = {}
        other: dict[str, dict[str, TensorEntry]] = {file: {} for file in shards.headers}
        for name, file in shards.file_by_tensor.items():
            if is_expert_tensor(name):
                _add_expert(experts, name, folder / file)
            else:
                other[file][name] = shards.headers[file][name]
        blocks = _Blocks(folder, shape, shards, experts).all()
        other = {file: tensors for file, tensors in other.items() if tensors}
        return cls(folder, config, shape, blocks, other, shards)

    def read_rows(self, block: SourceBlock, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of a block: [stop - start, columns] float32.

        Raises:
            TensorFileError: If a shard cannot be read.
        """
        result = np.empty((stop - start, block.columns), np.float32)
        first = 0
        for part in block.parts:
            a, b = max(start, first), min(stop, first + part.rows)
            if a < b:
                row_bytes = block.columns * DTYPE_BYTES[part.dtype]
                raw = read_bytes(
                    part.file, part.start + (a - first) * row_bytes, (b - a) * row_bytes
                )
                result[a - start : b - start] = as_float32(raw, part.dtype).reshape(b - a, -1)
            first += part.rows
        return result

    @property
    def expert_bytes(self) -> int:
        """Bytes of all expert weights in the source."""
        return sum(
            part.rows * block.columns * DTYPE_BYTES[part.dtype]
            for block in self.blocks
            for part in block.parts
        )

    @property
    def other_bytes(self) -> int:
        """Bytes of all other tensors."""
        return sum(
            entry.num_bytes for tensors in self.other_tensors.values() for entry in tensors.values()
        )


def as_float32(raw: bytes | bytearray | memoryview, dtype: str) -> NDArray[np.float32]:
    """Little-endian numbers of a safetensors dtype as float32; exact for all three.

    Args:
        raw: Their bytes.
        dtype: BF16, F16 or F32.
    """
    if dtype == "BF16":
        bits = np.frombuffer(raw, "<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return np.frombuffer(raw, "<f2" if dtype == "F16" else "<f4").astype(np.float32)


def _read_config(folder: Path) -> tuple[dict[str, Any], LlmShape]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise SourceError(f"{folder}: no folder of a Hugging Face checkpoint")
    if (folder / "pagedweight.json").exists():
        raise SourceError(f"{folder}: already quantized (it holds pagedweight.json)")
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SourceError(f"{path}: no JSON: {error}") from None
    if not isinstance(config, dict):
        raise SourceError(f"{path}: no JSON object")
    found = config.get("model_type")
    if found not in MODEL_TYPES:
        raise SourceError(f"{path}: model_type: {found!r}, must be one of {', '.join(MODEL_TYPES)}")
    for table in (config, config.get("text_config")):
        if isinstance(table, dict) and table.get("quantization_config") is not None:
            raise SourceError(
                f"{path}: quantization_config: the checkpoint is already quantized, need one in"
                " bfloat16, float16 or float32"
            )
    try:
        shape = read_hf_config(config, name=folder.resolve().name, where=str(path))
    except HfConfigError as error:
        raise SourceError(str(error)) from None
    if not shape.moe_layers:
        raise SourceError(f"{path}: no layer has experts")
    if len({moe.num_experts for moe in shape.moe_layers}) > 1:
        raise SourceError(f"{path}: layers differ in their number of experts")
    return config, shape


def _add_expert(experts: dict[ExpertTensorName, str], name: str, path: Path) -> None:
    place = parse_expert_tensor(name)
    if place is None:
        raise SourceError(f"{path}: tensor {name}: no known layout of expert weights")
    if place in experts:
        raise SourceError(f"{path}: tensor {name} and {experts[place]} are the same matrix")
    experts[place] = name


class _Blocks:
    """Builds the blocks; every tensor that is used is crossed off."""

    def __init__(
        self, folder: Path, shape: LlmShape, shards: Shards, experts: dict[ExpertTensorName, str]
    ) -> None:
        self._folder = folder
        self._shape = shape
        self._shards = shards
        self._left = dict(experts)
        self._used: set[ExpertTensorName] = set()

    def all(self) -> tuple[SourceBlock, ...]:
        blocks = []
        moe_layer = 0
        for layer, layer_shape in enumerate(self._shape.layers):
            moe = layer_shape.moe
            if moe is None:
                continue
            sizes = {
                "gate_up": (2 * moe.intermediate_size, self._shape.hidden_size),
                "down": (self._shape.hidden_size, moe.intermediate_size),
            }
            for expert in range(moe.num_experts):
                for module in MODULES:
                    rows, columns = sizes[module]
                    parts = self._parts(layer, expert, moe.num_experts, module, rows, columns)
                    blocks.append(
                        SourceBlock(layer, moe_layer, expert, module, rows, columns, parts)
                    )
            moe_layer += 1
        for place, name in self._left.items():
            if place not in self._used:
                path = self._folder / self._shards.file_by_tensor[name]
                raise SourceError(
                    f"{path}: tensor {name}: one expert matrix too many for config.json"
                )
        return tuple(blocks)

    def _parts(
        self, layer: int, expert: int, experts: int, module: Module, rows: int, columns: int
    ) -> tuple[BlockPart, ...]:
        fused = ExpertTensorName(layer, None, module)
        if fused in self._left:
            return (self._part(fused, (experts, rows, columns), expert),)
        if module == "down":
            return (self._part(ExpertTensorName(layer, expert, "down"), (rows, columns), 0),)
        halves: tuple[Part, Part] = ("gate", "up")
        return tuple(
            self._part(ExpertTensorName(layer, expert, half), (rows // 2, columns), 0)
            for half in halves
        )

    def _part(self, place: ExpertTensorName, shape: tuple[int, ...], expert: int) -> BlockPart:
        name = self._left.get(place)
        if name is None:
            raise SourceError(
                f"{self._folder}: no tensor for the {place.part} matrix of layer {place.layer},"
                f" expert {place.expert}"
            )
        self._used.add(place)
        file = self._shards.file_by_tensor[name]
        entry = self._shards.headers[file][name]
        path = self._folder / file
        if entry.shape != shape:
            raise SourceError(
                f"{path}: tensor {name}: shape {list(entry.shape)}, config.json gives {list(shape)}"
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise SourceError(
                f"{path}: tensor {name}: dtype {entry.dtype}, must be one of"
                f" {', '.join(FLOAT_DTYPES)}"
            )
        rows, columns = shape[-2:]
        start = entry.start + expert * rows * columns * DTYPE_BYTES[entry.dtype]
        return BlockPart(name, path, entry.dtype, start, rows)
