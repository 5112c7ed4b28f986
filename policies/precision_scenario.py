"""What a scenario says about memory and precision, as either engine takes it."""

from __future__ import annotations

from typing import Final

from models.llm_shape import LlmShape
from models.precision_settings import PagedWeightScenario
from models.strict_tables import ScenarioError
from models.weight_memory import other_bytes
from policies.precision_state import PrecisionSettings

SLOW_LINK_BYTES_PER_S: Final = 30e9
"""Below it an exchange of widths has to save more damage to be worth its copies."""


def settings_of_scenario(scenario: PagedWeightScenario, planner: str) -> PrecisionSettings:
    """Numbers of the precision policy."""
    s, link = scenario.precision, scenario.hardware.link_bytes_per_s
    margin = s.exchange_margin
    if margin is None:
        margin = 0.5 if link < SLOW_LINK_BYTES_PER_S else 0.25
    return PrecisionSettings(
        planner=planner,
        low_share=s.low_share,
        target_share=s.target_share,
        high_share=s.high_share,
        calm_steps=s.calm_steps,
        exchange_margin=margin,
        plan_interval_s=s.plan_interval_s,
        link_bytes_per_s=link,
        link_share=s.link_share,
        use_routing=s.use_routing,
        use_prompt=False,  # prompts have lengths here, no content
        use_movement=s.use_movement,
    )


def arena_pages_of_scenario(scenario: PagedWeightScenario, shape: LlmShape) -> int:
    """Pages for expert weights and KV: memory less reserve and all that is no expert.

    Raises:
        ScenarioError: If nothing is left.
    """
    hardware = scenario.hardware
    arena_bytes = hardware.memory_bytes - 1e9 * hardware.reserve_gb - other_bytes(shape)
    arena_pages = int(arena_bytes // scenario.precision.page_bytes)
    if arena_pages < 1:
        raise ScenarioError(
            f"[hardware] memory_gb: {hardware.memory_bytes / 1e9:g} GB less reserve_gb "
            f"{hardware.reserve_gb:g} do not hold the {other_bytes(shape) / 1e9:.3g} GB of "
            f"{shape.name} that are no experts"
        )
    return arena_pages
