"""Dataclasses from plain tables, strictly: what a scenario file may and may not say."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

MAX_DEPTH = 20
MAX_WHOLE_NUMBER = 2**63 - 1


class ScenarioError(ValueError):
    """A scenario cannot be used as it is; the message names table and field."""


def require_positive(table: str, **values: float | int | None) -> None:
    """Each given value must be finite and > 0."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ScenarioError(f"[{table}] {name}: must be finite and > 0, found {value!r}")


def require_not_negative(table: str, **values: float | int | None) -> None:
    """Each given value must be finite and >= 0."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ScenarioError(f"[{table}] {name}: must be finite and >= 0, found {value!r}")


def require_within(table: str, low: float, high: float, **values: float | None) -> None:
    """Each given value must lie within ``low``..``high``."""
    for name, value in values.items():
        if value is not None and not low <= value <= high:
            raise ScenarioError(
                f"[{table}] {name}: must be within {low:g}..{high:g}, found {value!r}"
            )


def require_rates(table: str, **values: float) -> None:
    """Each rate or factor of one must be within 1e-6..1e12, so that clocks resolve what happens."""
    require_within(table, 1e-6, 1e12, **values)


def require_at_least_one(table: str, **values: int | None) -> None:
    """Each given value must be >= 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ScenarioError(f"[{table}] {name}: must be an integer >= 1, found {value!r}")


def require_at_most(table: str, limit: int, **values: int | None) -> None:
    """Each given value must not exceed ``limit``."""
    for name, value in values.items():
        if value is not None and value > limit:
            raise ScenarioError(f"[{table}] {name}: must be <= {limit:,}, found {value:,}")


def require_shallow(value: Any) -> None:
    """Tables and lists must not be nested deeper than ``MAX_DEPTH``, nor numbers be huge."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nested: list[Any] = []
        for node in level:
            if isinstance(node, Mapping):
                nested += node.values()
            elif isinstance(node, list | tuple):
                nested += node
            elif isinstance(node, int) and abs(node) > MAX_WHOLE_NUMBER:
                raise ScenarioError(f"a whole number exceeds {MAX_WHOLE_NUMBER:,} (64 bits)")
        level = nested
    if level:
        raise ScenarioError(f"tables and lists are nested deeper than {MAX_DEPTH} levels")


def build_table(cls: type, tables: Any, table: str) -> Any:
    """A dataclass from a TOML table, strictly."""
    label = f"[{table}]" if table else "scenario"
    if not isinstance(tables, Mapping):
        raise ScenarioError(f"{label}: must be a table, found {_found(tables)}")
    hints = typing.get_type_hints(cls)
    names = [item.name for item in dataclasses.fields(cls)]
    for key in tables:
        if key not in names:
            kind = "key" if table else "table"
            raise ScenarioError(
                f"{label} {key}: unknown {kind}; known here: {', '.join(names)}"
                + _suggestion(str(key), names)
            )
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        child = f"{table}.{item.name}" if table else item.name
        if item.name in tables:
            values[item.name] = _convert(hints[item.name], tables[item.name], table, item.name)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            what = f"[{child}]" if dataclasses.is_dataclass(hints[item.name]) else item.name
            raise ScenarioError(f"{label} {what}: missing")
    return cls(**values)


def _suggestion(key: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _convert(hint: Any, value: Any, table: str, name: str) -> Any:
    """``value`` as the field's type, or an error that says what the field allows."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, table, name)
    label = f"[{table}] {name}" if table else f"[{name}]"
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise ScenarioError(
                f"{label}: must be one of {', '.join(map(repr, arguments))}, found {value!r}"
            )
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build_table(hint, value, f"{table}.{name}" if table else name)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (str, bool) and type(value) is hint:
        return value
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {str(k): _convert(arguments[1], v, f"{table}.{name}", k) for k, v in value.items()}
    if origin is not None and issubclass(origin, Sequence) and isinstance(value, list):
        element = arguments[0]
        return tuple(
            build_table(element, entry, name)
            if dataclasses.is_dataclass(element) and isinstance(element, type)
            else _convert(element, entry, table, name)
            for entry in value
        )
    raise ScenarioError(f"{label}: must be {_wanted(hint)}, found {_found(value)}")


def _convert_union(arguments: tuple[Any, ...], value: Any, table: str, name: str) -> Any:
    choices = [a for a in arguments if a is not type(None)]
    kinds = [c for c in choices if dataclasses.is_dataclass(c)]
    label = f"[{table}] {name}"
    if len(kinds) > 1:
        return _build_kind(kinds, value, f"{table}.{name}" if table else name)
    if len(choices) == 1:
        return _convert(choices[0], value, table, name)
    for choice in choices:
        try:
            return _convert(choice, value, table, name)
        except ScenarioError:
            continue
    wanted = " or ".join(_wanted(choice) for choice in choices)
    raise ScenarioError(f"{label}: must be {wanted}, found {_found(value)}")


def _build_kind(kinds: Sequence[Any], value: Any, table: str) -> Any:
    by_name = {typing.get_args(typing.get_type_hints(k)["kind"])[0]: k for k in kinds}
    if not isinstance(value, Mapping):
        raise ScenarioError(f"[{table}]: must be a table, found {_found(value)}")
    kind = value.get("kind")
    if kind not in by_name:
        found = "missing" if kind is None else f"found {kind!r}"
        raise ScenarioError(
            f"[{table}] kind: must be one of {', '.join(map(repr, by_name))}, {found}"
        )
    return build_table(by_name[kind], value, table)


def _wanted(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    if hint in names:
        return names[hint]
    origin = typing.get_origin(hint)
    if origin is not None and issubclass(origin, Mapping):
        return "a table"
    return "a list of " + {int: "integers"}.get(typing.get_args(hint)[0], "tables")


def _found(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
