"""What a field may hold, and what happens to a row that breaks a rule."""

from __future__ import annotations

import json
import math
import re
from enum import Enum
from pathlib import Path

from traces.errors import TraceError

LARGEST_TOKENS = 2**31 - 1
LONGEST_SHOWN = 48

_WHOLE = re.compile(r"[+-]?0*([0-9]+)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


class BadRow(Exception):  # noqa: N818 - it says what the row is; only the readers see it
    """A row that breaks a rule.

    Attributes:
        column: Column or key, empty when the whole row is meant.
        found: What stood there, as it is shown.
        rule: The rule, the same words for every row that breaks it.
        hint: What helps with this row alone.
    """

    def __init__(self, column: str, found: str, rule: str, hint: str = "") -> None:
        super().__init__(rule)
        self.column = column
        self.found = found
        self.rule = rule
        self.hint = hint


class BadRows:
    """Stops at the first bad row with its place and reason, or counts bad rows by rule."""

    def __init__(self, path: Path, *, skip: bool) -> None:
        self.path = path
        self.skip = skip
        self.counts: dict[str, int] = {}

    def add(self, line: int, bad: BadRow, *, is_torn: bool = False) -> None:
        """Count the row where skipping was asked for.

        Args:
            line: Its number in the file, from 1.
            bad: What is wrong with it.
            is_torn: True for a last line without a newline.

        Raises:
            TraceError: If bad rows are not to be skipped.
        """
        if not self.skip:
            raise self.error(line, bad, is_torn=is_torn)
        self.counts[bad.rule] = self.counts.get(bad.rule, 0) + 1

    def error(self, line: int, bad: BadRow, *, is_torn: bool = False) -> TraceError:
        """The error that says where the row is and what is wrong with it."""
        column = f", column {bad.column}" if bad.column else ""
        hints = [bad.hint] if bad.hint else []
        # A row that is complete and wrong says nothing about where the file ends.
        if is_torn and (not bad.column or bad.found == "''"):
            hints.append("the last line has no end: the file seems cut")
        hint = f" ({'; '.join(hints)})" if hints else ""
        return TraceError(
            f"{self.path}, line {line}{column}: found {bad.found}; rule: {bad.rule}{hint}"
        )


class Missing(Enum):
    """Stands for the value of a key that an object does not have."""

    KEY = "no such key"


def shown(value: object) -> str:
    """A value as an error shows it: as in the file, shortened, on one line."""
    if value is Missing.KEY:
        return "no such key"
    if isinstance(value, str):
        text = repr(value)
    else:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def number_in_text(text: str) -> int | float | None:
    """The number that a CSV field spells; NaN and infinities too; None where it is no number."""
    if len(text) < 19 and text.isascii() and text.isdecimal():
        return int(text)
    stripped = text.strip()
    whole = _WHOLE.fullmatch(stripped)
    if whole:
        # Thirty digits are far beyond what any column may hold; the rest only costs time.
        number = int(whole[1][:30])
        return -number if stripped[0] == "-" else number
    if _NUMBER.fullmatch(stripped):
        return float(stripped)
    if stripped.lower().lstrip("+-") in {"nan", "inf", "infinity"}:
        return float(stripped)
    return None


def number_in_json(value: object) -> int | float | None:
    """The number that a JSON value is; None for strings, true, false, null, lists, objects."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return None


def tokens(number: int | float | None, value: object, column: str, name: str) -> int:
    """A token count: a whole number from 1 to 2147483647; 12.0 and 1e3 are whole.

    Args:
        number: What ``value`` means as a number, None where it is none.
        value: As in the file, for the message.
        column: Where it stood.
        name: ``prompt_tokens`` or ``output_tokens``.

    Raises:
        BadRow: If it is not such a number.
    """
    if number is None or (isinstance(number, float) and not number.is_integer()):
        rule = f"{name} must be a whole number"
    elif number < 1:
        rule = f"{name} must be >= 1"
    elif number > LARGEST_TOKENS:
        rule = f"{name} must be <= {LARGEST_TOKENS}"
    else:
        return int(number)
    raise BadRow(column, shown(value), rule, f"allowed: 1 to {LARGEST_TOKENS}")


def optional_number(number: int | float | None, value: object, column: str) -> float:
    """A finite number, or NaN where the field is empty, null or absent.

    Raises:
        BadRow: If it is something else.
    """
    if value is None or value is Missing.KEY or (isinstance(value, str) and not value.strip()):
        return math.nan
    if number is None or not math.isfinite(number):
        raise BadRow(column, shown(value), f"{column} must be a finite number or empty")
    return float(number)


def identifier(value: object, column: str, name: str) -> str:
    """A name: text that is not blank, or a whole number.

    Raises:
        BadRow: If it is something else.
    """
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadRow(column, shown(value), f"{name} must be text or a whole number, not empty")
