"""The decision log: every policy call and its orders, as JSON Lines.

Either engine writes it with ``DecisionLog``; replaying it through fresh policies must give the
same orders. Arrays are written in full where what a policy is told at one call is small, else as
a hash and the entries that have changed since the call before (``traces.array_deltas``).
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from traces.array_deltas import ArrayDeltas
from traces.errors import TraceError

FORMAT = "serving-twin-decisions"
VERSION = 2

_KINDS = {"n": int, "now": int | float, "policy": str, "call": str, "args": dict, "orders": object}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One policy call: what the policy was told and what it ordered.

    Attributes:
        n: Number of the call, from 0.
        now: Seconds since the start of the run.
        policy: Name of the policy object within the run, e.g. ``routing``.
        call: Method that was called.
        args: Keyword -> plain value.
        orders: Plain value of the answer.
    """

    n: int
    now: float
    policy: str
    call: str
    args: Mapping[str, Any]
    orders: Any


@dataclass(slots=True)
class DecisionLog:
    """Collects calls of one run, in order, up to ``max_calls``.

    Attributes:
        policies: Policy object's name -> how to build it afresh (catalog kind, name, seed, ...).
        max_calls: Later calls are counted, not kept: a prefix of a run replays as well.
    """

    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_calls: int = 10_000
    decisions: list[Decision] = field(default_factory=list)
    calls_left_out: int = 0
    _deltas: ArrayDeltas = field(default_factory=ArrayDeltas, repr=False)

    @property
    def num_calls(self) -> int:
        """Calls kept."""
        return len(self.decisions)

    @property
    def is_full(self) -> bool:
        """Whether further calls are only counted."""
        return self.num_calls >= self.max_calls

    def record(
        self,
        policy: str,
        call: str,
        args: Mapping[str, Any],
        orders: Any,
        *,
        now: float,
        arrays: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Keep one call; numpy arrays become lists.

        Args:
            policy: Name of the policy object within the run.
            call: Method that was called.
            args: Keyword -> value.
            orders: The answer.
            now: Seconds since the start of the run.
            arrays: Further keywords with large arrays, written as changes per policy and keyword.
        """
        if self.is_full:
            self.calls_left_out += 1
            return
        changes = {
            key: self._deltas.encode(f"{policy}.{key}", array)
            for key, array in (arrays or {}).items()
        }
        self._keep(
            Decision(
                n=self.num_calls,
                now=now,
                policy=policy,
                call=call,
                args={key: plain(value) for key, value in args.items()} | changes,
                orders=plain(orders),
            )
        )

    def _keep(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def to_bytes(self) -> bytes:
        """The log as gzipped JSON Lines; the same log gives the same bytes."""
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as stream:
            stream.write(_line(self._header()))
            for decision in self.decisions:
                stream.write(_line_of(decision))
        return buffer.getvalue()

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "policies": self.policies,
            "calls": self.num_calls,
            "calls_left_out": self.calls_left_out,
        }


@dataclass(slots=True)
class CompactDecisionLog(DecisionLog):
    """The same for runs that last: calls are kept compressed, some fifty bytes each.

    ``decisions`` stays empty. ``to_bytes`` may be asked at any time, and the log goes on.
    """

    _calls: int = 0
    _done: bytearray = field(default_factory=bytearray, repr=False)
    _compressor: Any = field(default_factory=lambda: _member(), repr=False)

    @property
    def num_calls(self) -> int:
        """Calls kept."""
        return self._calls

    def to_bytes(self) -> bytes:
        """The log as gzipped JSON Lines: one member for the header, others for the calls."""
        self._done += self._compressor.flush()
        self._compressor = _member()
        return gzip.compress(_line(self._header()), mtime=0) + bytes(self._done)

    def _keep(self, decision: Decision) -> None:
        self._done += self._compressor.compress(_line_of(decision))
        self._calls += 1


def _member() -> Any:
    """A gzip member that begins."""
    return zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS)


def _line_of(decision: Decision) -> bytes:
    return _line(
        {
            "n": decision.n,
            "now": decision.now,
            "policy": decision.policy,
            "call": decision.call,
            "args": decision.args,
            "orders": decision.orders,
        }
    )


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, separators=(",", ":"), allow_nan=True) + "\n").encode()


def plain(value: Any) -> Any:
    """Arrays, numpy scalars, tuples and dataclass-like orders as JSON values."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    if hasattr(value, "__dataclass_fields__"):
        names = cast(Mapping[str, Any], value.__dataclass_fields__)
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def read_decisions(path: str | Path) -> tuple[dict[str, Any], Iterator[Decision]]:
    """Header and calls of a log.

    Raises:
        TraceError: Naming file and line when the log is not one, is of another version, ends in
            the middle of a line, or lacks, repeats or swaps calls.
    """
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise TraceError(f"{path}: is not a regular file")
        raw = file.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: decision log cannot be read: {error}") from error
    lines = text.splitlines()
    header = _parse(path, 1, lines[0] if lines else b"")
    if header.get("format") != FORMAT:
        raise TraceError(f"{path}:1: not a decision log (no format {FORMAT!r} in its first line)")
    if header.get("version") != VERSION:
        raise TraceError(f"{path}:1: version: must be {VERSION}, found {header.get('version')!r}")
    for name, kind in (("policies", dict), ("calls", int), ("calls_left_out", int)):
        if not _is(header.get(name), kind):
            raise TraceError(f"{path}:1: {name}: missing or damaged, found {header.get(name)!r}")
    if len(lines) - 1 != header["calls"]:
        raise TraceError(
            f"{path}: holds {len(lines) - 1:,} calls, but its first line says {header['calls']:,}"
        )
    return header, _decisions(path, lines)


def _decisions(path: str | Path, lines: list[bytes]) -> Iterator[Decision]:
    now = 0.0
    for number, line in enumerate(lines[1:], start=2):
        entry = _parse(path, number, line)
        if set(entry) != set(_KINDS):
            odd = sorted(set(entry) ^ set(_KINDS))
            raise TraceError(f"{path}:{number}: {', '.join(odd)}: missing or unknown")
        for name, kind in _KINDS.items():
            if not _is(entry[name], kind):
                raise TraceError(f"{path}:{number}: {name}: damaged, found {entry[name]!r:.60}")
        if entry["n"] != number - 2:
            raise TraceError(f"{path}:{number}: n: must be {number - 2}, found {entry['n']}")
        if not now <= entry["now"] < math.inf:
            raise TraceError(
                f"{path}:{number}: now: must be >= {now:g}, the time of the call before, "
                f"found {entry['now']!r}"
            )
        now = entry["now"]
        yield Decision(**entry)


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _parse(path: str | Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError(
            f"{path}:{number}: not a JSON line (the log seems cut): {line[:60]!r}"
        ) from None
    if not isinstance(value, dict):
        raise TraceError(f"{path}:{number}: must be a JSON object, found {line[:60]!r}")
    return value
