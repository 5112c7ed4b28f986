"""Reads ServeGen client statistics: what one cloud saw of each client of one model.

``chunk-N-trace.csv`` has no header; a row is one window of client N: start (s), rate (requests/s),
CV of the gaps, fitted process (``Gamma``, ``Weibull`` or empty when idle), its two parameters.
``chunk-N-dataset.json`` maps the start of a longer window to the laws of the lengths, each a string
``{length: probability}``.

Source:
    github.com/alibaba/ServeGen; Xiang et al., ServeGen, NSDI 2026.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import math
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError

_CHUNK = re.compile(r"(?:^|/)chunk-(\d+)-(trace\.csv|dataset\.json)$")
_WHOLE_KEY = re.compile(r"([{,]\s*)(-?\d+)\s*:")
_PROCESSES = ("", "Gamma", "Weibull")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLaw:
    """The law of one length: tokens [k] int64 >= 0 and their probability [k], summing to 1."""

    tokens: NDArray[np.int64]
    probability: NDArray[np.float64]

    def mean(self) -> float:
        """Mean tokens."""
        return float(self.tokens @ self.probability)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client's statistics.

    Attributes:
        client_id: N of the file names.
        start_s: [w] starts of the arrival windows, rising evenly.
        end_s: End of the last window.
        rate_per_s: [w] requests per second, >= 0.
        gap_cv: [w] CV of the gaps as observed.
        process: [w] ``Gamma``, ``Weibull`` or empty.
        shape: [w] first parameter of the process, > 0 where there is one.
        dataset_name: Name of the length file, or None.
        dataset: Window start -> the two strings of laws, unparsed; None without a length file.
    """

    client_id: int
    start_s: NDArray[np.float64]
    end_s: float
    rate_per_s: NDArray[np.float64]
    gap_cv: NDArray[np.float64]
    process: tuple[str, ...]
    shape: NDArray[np.float64]
    dataset_name: str | None
    dataset: dict[float, tuple[str, str]] | None

    def length_starts_s(self) -> NDArray[np.float64]:
        """Starts of the length windows, rising; empty without a length file."""
        return np.array(sorted(self.dataset or {}), dtype=np.float64)

    def length_laws(self, start_s: float) -> tuple[TokenLaw, TokenLaw] | None:
        """Laws of P and D in the length window with that start; None where it saw no requests.

        Raises:
            TraceError: If the text is not a law of lengths.
        """
        texts = (self.dataset or {}).get(start_s)
        if texts is None:
            return None
        where = f"{self.dataset_name}, window {start_s:g}"
        prompts = _token_law(texts[0], f"{where}, input_tokens")
        outputs = _token_law(texts[1], f"{where}, output_tokens")
        return None if prompts is None or outputs is None else (prompts, outputs)


def read_clients(
    paths: str | Path | Sequence[str | Path], *, clients: Sequence[int] | None = None
) -> list[Client]:
    """All clients of the given directory, tar archives or both, by id.

    Args:
        paths: A directory with the chunk files or with tar archives of them, or a list of
            archives and directories.
        clients: Ids to read; None: all.

    Raises:
        TraceError: If a path cannot be read, holds no client, or a file breaks the format.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    wanted = None if clients is None else set(clients)
    rows: dict[int, tuple[str, bytes]] = {}
    datasets: dict[int, tuple[str, bytes]] = {}
    for path in listed:
        for name, client_id, kind, content in _chunks(Path(path), wanted):
            (rows if kind == "trace.csv" else datasets)[client_id] = (name, content)
    if wanted is not None and wanted - rows.keys():
        missing = ", ".join(str(c) for c in sorted(wanted - rows.keys()))
        raise TraceError(f"{_names(listed)}: no chunk-N-trace.csv for client {missing}")
    if not rows:
        raise TraceError(f"{_names(listed)}: no ServeGen client files (chunk-N-trace.csv) found")
    return [_client(c, rows[c], datasets.get(c)) for c in sorted(rows)]


def _names(paths: Sequence[str | Path]) -> str:
    return ", ".join(str(path) for path in paths) or "(no path)"


def _chunks(path: Path, wanted: set[int] | None) -> Iterator[tuple[str, int, str, bytes]]:
    """(name, client, kind, content) of every chunk file under a path."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir())
        if any(_CHUNK.search(name) for name in names):
            for name in names:
                found = _CHUNK.search(name)
                if found and (wanted is None or int(found[1]) in wanted):
                    inner = path / name
                    yield str(inner), int(found[1]), found[2], _read(inner)
        else:
            for name in names:
                if name.endswith((".tar", ".tar.gz", ".tgz")):
                    yield from _tar_chunks(path / name, wanted)
        return
    if path.suffix in (".csv", ".json") and (found := _CHUNK.search(path.name)):
        yield str(path), int(found[1]), found[2], _read(path)
        return
    yield from _tar_chunks(path, wanted)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def _tar_chunks(path: Path, wanted: set[int] | None) -> Iterator[tuple[str, int, str, bytes]]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                found = _CHUNK.search(member.name)
                if not found or not member.isfile():
                    continue
                if wanted is not None and int(found[1]) not in wanted:
                    continue
                content = archive.extractfile(member)
                if content is not None:
                    yield f"{path}:{member.name}", int(found[1]), found[2], content.read()
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile) or error.strerror is None:
            raise TraceError(f"{path}: damaged archive ({error})") from error
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    except (tarfile.TarError, EOFError, zlib.error) as error:
        reason = (str(error) or "ends early").splitlines()[0]
        raise TraceError(f"{path}: not a tar archive, or damaged ({reason})") from error


