"""The command line that asks the same question as the page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from models.scenario import Scenario
from models.scenario_file import scenario_tables

SCENARIO_FILE = "scenario.toml"

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_TOML_WORDS = ("true", "false", "inf", "nan")


def command_line(verb: str, scenario: Scenario, *options: str) -> str:
    """``twin VERB`` with every setting of the scenario that is not at its default.

    What ``--set`` cannot say, a list of tables, goes by the scenario file.
    """
    if scenario.faults:
        return shlex.join(["twin", verb, SCENARIO_FILE, *options])
    tables = scenario_tables(scenario)
    words = ["twin", verb]
    trace = tables["workload"].pop("trace", None)
    if trace is not None:
        words += ["--trace", trace]
    for key, value in _settings(tables, ""):
        words += ["--set", f"{key}={_toml_value(value)}"]
    return shlex.join([*words, *options])


def _settings(tables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _toml_value(value: Any) -> str:
    """A value as ``--set`` reads it back; words go without quotation marks."""
    if isinstance(value, str) and _BARE.fullmatch(value) and value not in _TOML_WORDS:
        return value
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
