"""Which column of a file plays which part, whatever the family."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.readers.times import TimeUnit
from traces.request import Trace

Numbers = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the caller of ``read_trace`` asked for; see there."""

    columns: Mapping[str, str] | None = None
    time_unit: TimeUnit | None = None
    skip_bad_rows: bool = False
    block_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """A rule between the number columns of one row.

    Attributes:
        column: Where to look for the fault.
        rule: In words.
        holds: Number columns, each [n], -> [n] bool.
    """

    column: str
    rule: str
    holds: Callable[[Numbers], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Columns by part; names as the file spells them.

    Attributes:
        format: Name of the format.
        prompt: Prompt tokens.
        output: Output tokens.
        arrival: Arrival time, None where there is none.
        time_unit: Unit of the arrival times, None to infer it.
        request_id: Unique name, or None.
        session_id: Conversation, or None; a row may leave it empty.
        block_ids: Ids of prompt blocks, or None.
        block_tokens: Tokens per block, 0 without blocks.
        numbers: Further columns of finite numbers, NaN where empty.
        row_rules: Rules between those.
        notes: What was decided on the way here.
    """

    format: str
    prompt: str
    output: str
    arrival: str | None = None
    time_unit: TimeUnit | None = None
    request_id: str | None = None
    session_id: str | None = None
    block_ids: str | None = None
    block_tokens: int = 0
    numbers: tuple[str, ...] = ()
    row_rules: tuple[RowRule, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str | None, ...]:
        """Prompt, output, arrival, request id, session id, block ids, then the numbers."""
        return (
            self.prompt,
            self.output,
            self.arrival,
            self.request_id,
            self.session_id,
            self.block_ids,
            *self.numbers,
        )


def canonical(name: str) -> str:
    """A name without case, spaces and signs: ``Request tokens`` -> ``requesttokens``."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


class Names:
    """Column names of a file, found whatever their case, spaces and signs.

    Attributes:
        path: The file.
        spelled: The names as they stand there, in order.
    """

    def __init__(self, path: Path, spelled: Iterable[str]) -> None:
        self.path = path
        self.spelled = tuple(spelled)
        self._by_canonical: dict[str, list[str]] = {}
        for name in self.spelled:
            self._by_canonical.setdefault(canonical(name), []).append(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.spelled)

    def has(self, *wanted: str) -> bool:
        """Whether all of these are there."""
        return all(canonical(name) in self._by_canonical for name in wanted)

    def find(self, wanted: str) -> str | None:
        """The name as the file spells it, None where it is not there.

        Raises:
            TraceError: If several columns have that name.
        """
        found = self._by_canonical.get(canonical(wanted), [])
        if wanted in found and found.count(wanted) == 1:
            return wanted
        if len(found) > 1:
            raise TraceError(
                f"{self.path}: several columns are named {wanted}: {', '.join(found)}; "
                "each may stand once"
            )
        return found[0] if found else None

    def need(self, wanted: str, format_name: str) -> str:
        """As ``find``, but the format cannot do without it.

        Raises:
            TraceError: If no column or several have that name.
        """
        found = self.find(wanted)
        if found is None:
            raise TraceError(
                f"{self.path}: format {format_name} needs a column {wanted}; "
                f"columns found: {self.listed()}"
            )
        return found

    def listed(self, most: int = 20) -> str:
        """The names for a message."""
        names = [name if len(name) <= 40 else f"{name[:37]}..." for name in self.spelled[:most]]
        more = f", ... ({len(self.spelled)} in all)" if len(self.spelled) > most else ""
        return (", ".join(names) or "none") + more


def with_measured(trace: Trace, **measured_s: NDArray[np.float64]) -> Trace:
    """The trace with measured times, each [n] float64 in seconds, NaN where unknown."""
    return replace(trace, measured={**trace.measured, **measured_s})
