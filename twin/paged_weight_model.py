"""What a paged-weight scenario comes to in numbers: blocks, pages, bytes, damage, step times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.hardware import Device
from models.hardware_settings import Hardware
from models.llm_catalog import load_llm
from models.llm_shape import LlmShape
from models.moe_step_time import FULL_BITS, MoeStepTime, StepRates
from models.plane_bytes import (
    ResidentTables,
    block_bytes,
    block_pages,
    pages_of,
    plane_bytes,
    table_bytes,
)
from models.precision_settings import PagedWeightScenario, Precision
from models.strict_tables import ScenarioError
from models.weight_memory import full_expert_bytes
from policies.precision_scenario import arena_pages_of_scenario, settings_of_scenario
from policies.precision_state import PrecisionSettings
from policies.precision_tables import BlockTables, block_tables
from policies.weight_page_parts import BlockParts
from policies.weight_page_table import MovementRules
from twin.paged_weight_damage import SYNTHETIC, checkpoint_damage, synthetic_damage
from twin.paged_weight_traffic import ExpertTraffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ALL_BITS = tuple(range(2, 9))


@dataclass(frozen=True, slots=True, eq=False)
class BlockSizes:
    """The weight blocks of a model, in the order (layer, expert, gate_up | down).

    Attributes:
        layers: L, layers with experts.
        experts: E of each.
        rows, columns: [2 L E] int64.
    """

    layers: int
    experts: int
    rows: Ints
    columns: Ints

    @classmethod
    def of(cls, shape: LlmShape) -> BlockSizes:
        """The blocks of a model whose expert layers are alike."""
        moe = shape.moe_layers[0]
        layers, experts = len(shape.moe_layers), moe.num_experts
        pair = (
            (2 * moe.intermediate_size, shape.hidden_size),
            (shape.hidden_size, moe.intermediate_size),
        )
        sizes = np.tile(np.array(pair, dtype=np.int64), (layers * experts, 1))
        return cls(layers, experts, sizes[:, 0].copy(), sizes[:, 1].copy())

    @property
    def num_blocks(self) -> int:
        """2 L E."""
        return len(self.rows)

    def by_module(self, value: Callable[[int, int], Any]) -> Any:
        """[2 L E, ...] of ``value(rows, columns)``, called once for each module."""
        pair = [value(int(self.rows[at]), int(self.columns[at])) for at in (0, 1)]
        return np.tile(np.array(pair), (self.layers * self.experts, *[1] * (np.ndim(pair) - 1)))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PagedWeightModel:
    """Everything about a scenario that does not change while it runs.

    Attributes:
        scenario: The question.
        shape: The model that is served.
        device: Where.
        sizes: Weight blocks.
        time: Seconds of the parts of a step.
        page_bytes: Bytes of a page.
        arena_pages: Pages for expert weights and KV cache.
        damage: [2 L E, 7] at 2..8 bits.
        active_bytes: [2 L E, 7] bytes a kernel reads at 2..8 bits: planes and the table in use.
    """

    scenario: PagedWeightScenario
    shape: LlmShape
    device: Device
    sizes: BlockSizes
    time: MoeStepTime
    page_bytes: int
    arena_pages: int
    damage: Floats
    active_bytes: Floats

    def tables(self) -> BlockTables:
        """Bytes, in whole pages, and damage at the widths that blocks move between."""
        settings = self.scenario.precision
        levels = settings.levels
        held = self.held_pages(levels, settings.tables, settings.min_bits) * self.page_bytes
        return block_tables(held, self.damage[:, [bits - 2 for bits in levels]], levels)

    def held_pages(self, levels: Sequence[int], tables: ResidentTables, min_bits: int) -> Ints:
        """[2 L E, num_levels] pages of each block at some widths."""
        entry = self.scenario.precision.table_entry

        def pages(rows: int, columns: int) -> list[int]:
            return [
                block_pages(
                    rows,
                    columns,
                    bits,
                    page_bytes=self.page_bytes,
                    min_bits=min_bits,
                    tables=tables,
                    entry=entry,
                )
                for bits in levels
            ]

        held: Ints = self.sizes.by_module(pages)
        return held

    def parts(self, parent_bits: int, min_bits: int) -> BlockParts:
        """Pages of every plane and table."""
        entry, page = self.scenario.precision.table_entry, self.page_bytes
        planes = self.sizes.by_module(lambda n, k: pages_of(plane_bytes(n, k), page))
        tables = self.sizes.by_module(
            lambda n, k: [
                pages_of(table_bytes(n, bits, entry), page)
                for bits in range(min_bits, parent_bits + 1)
            ]
        )
        return BlockParts.of(planes, tables, parent_bits=parent_bits, min_bits=min_bits)

    def part_bytes(self, parent_bits: int, min_bits: int) -> Ints:
        """[2 L E, S] bytes that a copy of every plane and table carries."""
        entry = self.scenario.precision.table_entry
        widths = range(min_bits, parent_bits + 1)
        found: Ints = self.sizes.by_module(
            lambda n, k: (
                [plane_bytes(n, k)] * parent_bits + [table_bytes(n, b, entry) for b in widths]
            )
        )
        return found

    @property
    def full_pages(self) -> int:
        """Pages of the experts at 16 bits."""
        return -(-full_expert_bytes(self.shape) // self.page_bytes)

    def full_read_bytes(self) -> Floats:
        """[2 L E] bytes of plain 16-bit weights."""
        return 2.0 * (self.sizes.rows * self.sizes.columns).astype(np.float64)

    def traffic(self, replication: int) -> ExpertTraffic:
        """Popularity of experts over the time of one replication."""
        return ExpertTraffic(
            self.scenario.routing,
            self.sizes.layers,
            self.sizes.experts,
            self.time.moe.experts_per_token,
            seed=self.scenario.run.seed,
            replication=replication,
        )

    def policy_settings(self, planner: str) -> PrecisionSettings:
        """Numbers of the precision policy."""
        return settings_of_scenario(self.scenario, planner)

    def movement_rules(self) -> MovementRules:
        """Numbers of the page table for moving widths."""
        settings = self.scenario.precision
        return MovementRules(tables=settings.tables, timeout_steps=settings.timeout_steps)


def build_model(scenario: PagedWeightScenario) -> PagedWeightModel:
    """Work the scenario out.

    Raises:
        ScenarioError: If the model has no experts, or memory does not even hold the rest of it.
        HfConfigError: If the model is unknown or its configuration cannot be used.
    """
    shape, device = load_llm(scenario.llm.model), scenario.hardware.found_device
    try:
        time = MoeStepTime(
            shape,
            step_rates(scenario.hardware, device),
            kv_value_bytes=scenario.llm.kv_value_bytes,
        )
    except ValueError as error:
        raise ScenarioError(f"[llm] model: {error}") from None
    settings = scenario.precision
    arena_pages = arena_pages_of_scenario(scenario, shape)
    sizes = BlockSizes.of(shape)
    return PagedWeightModel(
        scenario=scenario,
        shape=shape,
        device=device,
        sizes=sizes,
        time=time,
        page_bytes=settings.page_bytes,
        arena_pages=arena_pages,
        damage=_damage(scenario, shape, sizes, time.moe.experts_per_token),
        active_bytes=_active_bytes(sizes, settings),
    )


def step_rates(hardware: Hardware, device: Device) -> StepRates:
    """Rates of the scenario's device; measured bandwidth shares replace the static estimates."""
    shares = {bits: hardware.kernel_share * roof for bits, roof in device.decode_roof.items()}
    shares[FULL_BITS] = hardware.full_share
    measured: Mapping[str, float] = hardware.bandwidth_share
    shares |= {int(bits): share for bits, share in measured.items()}
    copy = hardware.copy_gb_per_s
    return StepRates(
        memory_bytes_per_s=device.copy_bytes_per_s if copy is None else 1e9 * copy,
        flops_per_s=device.flops_per_s,
        share_by_bits=shares,
        dense_share=hardware.dense_share,
        attention_share=hardware.attention_share,
        compute_share=hardware.compute_share,
        expert_compute_share=hardware.expert_compute_share,
        attention_compute_share=hardware.attention_compute_share,
        launch_seconds=1e-6 * hardware.launch_us,
        launches_per_layer=hardware.launches_per_layer,
        overhead_seconds=1e-6 * hardware.step_overhead_us,
    )


