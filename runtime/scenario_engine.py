"""A scenario file as settings of an engine: the file that ``twin run`` simulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from models.hf_config import read_hf_config
from models.precision_settings import PagedWeightScenario
from models.scenario_file import apply_overrides, beside, parse_paged_weight, read_toml
from models.strict_tables import ScenarioError
from policies.precision_scenario import arena_pages_of_scenario, settings_of_scenario

PLAIN_BITS: Final = 16


def read_engine_scenario(path: Path, overrides: Sequence[str]) -> PagedWeightScenario:
    """The scenario of a file, which has to be one of weights and KV in one arena.

    Raises:
        ScenarioError: If it cannot be read, breaks a rule, or asks something else.
    """
    tables = apply_overrides(beside(read_toml(path), path.parent), overrides)
    if "llm" not in tables:
        raise ScenarioError(
            f"{path}: [llm]: missing; serving needs a scenario with a model, such as "
            "scenarios/serve.toml"
        )
    return parse_paged_weight(tables, where=str(path))


def scenario_settings(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of ``EngineSettings`` that a scenario fixes.

    Memory is that of the scenario's device, less its reserve and the weights that are no experts,
    as in the twin. A model that is no folder (a name of the catalog) leaves ``model`` out.

    Raises:
        ScenarioError: See ``read_engine_scenario``.
        HfConfigError: If the model's configuration cannot be used.
    """
    scenario = read_engine_scenario(path, overrides)
    found: dict[str, Any] = {
        "page_bytes": scenario.precision.page_bytes,
        "max_running": scenario.serving.max_running,
        "prefill_tokens": scenario.serving.prefill_tokens,
        "hot_coverage": scenario.routing.hot_coverage,
        "hot_bits": scenario.routing.hot_bits,
    }
    folder = Path(scenario.llm.model)
    if folder.is_dir():
        found["model"] = str(folder)
        pages = arena_pages_of_scenario(scenario, read_hf_config(folder))
        found["memory_bytes"] = pages * scenario.precision.page_bytes
    policy = scenario.precision.policy
    if policy != PLAIN_BITS:
        found["precision"] = policy
    if isinstance(policy, str):
        settings = asdict(settings_of_scenario(scenario, policy))
        del settings["planner"]
        found["precision_settings"] = settings
    return found
