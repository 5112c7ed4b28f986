"""Fields of a configuration besides sizes, each read with its type and range."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

Choice = TypeVar("Choice", bound=str)


class ModelConfigError(ValueError):
    """A checkpoint that the decoder cannot run; names file, field, what was found and allowed."""


class SpecFields:
    """Typed access to one table.

    Args:
        table: The parsed JSON object.
        where: What messages call it.
    """

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table, self._where = table, where

    def get(self, name: str) -> Any:
        """The field as it is; None where it is not given."""
        return self._table.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is given, be it null."""
        return name in self._table

    def refuse(self, name: str, rule: str, found: Any = ...) -> NoReturn:
        """Raise the error about a field.

        Raises:
            ModelConfigError: Always.
        """
        value = self.get(name) if found is ... else found
        text = "a table" if isinstance(value, Mapping) else repr(value)
        text = text if len(text) <= 80 else text[:77] + "..."
        raise ModelConfigError(f"{self._where}: {name}: {rule}, found {text}")

    def choice(self, name: str, allowed: Sequence[Choice], default: Choice | None = None) -> Choice:
        """One of the ``allowed`` texts."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value not in allowed:
            self.refuse(name, f"must be one of {', '.join(map(repr, allowed))}")
        return allowed[allowed.index(value)]

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return value

    def number(self, name: str, default: float | None = None, *, low: float = 0.0) -> float:
        """A finite number above ``low``; without a default it must be given."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or value <= low
        ):
            self.refuse(name, f"must be a number > {low:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A number above 0, or None where it is not given."""
        return None if self.get(name) is None else self.number(name)

    def tokens(self, name: str) -> tuple[int, ...]:
        """One token or a list of them; empty where it is not given."""
        value = self.get(name)
        if value is None:
            return ()
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in found):
            self.refuse(name, "must be a token number or a list of them")
        return tuple(found)

    def table(self, name: str) -> SpecFields | None:
        """A nested table; None where it is not given or empty."""
        value = self.get(name)
        if not value:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, "must be a table")
        return SpecFields(value, f"{self._where}: {name}")
