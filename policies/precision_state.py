"""What the precision policy is told at a step boundary, and the numbers that govern it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.precision_tables import BlockTables, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PrecisionState:
    """The weight page table, the signals and the memory, as they are before the next step.

    Attributes:
        step: Engine steps done so far; steps are told, never counted by calls.
        bits: [num_blocks] int64, committed widths.
        desired_bits: [num_blocks] int64, widths that open plans lead to; ``bits`` without one.
        hot_floor_bits: [num_blocks] int64, lowest widths wanted by routing; <= the lowest width
            for blocks that are not hot.
        pinned: [num_blocks] bool, blocks whose copies failed too often: they keep their width.
        retry_step: [num_blocks] int64, first step at which a raise is accepted.
        mass_multiplier: [num_blocks] float64, routing mass now over that of the calibration.
        prompt_multiplier: [num_blocks] float64, correction for the prompts being served.
        kv_pages: Pages the KV cache holds.
        forecast_pages: Pages it will need within the horizon, see ``precision_forecast``.
        copying_bytes: Bytes of raises that are still to be copied.
    """

    step: int
    bits: Ints
    desired_bits: Ints
    hot_floor_bits: Ints
    pinned: NDArray[np.bool_]
    retry_step: Ints
    mass_multiplier: Floats
    prompt_multiplier: Floats
    kv_pages: int
    forecast_pages: int
    copying_bytes: int


ARRAYS = (
    "bits",
    "desired_bits",
    "hot_floor_bits",
    "pinned",
    "retry_step",
    "mass_multiplier",
    "prompt_multiplier",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    """Watermarks, rhythm, link and signals of the precision policy.

    Attributes:
        planner: Name in the catalog of precision planners.
        low_share: Shrink when free pages less the forecast fall below this share of the arena.
        target_share: Shrink and restore lead here.
        high_share: Restore only from above. Between the three lies what keeps a load that swings
            a little from shrinking and restoring in turn, so no two may be equal.
        calm_steps: Steps the memory must have been above ``high_share`` before.
        exchange_margin: eta; widths are exchanged at equal bytes only where the damage saved
            exceeds 1 + eta times the damage added. 0.5 suits a slow link, 0.25 a fast one.
        plan_interval_s: Least time between two plans with copies.
        link_bytes_per_s: Host to device.
        link_share: Share of the link that copies may fill.
        use_routing: Whether routing mass and hot floors count.
        use_prompt: Whether the prompt correction counts.
        use_movement: Whether anything is ever copied; without it widths only fall.
    """

    planner: str = "hull"
    low_share: float = 0.03
    target_share: float = 0.08
    high_share: float = 0.14
    calm_steps: int = 32
    exchange_margin: float = 0.25
    plan_interval_s: float = 1.0
    link_bytes_per_s: float = 25e9
    link_share: float = 0.5
    use_routing: bool = True
    use_prompt: bool = True
    use_movement: bool = True

    def __post_init__(self) -> None:
        shares = (self.low_share, self.target_share, self.high_share)
        if not 0.0 <= shares[0] < shares[1] < shares[2] <= 1.0:
            raise ValueError(
                "low_share < target_share < high_share must hold within [0, 1], "
                f"found {shares[0]}, {shares[1]}, {shares[2]}"
            )
        for name, value, least in (
            ("calm_steps", self.calm_steps, 0),
            ("exchange_margin", self.exchange_margin, 0.0),
            ("link_bytes_per_s", self.link_bytes_per_s, 0.0),
        ):
            if not least <= value < math.inf:
                raise ValueError(f"{name} must be finite and >= {least}, found {value}")
        if not 0.0 < self.plan_interval_s < math.inf:
            raise ValueError(f"plan_interval_s must be > 0, found {self.plan_interval_s}")
        if not 0.0 <= self.link_share <= 1.0:
            raise ValueError(f"link_share must be within [0, 1], found {self.link_share}")


def check_state(state: PrecisionState, num_blocks: int) -> None:
    """Refuse arrays of another length and counts below 0.

    Raises:
        ValueError: Naming the field.
    """
    for name in ARRAYS:
        shape = np.shape(getattr(state, name))
        if shape != (num_blocks,):
            raise ValueError(f"{name} must have {num_blocks:,} entries, found shape {list(shape)}")
    for name in ("step", "kv_pages", "forecast_pages", "copying_bytes"):
        if getattr(state, name) < 0:
            raise ValueError(f"{name} must be >= 0, found {getattr(state, name)}")


def level_of_bits(tables: BlockTables, bits: Ints, name: str) -> Ints:
    """[num_blocks] levels of widths.

    Raises:
        ValueError: If a block is at a width that the tables do not have.
    """
    level_at = np.full(max(tables.bits) + 1, -1)
    level_at[list(tables.bits)] = np.arange(len(tables.bits))
    within = (bits >= 0) & (bits < len(level_at))
    level = level_at[np.where(within, bits, 0)]
    known = level >= 0
    if not known.all():
        block = int(np.argmin(known))
        raise ValueError(
            f"{name} of block {block} must be one of {list(tables.bits)}, found {bits[block]}"
        )
    return level
