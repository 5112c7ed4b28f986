"""Reading and writing scenarios as TOML.

An unknown or missing key, a wrong type or an unknown choice is a ``ScenarioError`` that names the
table and the field, what was found and what is allowed.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from models.scenario import Scenario
from models.strict_tables import ScenarioError, build_table

DEFAULT_TRACE = "azure-2023-conversation"


def default_scenario() -> Scenario:
    """What ``twin run`` runs without arguments: the bundled Azure conversation workload."""
    return parse_scenario({"workload": {"trace": DEFAULT_TRACE}})


def load_scenario(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file and apply ``table.key=value`` overrides.

    Raises:
        ScenarioError: If the file cannot be read or breaks a rule.
    """
    return parse_scenario(apply_overrides(read_toml(path), overrides), where=str(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ScenarioError: If there is no such file or it is not TOML.
    """
    file = Path(path)
    if file.is_dir():
        raise ScenarioError(f"{path}: is a directory; a scenario is a TOML file")
    try:
        return tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ScenarioError(f"{path}: no such scenario file") from None
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: is not valid TOML: {error}") from error


def apply_overrides(tables: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of the tables with ``table.key=value`` settings applied.

    A value is read as TOML (``8``, ``0.5``, ``true``, ``[1, 2]``, ``"text"``); what is not TOML
    is taken as text.

    Raises:
        ScenarioError: If an override has no ``=`` or no table.
    """
    merged: dict[str, Any] = _deep_copy(tables)
    for override in overrides:
        key, separator, text = override.partition("=")
        path = key.strip().split(".")
        if not separator or len(path) < 2 or not all(path):
            raise ScenarioError(
                f"--set {override}: must look like table.key=value, "
                "e.g. attention_ffn.batch_per_worker=128"
            )
        node = merged
        for name in path[:-1]:
            child = node.setdefault(name, {})
            if not isinstance(child, dict):
                raise ScenarioError(f"--set {override}: {name} is a value, not a table")
            node = child
        node[path[-1]] = _toml_value(text.strip())
    return merged


def parse_scenario(tables: Mapping[str, Any], where: str = "scenario") -> Scenario:
    """A checked scenario from plain tables.

    Raises:
        ScenarioError: Naming ``where``, the table and the field.
    """
    try:
        return typing.cast(Scenario, build_table(Scenario, tables, ""))
    except ScenarioError as error:
        raise ScenarioError(f"{where}: {error}") from None


def scenario_tables(scenario: Scenario) -> dict[str, Any]:
    """The scenario as plain tables; settings at their default are left out."""
    tables = _tables(scenario)
    return typing.cast(dict[str, Any], tables)


def scenario_toml(scenario: Scenario) -> str:
    """The scenario as a TOML text that ``load_scenario`` reads back to an equal one."""
    return tomli_w.dumps(scenario_tables(scenario))


def _deep_copy(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _deep_copy(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_deep_copy(value) for value in node]
    return node


def _toml_value(text: str) -> Any:
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value


def _tables(node: Any) -> Any:
    if not dataclasses.is_dataclass(node):
        return list(node) if isinstance(node, tuple) else node
    tables: dict[str, Any] = {}
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        default = (
            item.default_factory()
            if item.default_factory is not dataclasses.MISSING
            else item.default
        )
        if value is None or (value == default and item.name != "kind"):
            continue
        if isinstance(value, Sequence) and not isinstance(value, str):
            tables[item.name] = [_tables(entry) for entry in value]
        elif isinstance(value, Mapping):
            tables[item.name] = dict(value)
        else:
            tables[item.name] = _tables(value)
    return tables
