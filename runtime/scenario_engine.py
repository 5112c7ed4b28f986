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
from models.weight_memory import full_expert_bytes
from policies.precision_scenario import arena_pages_of_scenario, settings_of_scenario
from runtime.quantized_manifest import MANIFEST

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
    as in the twin; less those of the experts too where they are plain. A model that is no folder
    (a name of the catalog) leaves ``model`` out.

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
        found["memory_bytes"] = _arena_bytes(scenario, folder)
    policy = scenario.precision.policy
    if policy != PLAIN_BITS:
        found["precision"] = policy
    if isinstance(policy, str):
        settings = asdict(settings_of_scenario(scenario, policy))
        del settings["planner"]
        found["precision_settings"] = settings
    return found


def has_moving_widths(folder: Path) -> bool:
    """Whether a checkpoint is quantized, so that widths are the policy's."""
    return (folder / MANIFEST).is_file()


def _arena_bytes(scenario: PagedWeightScenario, folder: Path) -> int:
    shape, page_bytes = read_hf_config(folder), scenario.precision.page_bytes
    pages = arena_pages_of_scenario(scenario, shape)
    if has_moving_widths(folder):
        return pages * page_bytes
    # plain experts lie beside the arena, at 16 bits as the twin's policy 16 holds them
    expert_bytes = full_expert_bytes(shape)
    pages -= -(-expert_bytes // page_bytes)
    if pages < 1:
        hardware = scenario.hardware
        raise ScenarioError(
            f"[hardware] memory_gb: {hardware.memory_bytes / 1e9:g} GB less reserve_gb "
            f"{hardware.reserve_gb:g} do not hold {folder} with plain experts of "
            f"{expert_bytes / 1e9:.3g} GB; runtime quantize makes them smaller"
        )
    return pages * page_bytes
