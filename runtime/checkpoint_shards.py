"""The safetensors shards of a checkpoint folder: one file, or several with an index."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint_tensors import TensorEntry, TensorFileError, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = {
    ".bin": "PyTorch pickle", ".pt": "PyTorch pickle", ".pth": "PyTorch pickle",
    ".gguf": "GGUF", ".h5": "Keras", ".msgpack": "Flax", ".onnx": "ONNX", ".npz": "NumPy",
}  # fmt: skip


class SourceError(ValueError):
    """A checkpoint that is not understood; the message names the file and the tensor or field."""


@dataclass(frozen=True)
class Shards:
    """Headers of all shards.

    headers: by file name, its tensors.
    file_by_tensor: the file of every tensor.
    """

    headers: dict[str, dict[str, TensorEntry]]
    file_by_tensor: dict[str, str]


def open_shards(folder: Path) -> Shards:
    """Read and check all headers.

    Raises:
        SourceError: If there are no shards, one is missing or damaged, or index and shards
            disagree.
    """
    index_path = folder / INDEX
    if index_path.exists():
        named = _read_index(index_path)
        files = sorted(set(named.values()))
    elif (folder / SINGLE).exists():
        named = None
        files = [SINGLE]
    else:
        raise SourceError(_no_shards(folder))
    headers: dict[str, dict[str, TensorEntry]] = {}
    file_by_tensor: dict[str, str] = {}
    for file in files:
        try:
            headers[file], _ = read_header(folder / file)
        except TensorFileError as error:
            raise SourceError(str(error)) from None
        for name in headers[file]:
            if name in file_by_tensor:
                raise SourceError(
                    f"{folder / file}: tensor {name} is also in {file_by_tensor[name]}"
                )
            file_by_tensor[name] = file
    if named is not None:
        _require_agreement(folder, named, file_by_tensor)
    return Shards(headers, file_by_tensor)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SourceError(f"{path}: no JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: weight_map: must be a table of tensors and their files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise SourceError(f"{path}: weight_map: {name}: {file!r} is no file of this folder")
        if not file.endswith(".safetensors"):
            raise SourceError(f"{path}: weight_map: {name}: {file} is no safetensors file")
    return weight_map


def _require_agreement(folder: Path, named: dict[str, str], found: dict[str, str]) -> None:
    for name, file in named.items():
        if found.get(name) != file:
            where = f", it is in {found[name]}" if name in found else ""
            raise SourceError(f"{folder / file}: tensor {name} of {INDEX} is not there{where}")
    for name, file in found.items():
        if name not in named:
            raise SourceError(f"{folder / file}: tensor {name} is not in {INDEX}")


def _no_shards(folder: Path) -> str:
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    shards = [name for name in files if name.endswith(".safetensors")]
    if shards:
        return f"{folder}: {shards[0]} without {INDEX}; need {SINGLE} or an index"
    for name in files:
        kind = OTHER_WEIGHTS.get(Path(name).suffix)
        if kind:
            return f"{folder / name}: {kind} weights; need safetensors"
    return f"{folder}: no safetensors weights ({SINGLE} or {INDEX})"
