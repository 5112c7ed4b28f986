"""Reading and writing scenarios as TOML.

An unknown or missing key, a wrong type or an unknown choice is a ``ScenarioError`` that names the
table and the field, what was found and what is allowed.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from models.calibration import NAMED, CalibrationError, load_calibration
from models.engine_profile import EngineProfile
from models.llm_catalog import catalog
from models.precision_settings import PagedWeightScenario
from models.prefix_settings import PrefixScenario
from models.scenario import Scenario
from models.strict_tables import MAX_DEPTH, ScenarioError, build_table, require_shallow
from traces.workloads import BUNDLED

DEFAULT_TRACE = "azure-2023-conversation"
PREFIX_TABLE = "prefix"  # makes it a scenario of a pooled prefix cache
HARDWARE_TABLE = "hardware"
PAGED_WEIGHT_TABLES = ("llm", "precision")  # else either of them makes it one of weight pages
ATTENTION_FFN_TABLES = ("attention_ffn", "faults", "prefill")


def default_scenario() -> Scenario:
    """What ``twin run`` runs without arguments: the bundled Azure conversation workload."""
    return parse_scenario({})


def load_scenario(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file and apply ``table.key=value`` overrides.

    Raises:
        ScenarioError: If the file cannot be read or breaks a rule.
    """
    tables = beside(read_toml(path), Path(path).parent)
    return parse_scenario(apply_overrides(tables, overrides), where=str(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ScenarioError: If there is no such file or it is not TOML.
    """
    file = Path(path)
    if file.is_dir():
        raise ScenarioError(f"{path}: is a directory; a scenario is a TOML file")
    if file.exists() and not file.is_file():
        raise ScenarioError(f"{path}: is not a regular file; a scenario is a TOML file")
    try:
        tables = tomllib.loads(file.read_bytes().decode("utf-8-sig"))
        require_shallow(tables)
    except FileNotFoundError:
        raise ScenarioError(f"{path}: no such scenario file") from None
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise ScenarioError(f"{path}: is not valid TOML: {_one_line(error)}") from None
    return tables


def beside(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of the tables whose relative file names are looked for in ``folder`` first.

    A trace or calibration that is not there keeps its name, for the current directory.
    """
    return _renamed(tables, lambda name: str(folder / name) if (folder / name).exists() else name)


def with_absolute_files(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tables that names existing files by absolute path."""
    return _renamed(
        tables, lambda name: str(Path(name).absolute()) if Path(name).exists() else name
    )


def _renamed(tables: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    copy: dict[str, Any] = _deep_copy(tables)
    for table, key, known in (
        ("workload", "trace", BUNDLED),
        ("attention_ffn", "calibration", NAMED),
        ("hardware", "calibration", ()),
        ("prefix", "calibration", ()),
        ("llm", "model", catalog() if "llm" in copy else ()),
        ("precision", "damage", ("lognormal",)),
    ):
        node: Any = copy.get(table)
        name = node.get(key) if isinstance(node, dict) else None
        if isinstance(name, str) and name.strip() and name not in known and "\0" not in name:
            node[key] = rename(name)
    return copy


def apply_overrides(tables: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of the tables with ``table.key=value`` settings applied; ``faults=[...]`` as well.

    A value is read as TOML (``8``, ``0.5``, ``true``, ``[1, 2]``, ``"text"``); what is not TOML
    is taken as text.

    Raises:
        ScenarioError: If an override has no ``=``, no table, or more than one value.
    """
    merged: dict[str, Any] = _deep_copy(tables)
    for override in overrides:
        key, separator, text = override.partition("=")
        path = key.strip().split(".")
        shown = _shown(override)
        is_list = path == ["faults"]
        if not separator or not (is_list or len(path) >= 2) or not all(path):
            raise ScenarioError(
                f"--set {shown}: must look like table.key=value, "
                "e.g. attention_ffn.batch_per_worker=128"
            )
        if len(path) > MAX_DEPTH:
            raise ScenarioError(f"--set {shown}: the key is nested deeper than {MAX_DEPTH} levels")
        node = merged
        for name in path[:-1]:
            child = node.setdefault(name, {})
            if not isinstance(child, dict):
                raise ScenarioError(f"--set {shown}: {name} is a value, not a table")
            node = child
        try:
            node[path[-1]] = _toml_value(text.strip())
        except ScenarioError as error:
            raise ScenarioError(f"--set {shown}: {error}") from None
    return merged


def parse_scenario(tables: Mapping[str, Any], where: str = "scenario") -> Scenario:
    """A checked scenario from plain tables; without a workload: the bundled one.

    Raises:
        ScenarioError: Naming ``where``, the table and the field.
    """
    try:
        require_shallow(tables)
        if is_prefix(tables):
            raise ScenarioError(
                f"[{PREFIX_TABLE}]: a scenario of a pooled prefix cache is for `twin run`; other "
                "commands know [attention_ffn] only"
            )
        if is_paged_weight(tables):
            raise ScenarioError(
                f"[{_first(tables, PAGED_WEIGHT_TABLES)}]: a scenario of expert weights that "
                "shrink is for `twin run`; other commands know [attention_ffn] only"
            )
        return typing.cast(Scenario, build_table(Scenario, _with_workload(tables), ""))
    except ScenarioError as error:
        raise ScenarioError(f"{where}: {error}") from None


def is_paged_weight(tables: Mapping[str, Any]) -> bool:
    """Whether the tables are about expert weights that shrink while the KV cache grows."""
    return not is_prefix(tables) and any(name in tables for name in PAGED_WEIGHT_TABLES)


def is_prefix(tables: Mapping[str, Any]) -> bool:
    """Whether the tables are about a pooled prefix cache."""
    return PREFIX_TABLE in tables


def parse_prefix(tables: Mapping[str, Any], where: str = "scenario") -> PrefixScenario:
    """A checked scenario of that kind from plain tables; a workload with a trace needs no kind.

    Raises:
        ScenarioError: Naming ``where``, the table and the field.
    """
    try:
        require_shallow(tables)
        workload = tables.get("workload")
        if isinstance(workload, Mapping) and "trace" in workload and "kind" not in workload:
            tables = {**tables, "workload": {"kind": "trace", **workload}}
        if profile := _profile_of(tables, PREFIX_TABLE):
            for name, measured in profile.prefix_tables().items():
                tables = _filled_in(tables, name, measured)
        return typing.cast(PrefixScenario, build_table(PrefixScenario, tables, ""))
    except ScenarioError as error:
        # a table of several kinds at the top has no table above it, hence a stray dot
        raise ScenarioError(f"{where}: {str(error).replace('[.', '[')}") from None


def parse_paged_weight(tables: Mapping[str, Any], where: str = "scenario") -> PagedWeightScenario:
    """A checked scenario of that kind from plain tables; without a workload: the bundled one.

    Raises:
        ScenarioError: Naming ``where``, the table and the field.
    """
    try:
        require_shallow(tables)
        if other := _first(tables, ATTENTION_FFN_TABLES):
            raise ScenarioError(
                f"[{other}]: does not go with [{_first(tables, PAGED_WEIGHT_TABLES)}]; a scenario "
                "is either about attention and FFN workers or about expert weights that shrink"
            )
        if profile := _profile_of(tables, HARDWARE_TABLE):
            tables = _filled_in(tables, HARDWARE_TABLE, profile.hardware_table())
        built = build_table(PagedWeightScenario, _with_workload(tables), "")
        return typing.cast(PagedWeightScenario, built)
    except ScenarioError as error:
        raise ScenarioError(f"{where}: {error}") from None


def _profile_of(tables: Mapping[str, Any], table: str) -> EngineProfile | None:
    """What the calibration file that a table names has measured of an engine; None without one."""
    node = tables.get(table)
    name = node.get("calibration") if isinstance(node, Mapping) else None
    if not isinstance(name, str):
        return None  # what it is instead, if anything, is complained about with the table
    try:
        found = load_calibration(name)
    except CalibrationError as error:
        raise ScenarioError(f"[{table}] calibration: {error}") from None
    if found.engine is None:
        raise ScenarioError(
            f"[{table}] calibration: {name}: has coefficients of attention and FFN only; "
            "`runtime profile` writes files that say more"
        )
    return found.engine


def _filled_in(
    tables: Mapping[str, Any], table: str, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """The tables with measured values where one of them does not give its own."""
    own = tables.get(table, {})
    if not isinstance(own, Mapping):
        return dict(tables)
    filled = {**measured, **own}
    shares = measured.get("bandwidth_share")
    if shares and isinstance(own.get("bandwidth_share", {}), Mapping):
        filled["bandwidth_share"] = {**shares, **own.get("bandwidth_share", {})}
    return {**tables, table: filled}


def _first(tables: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in tables), None)


def scenario_tables(scenario: Scenario | PagedWeightScenario | PrefixScenario) -> dict[str, Any]:
    """The scenario as plain tables; settings at their default are left out."""
    tables = _tables(scenario)
    return typing.cast(dict[str, Any], tables)


def scenario_toml(scenario: Scenario) -> str:
    """The scenario as a TOML text that ``load_scenario`` reads back to an equal one."""
    return tomli_w.dumps(scenario_tables(scenario))


def _with_workload(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with the bundled workload where they name neither a trace nor lengths."""
    workload = tables.get("workload", {})
    if not isinstance(workload, Mapping) or "trace" in workload or "lengths" in workload:
        return dict(tables)
    return {**tables, "workload": {**workload, "trace": DEFAULT_TRACE}}


def _deep_copy(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _deep_copy(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_deep_copy(value) for value in node]
    return node


def _toml_value(text: str) -> Any:
    """One TOML value; what is not TOML is text, as long as it is one line."""
    try:
        tables: dict[str, Any] = tomllib.loads(f"value = {text}")
        require_shallow(tables)
    except tomllib.TOMLDecodeError:
        if len(text.splitlines()) > 1:
            raise ScenarioError("the value has several lines and is not one TOML value") from None
        return text
    except ScenarioError:
        raise
    except (ValueError, RecursionError) as error:
        raise ScenarioError(_one_line(error)) from None
    if list(tables) != ["value"]:
        raise ScenarioError("one setting at a time; repeat --set for another")
    return tables["value"]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 120 else line[:117] + "..."


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
