"""The safetensors container: headers held to the file's real size, slices read, files streamed.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes without
gaps. Tensors stay raw bytes of a named dtype here, so bfloat16 needs no package that knows it.

Source:
    "Format" of the safetensors README, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
LENGTH_BYTES = 8


class TensorFileError(ValueError):
    """A file that is no whole safetensors file; the message names it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies.

    dtype: as the format spells it, e.g. ``BF16``.
    shape: [] for a scalar.
    start: its first byte, counted from the start of the file.
    num_bytes: its size.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; ``dtype`` as the format spells it."""
    return DTYPE_BYTES[dtype] * math.prod(shape)


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tensors by name, in order of their bytes, and the file's metadata.

    Raises:
        TensorFileError: If the file is missing, cut short, too long, or its header contradicts
            itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise TensorFileError(
                    f"{path}: no safetensors file, or cut short: a header of {length} bytes"
                    f" does not fit {size} bytes"
                )
            text = stream.read(length)
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise TensorFileError(f"{path}: the header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise TensorFileError(f"{path}: the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise TensorFileError(f"{path}: __metadata__ is no JSON object")
    data_start = LENGTH_BYTES + length
    entries = {name: _entry(path, name, item, data_start) for name, item in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    _require_gapless(path, entries, data_start, size)
    return entries, {str(key): str(value) for key, value in metadata.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice")
    return table


def _entry(path: Path, name: str, item: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise TensorFileError(
            f"{path}: tensor {name}: needs dtype, shape and data_offsets"
        ) from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise TensorFileError(
            f"{path}: tensor {name}: dtype {dtype!r}, must be one of {', '.join(DTYPE_BYTES)}"
        )
    if not all(type(size) is int and size >= 0 for size in (*shape, start, end)):
        raise TensorFileError(f"{path}: tensor {name}: sizes and offsets must be whole numbers")
    if end - start != tensor_bytes(dtype, shape):
        raise TensorFileError(
            f"{path}: tensor {name}: {end - start} bytes, but {dtype} {list(shape)} has"
            f" {tensor_bytes(dtype, shape)}"
        )
    return TensorEntry(dtype, shape, data_start + start, end - start)


def _require_gapless(
    path: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int
) -> None:
    place = data_start
    for name, entry in entries.items():
        if entry.start != place:
            raise TensorFileError(
                f"{path}: tensor {name} starts at byte {entry.start}, the one before ends at"
                f" {place}"
            )
        place += entry.num_bytes
    if place != size:
        kind = "cut short" if size < place else "longer than its tensors"
        raise TensorFileError(f"{path}: {kind}: {size} bytes, its header describes {place}")


def read_bytes(path: Path, start: int, num_bytes: int) -> bytearray:
    """A stretch of a file.

    Raises:
        TensorFileError: If the file cannot be read or has become shorter.
    """
    content = bytearray(num_bytes)
    try:
        with path.open("rb", buffering=0) as stream:
            stream.seek(start)
            view = memoryview(content)
            done = 0
            while done < num_bytes:
                count = stream.readinto(view[done:])
                if not count:
                    raise TensorFileError(f"{path}: cut short: ends at byte {start + done}")
                done += count
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read: {error.strerror}") from error
    return content


class TensorFileWriter:
    """Writes one safetensors file tensor by tensor, without holding it.

    The file has a temporary name until ``close``, which waits for the disk and renames; leaving
    the ``with`` block by an error removes it.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ) -> None:
        """Open the file and write its header.

        Args:
            path: Its final name.
            tensors: dtype and shape by name, in the order in which bytes will come.
            metadata: The file's metadata.

        Raises:
            OSError: If the disk refuses.
        """
        self._path = path
        self._partial = partial_path(path)
        self._hash = hashlib.sha256()
        self._written = 0
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        place = 0
        for name, (dtype, shape) in tensors.items():
            end = place + tensor_bytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
            place = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._size = LENGTH_BYTES + len(text) + place
        with named(path):
            self._stream = self._partial.open("wb")
        try:
            self.write(len(text).to_bytes(LENGTH_BYTES, "little"))
            self.write(text)
        except OSError:
            self._give_up()
            raise

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes of the tensors, in order.

        Raises:
            OSError: If the disk refuses.
        """
        with named(self._path):
            self._stream.write(content)
        self._hash.update(content)
        self._written += len(content)

    def close(self) -> tuple[int, str]:
        """Finish; returns the file's size in bytes and its SHA-256.

        Raises:
            ValueError: If fewer or more bytes came than the header says.
            OSError: If the disk refuses.
        """
        if self._written != self._size:
            raise ValueError(f"{self._path}: {self._written} bytes written of {self._size}")
        with named(self._path):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._partial.replace(self._path)
        return self._size, self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_up()

    def _give_up(self) -> None:
        with suppress(OSError):  # a full disk refuses the buffered rest once more
            self._stream.close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of the disk inside say which file they are about, even where the system does not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def partial_path(path: Path) -> Path:
    """The temporary name of a file that is being written by this process."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: If it cannot be read.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
