"""Fields of a Hugging Face ``config.json``, each read with its type, range and default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

Default = TypeVar("Default", bound=int | None)

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
FULL, SLIDING = "full_attention", "sliding_attention"


class HfConfigError(ValueError):
    """A configuration cannot be used as it is; the message names file and field."""


class _Required:
    """Marks a field without which two different models could not be told apart."""


REQUIRED: Final = _Required()


class ConfigFields:
    """Typed access to the fields of one table of a configuration.

    Args:
        table: The parsed JSON object.
        where: What messages call it, e.g. ``config.json`` or ``config.json: text_config``.
    """

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table = table
        self._where = where

    def error(self, field: str, what: str) -> HfConfigError:
        """The error to raise about ``field``."""
        return HfConfigError(f"{self._where}: {field}: {what}")

    def has(self, *names: str) -> bool:
        """Whether a field is given under any of its names, and not null."""
        return any(self._table.get(name) is not None for name in names)

    def size(
        self,
        *names: str,
        default: int | _Required = REQUIRED,
        low: int = 1,
        high: int = MAX_SIZE,
    ) -> int:
        """A whole number within ``low``..``high``; a null counts as not given.

        Args:
            names: The field's names; the first is the one messages use.
            default: Value where it is not given.
            low: Smallest allowed value.
            high: Largest allowed value.

        Raises:
            HfConfigError: If it is missing without a default, no whole number or out of range, or
                if two of its names contradict each other.
        """
        found = self.optional_size(*names, low=low, high=high)
        if found is not None:
            return found
        if isinstance(default, _Required):
            also = f" (also read: {', '.join(names[1:])})" if names[1:] else ""
            raise self.error(names[0], f"missing; must be {_range(low, high)}{also}")
        return default

    def optional_size(self, *names: str, low: int = 1, high: int = MAX_SIZE) -> int | None:
        """Like ``size``; None where it is not given or null."""
        found: dict[str, int] = {}
        for name in names:
            value = self._table.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise self.error(name, f"must be {_range(low, high)}, found {_shown(value)}")
            found[name] = value
        if len(set(found.values())) > 1:
            both = " and ".join(f"{name} = {value}" for name, value in found.items())
            raise self.error(names[0], f"found {both}; they mean the same and must be equal")
        return next(iter(found.values()), None)

    def nullable_size(self, name: str, default: int | None, *, low: int = 1) -> int | None:
        """Like ``size``, where a null means none instead of the default."""
        if name in self._table:
            return self.optional_size(name, low=low)
        return default

    def flag(self, name: str, default: bool) -> bool:
        """True or false.

        Raises:
            HfConfigError: If it is anything else.
        """
        value = self._table.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, found {_shown(value)}")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str | _Required = REQUIRED) -> str:
        """One of the ``allowed`` texts.

        Raises:
            HfConfigError: If it is missing without a default, or anything else.
        """
        value = self._table.get(name)
        if value is None and not isinstance(default, _Required):
            return default
        if value not in allowed:
            found = "missing" if value is None else f"found {_shown(value)}"
            raise self.error(name, f"must be one of {', '.join(map(repr, allowed))}; {found}")
        return str(value)

    def indices(self, name: str, below: int) -> frozenset[int]:
        """A list of layer numbers; empty where it is not given.

        Raises:
            HfConfigError: If it is no list of whole numbers within 0..``below`` - 1.
        """
        value = self._table.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < below for i in value
        ):
            raise self.error(
                name, f"must be a list of layers within 0..{below - 1}, found {_shown(value)}"
            )
        return frozenset(value)

    def layer_types(self, num_layers: int) -> list[str] | None:
        """The attention of each layer; None where it is not given.

        Raises:
            HfConfigError: If it is no list with ``full_attention`` or ``sliding_attention`` for
                each of ``num_layers`` layers.
        """
        value = self._table.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error("layer_types", f"must be a list, found {_shown(value)}")
        if len(value) != num_layers:
            raise self.error(
                "layer_types",
                f"must name num_hidden_layers = {num_layers} layers, found {len(value)}",
            )
        for at, kind in enumerate(value):
            if kind not in (FULL, SLIDING):
                raise self.error(
                    f"layer_types[{at}]", f"must be {FULL!r} or {SLIDING!r}, found {_shown(kind)}"
                )
        return [str(kind) for kind in value]

    def table(self, name: str) -> ConfigFields | None:
        """A nested table; None where it is not given.

        Raises:
            HfConfigError: If it is no table.
        """
        value = self._table.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be a table, found {_shown(value)}")
        return ConfigFields(value, f"{self._where}: {name}")

    def keys(self) -> list[str]:
        """Names of all fields, in the order of the file."""
        return [str(key) for key in self._table]

    def text(self, name: str) -> str:
        """A text; empty where it is not given or something else."""
        value = self._table.get(name)
        return value if isinstance(value, str) else ""


def _range(low: int, high: int) -> str:
    if high == MAX_SIZE:
        return f"a whole number >= {low}"
    return f"a whole number within {low}..{high}"


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, Mapping) else "a table"
    return text if len(text) <= 60 else text[:57] + "..."
