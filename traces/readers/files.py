"""A trace file as bytes: opened, unpacked, and cut into chunks of whole lines."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from traces.errors import TraceError

CHUNK_BYTES = 1 << 22
PIECE_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 28

_BOM = b"\xef\xbb\xbf"
_ENDINGS = {".gz", ".bz2", ".xz", ".zst", ".csv", ".tsv", ".txt", ".jsonl", ".ndjson", ".json"}
_NOT_TEXT = {
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"7z\xbc\xaf": "a 7-zip archive",
    b"SQLite format 3": "an SQLite database",
    b"%PDF": "a PDF document",
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some whole lines of a file.

    Attributes:
        data: The bytes of the lines, newlines included.
        first_line: Number of the first of them in the file, from 1.
        is_torn: True when the file ends in this chunk and its last line has no newline.
    """

    data: bytes
    first_line: int
    is_torn: bool


def pieces(chunk: Chunk, *, piece_bytes: int = PIECE_BYTES) -> Iterator[Chunk]:
    """The chunk in smaller chunks of whole lines, in order."""
    start, line = 0, chunk.first_line
    while start < len(chunk.data):
        end = chunk.data.find(b"\n", start + piece_bytes) + 1 or len(chunk.data)
        data = chunk.data[start:end]
        yield Chunk(data, line, is_torn=chunk.is_torn and end == len(chunk.data))
        start, line = end, line + data.count(b"\n")


def is_utf8(data: bytes) -> bool:
    """Whether the bytes are text."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def trace_name(path: Path) -> str:
    """The file's name without the endings of data and packing: ``conv`` for ``conv.csv.gz``."""
    name = path.name
    while Path(name).suffix.lower() in _ENDINGS and Path(name).stem:
        name = Path(name).stem
    return name


def chunks(path: Path, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The file in chunks of whole lines, unpacked, without a byte order mark.

    gzip, bzip2, xz and zstd are recognised by their first bytes, whatever the file is called.
    A chunk has about ``chunk_bytes`` bytes, more where one line is longer.

    Raises:
        TraceError: If the file is missing, a directory, unreadable, damaged, an archive or not
            text, or has a line of more than 256 MiB.
    """
    with _opened(path) as stream:
        line, pending = 1, [_first_block(stream, path, chunk_bytes)]
        pending_bytes = len(pending[0])
        while True:
            block = _read(stream, path, line, chunk_bytes)
            if not block:
                break
            cut = pending[-1].rfind(b"\n") + 1
            if cut:
                data = b"".join([*pending[:-1], pending[-1][:cut]])
                yield Chunk(data, line, is_torn=False)
                line += data.count(b"\n")
                pending = [pending[-1][cut:]]
                pending_bytes = len(pending[0])
            pending.append(block)
            pending_bytes += len(block)
            if pending_bytes > LONGEST_LINE_BYTES + 2 * chunk_bytes:
                raise TraceError(f"{path}, line {line}: longer than 256 MiB, not a line of a trace")
        data = b"".join(pending)
        if data:
            yield Chunk(data, line, is_torn=not data.endswith(b"\n"))


def _first_block(stream: IO[bytes], path: Path, chunk_bytes: int) -> bytes:
    block = _read(stream, path, 1, max(chunk_bytes, 512))
    for magic, what in _NOT_TEXT.items():
        if block.startswith(magic):
            raise TraceError(f"{path}: is {what}, not a text file: unpack or export it first")
    if block[257:262] == b"ustar":
        raise TraceError(
            f"{path}: is a tar archive, not one request trace: unpack it and give one file; "
            "client statistics such as ServeGen's are not requests, use them as a generator"
        )
    if block.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TraceError(f"{path}: is UTF-16 text: save it as UTF-8")
    if b"\0" in block[:65536]:
        raise TraceError(f"{path}: is a binary file (zero bytes), not CSV or JSON Lines")
    return block.removeprefix(_BOM)


def _read(stream: IO[bytes], path: Path, line: int, num_bytes: int) -> bytes:
    try:
        return stream.read(num_bytes)
    except EOFError:
        raise TraceError(
            f"{path}: the packed data ends early, after line {line}: "
            "the file seems cut, fetch it again"
        ) from None
    except (OSError, zlib.error, lzma.LZMAError) as error:
        raise TraceError(
            f"{path}: cannot be read after line {line}, the file seems damaged ({_one_line(error)})"
        ) from None


def _opened(path: Path) -> IO[bytes]:
    try:
        if path.is_dir():
            raise TraceError(_directory_message(path))
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: is not a regular file")
        with path.open("rb") as stream:
            magic = stream.read(6)
        return _unpacked(path, magic)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except PermissionError:
        raise TraceError(f"{path}: may not be read (no permission)") from None
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: cannot be opened ({_one_line(error)})") from None


def _unpacked(path: Path, magic: bytes) -> IO[bytes]:
    if magic.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if magic.startswith(b"BZh"):
        return bz2.open(path, "rb")
    if magic == b"\xfd7zXZ\x00":
        return lzma.open(path, "rb")
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow as pa

        unpacked: IO[bytes] = pa.input_stream(str(path), compression="zstd")
        return unpacked
    return path.open("rb")


def _directory_message(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    if any("chunk-" in name or name.endswith((".tar.gz", ".tar")) for name in names):
        advice = "client statistics such as ServeGen's are not requests, use them as a generator"
    else:
        advice = "give one file"
    held = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return f"{path}: is a directory, {advice} (it holds {held or 'nothing'})"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
