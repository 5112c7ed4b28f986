"""Arrival times as they are written, and the seconds they mean."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from traces.readers.arrow_arrays import numbers, whole_numbers
from traces.readers.rules import BadRow, number_in_json, number_in_text, shown

TimeUnit = Literal["s", "ms", "us", "ns"]
TimeKind = Literal["number", "stamp", "zoned stamp"]
TICKS_PER_S: dict[TimeUnit, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

_RULE = "arrival time must be a finite number >= 0 or a date stamp"
_ONE_KIND = "arrival times must all be numbers, all stamps with a zone, or all stamps without"
_STAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[T ]([0-9]{2})(?::([0-9]{2})(?::([0-9]{2})(?:\.([0-9]+))?)?)?)?"
    r" ?(Z|UTC|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)
_PLAIN_WHOLE = "^[0-9]{1,19}$"
_PLAIN_NUMBER = r"^[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?$"
# A moment between 2001 and 2096, counted from 1970: no trace that counts from its own start in
# the same unit begins that late.
_EPOCH_FROM_S, _EPOCH_TO_S = 10**9, 4 * 10**9
_UNIT_ENDINGS: dict[str, TimeUnit] = {
    **dict.fromkeys(("s", "sec", "secs", "seconds"), "s"),
    **dict.fromkeys(("ms", "msec", "millis", "milliseconds"), "ms"),
    **dict.fromkeys(("us", "usec", "micros", "microseconds"), "us"),
    **dict.fromkeys(("ns", "nsec", "nanos", "nanoseconds"), "ns"),
}
_UNIT_ENDING = re.compile(rf"[_ .(\[-]({'|'.join(_UNIT_ENDINGS)})[)\]]?$")

Raw = NDArray[np.int64] | NDArray[np.float64]


def unit_of_name(column: str) -> TimeUnit | None:
    """The unit that a column's name ends in: ``ms`` for ``arrival_ms`` and ``time (ms)``."""
    match = _UNIT_ENDING.search(column.strip().casefold())
    return _UNIT_ENDINGS[match[1]] if match else None


def without_unit(column: str) -> str:
    """The column's name in small letters without a unit at its end."""
    return _UNIT_ENDING.sub("", column.strip().casefold())