def _damage(scenario: PagedWeightScenario, shape: LlmShape, sizes: BlockSizes, k: int) -> Floats:
    settings = scenario.precision
    if settings.damage != SYNTHETIC:
        _require_known_widths(settings)
        table = np.zeros((sizes.num_blocks, len(ALL_BITS)))
        levels = settings.levels
        table[:, [bits - 2 for bits in levels]] = checkpoint_damage(settings.damage, shape, levels)
        if len(levels) < len(ALL_BITS):
            outside = [bits for bits in ALL_BITS if bits not in levels]
            table[:, [bits - 2 for bits in outside]] = np.nan
        return table
    traffic = ExpertTraffic(
        scenario.routing, sizes.layers, sizes.experts, k, seed=scenario.run.seed
    )
    _, mass = traffic.masses(traffic.long_run)
    return synthetic_damage(settings, mass, seed=scenario.run.seed)


def _require_known_widths(settings: Precision) -> None:
    """A checkpoint knows the damage of its own widths only."""
    for name, policies in (("policy", (settings.policy,)), ("compare", settings.compare)):
        for policy in policies:
            if isinstance(policy, int) and policy not in (*settings.levels, FULL_BITS):
                raise ScenarioError(
                    f"[precision] {name}: the damage of {policy} bits is not in "
                    f"{settings.damage} at min_bits..parent_bits; choose one of "
                    f"{', '.join(map(str, settings.levels))} or {FULL_BITS}, found {policy}"
                )


def _active_bytes(sizes: BlockSizes, settings: Precision) -> Floats:
    found: Floats = sizes.by_module(
        lambda n, k: [block_bytes(n, k, bits, entry=settings.table_entry) for bits in ALL_BITS]
    ).astype(np.float64)
    return found