def _client(client_id: int, trace: tuple[str, bytes], dataset: tuple[str, bytes] | None) -> Client:
    name, content = trace
    rows = [row for row in csv.reader(io.StringIO(_text(name, content))) if row]
    if not rows:
        raise TraceError(f"{name}: empty; a row a window is needed")
    columns = _columns(name, rows)
    start_s = columns[0]
    width_s = float(start_s[1] - start_s[0]) if len(rows) > 1 else 600.0
    if (len(rows) > 1 and not np.allclose(np.diff(start_s), width_s)) or width_s <= 0.0:
        at = int(np.argmax(np.abs(np.diff(start_s) - width_s) > 1e-6)) + 2
        raise TraceError(
            f"{name}, line {at}, column 1 (window start): windows must follow each other evenly, "
            f"found {rows[at - 1][0]!r} after {rows[at - 2][0]!r}"
        )
    return Client(
        client_id=client_id,
        start_s=start_s,
        end_s=float(start_s[-1]) + width_s,
        rate_per_s=columns[1],
        gap_cv=columns[2],
        process=tuple(row[3].strip() for row in rows),
        shape=columns[4],
        dataset_name=None if dataset is None else dataset[0],
        dataset=None if dataset is None else _dataset(*dataset),
    )


def _columns(name: str, rows: list[list[str]]) -> dict[int, NDArray[np.float64]]:
    """Numeric columns by position, every rule of a row checked."""
    columns = {i: np.empty(len(rows)) for i in (0, 1, 2, 4, 5)}
    for n, row in enumerate(rows):
        line = f"{name}, line {n + 1}"
        if len(row) != 6:
            raise TraceError(
                f"{line}: 6 columns are needed (window start, rate, cv, process, two parameters), "
                f"found {len(row)}"
            )
        for i, column in columns.items():
            try:
                column[n] = float(row[i])
            except ValueError:
                raise TraceError(
                    f"{line}, column {i + 1}: must be a number, found {row[i]!r}"
                ) from None
        if row[3].strip() not in _PROCESSES:
            raise TraceError(
                f"{line}, column 4 (process): must be Gamma, Weibull or empty, found {row[3]!r}"
            )
        if not (math.isfinite(columns[1][n]) and columns[1][n] >= 0.0):
            raise TraceError(f"{line}, column 2 (rate): must be finite and >= 0, found {row[1]!r}")
        if row[3].strip() and not (math.isfinite(columns[4][n]) and columns[4][n] > 0.0):
            raise TraceError(f"{line}, column 5 (shape): must be finite and > 0, found {row[4]!r}")
    return columns


def _dataset(name: str, content: bytes) -> dict[float, tuple[str, str]]:
    try:
        windows = json.loads(_text(name, content))
    except json.JSONDecodeError as error:
        raise TraceError(f"{name}, line {error.lineno}: not JSON ({error.msg})") from error
    if not isinstance(windows, dict):
        raise TraceError(f"{name}: must be an object of window start -> laws")
    dataset: dict[float, tuple[str, str]] = {}
    for key, window in windows.items():
        try:
            start_s = float(key)
            texts = (window["input_tokens"], window["output_tokens"])
        except (ValueError, TypeError, KeyError):
            raise TraceError(
                f"{name}, window {key!r}: must be a number of seconds with input_tokens and "
                "output_tokens"
            ) from None
        dataset[start_s] = texts
    return dataset


def _token_law(text: object, where: str) -> TokenLaw | None:
    """A law from text like ``{12: 0.5, 80: 0.5}``; None for an empty one."""
    law = _literal(text) if isinstance(text, str) else text
    if not isinstance(law, dict):
        raise TraceError(f"{where}: must be {{length: probability}}, found {str(text)[:40]!r}")
    if not law:
        return None
    try:
        tokens = np.array([int(key) for key in law], dtype=np.int64)
        probability = np.array([float(value) for value in law.values()])
    except (ValueError, TypeError, OverflowError):
        raise TraceError(f"{where}: lengths must be whole, probabilities numbers") from None
    if int(tokens.min()) < 0:
        raise TraceError(f"{where}: lengths must be >= 0, found {int(tokens.min())}")
    if not np.all(np.isfinite(probability)) or float(probability.min()) < 0.0:
        raise TraceError(f"{where}: probabilities must be finite and >= 0")
    total = float(probability.sum())
    if abs(total - 1.0) > 1e-3:
        raise TraceError(f"{where}: probabilities must sum to 1, found {total:g}")
    return TokenLaw(tokens=tokens, probability=probability / total)


def _literal(text: str) -> object:
    """The literal in a text, or None. With its keys quoted it is JSON, which reads 10x faster."""
    try:
        return json.loads(_WHOLE_KEY.sub(r'\1"\2":', text))
    except json.JSONDecodeError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not UTF-8 text (byte {error.start})") from error