class TimeColumn:
    """Reads arrival times of one column; all of them have to be of one kind.

    Raw values are int64 or float64 in the column's own unit; stamps are int64 nanoseconds since
    1970.

    Attributes:
        column: Name in the file.
        kind: What the values are, None before the first.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self.kind: TimeKind | None = None

    def from_text(self, text: str) -> int | float:
        """The raw value of a CSV field.

        Raises:
            BadRow: If it is neither a finite number >= 0 nor a date stamp, or of another kind
                than the values before.
        """
        number = None if text[4:5] == "-" else number_in_text(text)
        if number is not None:
            return self._number(number, text)
        return self._stamp(text)

    def from_json(self, value: object) -> int | float:
        """The raw value of a JSON value; raises as ``from_text``."""
        if isinstance(value, str):
            return self._stamp(value)
        return self._number(number_in_json(value), value)

    def from_text_array(self, texts: Any) -> Raw | None:
        """Raw values of an Arrow array of strings, or None where one needs a closer look."""
        if self.kind in (None, "number"):
            plain = _plain_numbers(texts)
            if plain is not None:
                self.kind = "number"
                return plain
        zones: list[TimeKind] = ["stamp", "zoned stamp"] if self.kind is None else [self.kind]
        for kind in zones:
            stamps = _plain_stamps(texts, kind) if kind != "number" else None
            if stamps is not None:
                self.kind = kind
                return stamps
        return None

    def from_number_array(self, values: Raw) -> Raw | None:
        """The values themselves, or None where one needs a closer look."""
        if self.kind not in (None, "number"):
            return None
        if len(values) and not (float(values.min()) >= 0 and math.isfinite(float(values.max()))):
            return None
        self.kind = "number"
        return values

    def _number(self, number: int | float | None, value: object) -> int | float:
        if number is None or not math.isfinite(number) or not 0 <= number < 2**63:
            raise BadRow(self.column, shown(value), _RULE)
        self._of_kind("number", value)
        return number

    def _stamp(self, text: str) -> int:
        match = _STAMP.fullmatch(text.strip())
        if match is None:
            raise BadRow(self.column, shown(text), _RULE)
        date, hour, minute, second, fraction, zone = match.groups()
        day, h, m, s = _day(date), int(hour or 0), int(minute or 0), int(second or 0)
        if day is None or h > 23 or m > 59 or s > 59:
            raise BadRow(self.column, shown(text), _RULE, "no such day or hour")
        nanoseconds = int(f"{fraction or '0':0<9}"[:9])
        whole_s = 86_400 * day + 3600 * h + 60 * m + s - _zone_offset_s(zone)
        value = whole_s * 10**9 + nanoseconds
        if not 0 <= value < 2**63:
            raise BadRow(self.column, shown(text), _RULE, "allowed years: 1970 to 2261")
        self._of_kind("stamp" if zone is None else "zoned stamp", text)
        return value

    def _of_kind(self, kind: TimeKind, value: object) -> None:
        if self.kind is None:
            self.kind = kind
        elif self.kind != kind:
            raise BadRow(self.column, shown(value), _ONE_KIND, f"before: {self.kind}")


def seconds_from_start(
    raw: Raw, times: TimeColumn, *, given: TimeUnit | None, known: TimeUnit | None
) -> tuple[NDArray[np.float64], list[str]]:
    """Seconds since the earliest value, in the order of ``raw``, and what was assumed.

    Args:
        raw: [n] values of ``times``, n >= 1.
        times: The column they come from.
        given: The unit the user named.
        known: The unit that the format prescribes.

    Returns:
        [n] float64 >= 0, and notes.
    """
    start = raw.min()
    if times.kind != "number":
        notes = ["time_unit was ignored: arrival times are date stamps"] if given else []
        return (raw - start).astype(np.float64) / TICKS_PER_S["ns"], notes
    unit, note = _unit(times.column, float(start), given=given, known=known)
    notes = [note] if note else []
    seconds = (raw - start).astype(np.float64) / TICKS_PER_S[unit]
    start_s = float(start) / TICKS_PER_S[unit]
    if 0 < start_s < _EPOCH_FROM_S:
        notes.append(f"the first arrival, at {start_s:g} s in the file, is taken as time 0")
    return seconds, notes


def tick_note(arrival_s: NDArray[np.float64]) -> str | None:
    """A sentence where at most half of the sorted times are distinct, else None."""
    if len(arrival_s) < 20:
        return None
    gaps = np.diff(arrival_s)
    gaps = gaps[gaps > 0]
    num_distinct = len(gaps) + 1
    if num_distinct * 2 > len(arrival_s):
        return None
    step = f", typically {np.median(gaps):.3g} s apart" if len(gaps) else ""
    return (
        f"arrival times come in ticks: {num_distinct} distinct times for {len(arrival_s)} "
        f"requests{step}; gaps below a tick say nothing"
    )


def _unit(
    column: str, start: float, *, given: TimeUnit | None, known: TimeUnit | None
) -> tuple[TimeUnit, str]:
    if given is not None:
        return given, f"column {column} is read in {given}, as asked"
    if known is not None:
        return known, ""
    named = unit_of_name(column)
    if named is not None:
        return named, f"column {column} is read in {named}, by its name"
    for unit, ticks in TICKS_PER_S.items():
        if _EPOCH_FROM_S * ticks <= start < _EPOCH_TO_S * ticks:
            return unit, f"column {column} is read as {unit} since 1970, by its size"
    return "s", f"column {column} is read in seconds; give time_unit if it is not"


@lru_cache(maxsize=4096)
def _day(date: str) -> int | None:
    """Days from 1970-01-01 to a date as in ``2024-05-10``; None where there is no such day."""
    try:
        return int(np.datetime64(date, "D").astype(np.int64))
    except ValueError:
        return None


def _zone_offset_s(zone: str | None) -> int:
    if zone in (None, "Z", "UTC"):
        return 0
    digits = zone[1:].replace(":", "").ljust(4, "0")
    offset_s = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return -offset_s if zone[0] == "-" else offset_s


def _plain_numbers(texts: Any) -> Raw | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pc.all(pc.match_substring_regex(texts, _PLAIN_WHOLE)).as_py():
        try:
            return whole_numbers(pc.cast(texts, pa.int64()))
        except pa.ArrowInvalid:
            return None
    if pc.all(pc.match_substring_regex(texts, _PLAIN_NUMBER)).as_py():
        values = numbers(pc.cast(texts, pa.float64()))
        return values if bool((values < 2**63).all()) else None
    return None


def _plain_stamps(texts: Any, kind: TimeKind) -> NDArray[np.int64] | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    zone = None if kind == "stamp" else "UTC"
    try:
        values = whole_numbers(pc.cast(texts, pa.timestamp("ns", zone)))
    except pa.ArrowInvalid:
        return None
    return values if len(values) == 0 or int(values.min()) >= 0 else None
