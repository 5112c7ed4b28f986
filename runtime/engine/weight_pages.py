"""Quantized experts put into the pages of the arena, and the policy that moves their widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from policies.catalog import precision_planner
from policies.precision import PrecisionPolicy
from policies.precision_log import LoggedPrecision
from policies.precision_state import PrecisionSettings
from policies.precision_tables import BlockTables, block_tables
from policies.weight_page_history import Event
from policies.weight_page_table import MovementRules
from runtime.engine.settings import EngineSettings, EngineSettingsError
from runtime.page_arena import PageArena
from runtime.page_devices import CopyDevice, CpuDevice
from runtime.page_layout import BlockLayout, BlockShape, CanonicalLayout, part_bytes
from runtime.page_movement import PageMover
from runtime.page_parent import HostParent
from runtime.precision_control import PrecisionControl
from runtime.quantized_checkpoint import QuantizedCheckpoint
from runtime.quantized_manifest import BlockRecord
from traces.decisions import DecisionLog

Ints = NDArray[np.int64]
FULL_SHARE = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Movement:
    """How planes and tables get into the arena.

    Attributes:
        device: Makes the device that copies into an arena.
        rules: Of page movement; None: those of ``MovementRules``.
        history: Told every event of the arena's pages.
        layout: Order of bytes in the pages, as the kernels of the device read them.
    """

    device: Callable[[PageArena], CopyDevice] = CpuDevice
    rules: MovementRules | None = None
    history: Callable[[Event], None] | None = None
    layout: BlockLayout = field(default_factory=CanonicalLayout)


@dataclass(frozen=True, slots=True, eq=False)
class WeightPlan:
    """Widths at the start.

    Attributes:
        tables: Bytes (in whole pages) and damage of every block and width.
        bits: [n] first widths.
        least_pages: Pages of all blocks at their narrowest.
    """

    tables: BlockTables
    bits: Ints
    least_pages: int


def checkpoint_tables(
    checkpoint: QuantizedCheckpoint, page_bytes: int, layout: BlockLayout | None = None
) -> BlockTables:
    """Bytes that every block holds in the arena at every width, and its damage there.

    Args:
        checkpoint: Of the blocks.
        page_bytes: Of the arena.
        layout: Order of bytes in it; None: the canonical one.
    """
    chosen = CanonicalLayout() if layout is None else layout
    shapes = [_shape(block) for block in checkpoint.blocks]
    held = {
        shape: _held_bytes(chosen, shape, checkpoint.levels, page_bytes) for shape in set(shapes)
    }
    return block_tables([held[shape] for shape in shapes], checkpoint.damage, checkpoint.levels)


def _shape(block: BlockRecord) -> BlockShape:
    return BlockShape(block.rows, block.columns, 2 if block.module == "gate_up" else 1)


def _held_bytes(
    layout: BlockLayout, shape: BlockShape, levels: Sequence[int], page_bytes: int
) -> list[int]:
    """Planes up to a width and all tables up to it, each in whole pages."""
    parent, least = levels[-1], levels[0]
    pages = -(-part_bytes(layout, shape, parent_bits=parent, min_bits=least) // page_bytes)
    planes, tables = pages[:parent], pages[parent:]
    return [
        int(planes[:bits].sum() + tables[: bits - least + 1].sum()) * page_bytes for bits in levels
    ]


def plan_widths(
    checkpoint: QuantizedCheckpoint,
    settings: EngineSettings,
    *,
    arena_pages: int,
    page_bytes: int,
    layout: BlockLayout | None = None,
) -> WeightPlan:
    """First widths: one for all, or the planner's for an arena filled up to the target watermark.

    Raises:
        EngineSettingsError: If the width is none of the checkpoint's, or the weights do not fit.
    """
    tables = checkpoint_tables(checkpoint, page_bytes, layout)
    least_pages = int(tables.bytes_[:, 0].sum()) // page_bytes
    if isinstance(settings.precision, int):
        if settings.precision not in checkpoint.levels:
            raise EngineSettingsError(
                f"precision: must be a planner or one of {list(checkpoint.levels)}, "
                f"found {settings.precision}"
            )
        bits = np.full(len(checkpoint.blocks), settings.precision, dtype=np.int64)
        level = checkpoint.levels.index(settings.precision)
        least_pages = int(tables.bytes_[:, level].sum()) // page_bytes
    else:
        share = FULL_SHARE - precision_settings(settings).target_share
        budget = int(share * arena_pages) * page_bytes
        try:
            planner = precision_planner(settings.precision)
        except ValueError as error:
            raise EngineSettingsError(str(error)) from error
        bits = planner.plan(tables, budget).bits.astype(np.int64)
    if least_pages >= arena_pages:
        raise EngineSettingsError(
            f"memory_bytes: expert weights alone need {least_pages * page_bytes:,} bytes, the "
            f"arena has {arena_pages * page_bytes:,}; keys and values need room as well: ask for "
            "more with --memory"
        )
    return WeightPlan(tables, bits, least_pages)


def precision_settings(settings: EngineSettings) -> PrecisionSettings:
    """The policy's settings.

    Raises:
        EngineSettingsError: If one is unknown or out of range.
    """
    try:
        return PrecisionSettings(
            **{"planner": str(settings.precision), **settings.precision_settings}
        )
    except (TypeError, ValueError) as error:
        raise EngineSettingsError(f"precision_settings: {error}") from error


def weights_in_pages(
    checkpoint: QuantizedCheckpoint, arena: PageArena, bits: Ints, movement: Movement | None = None
) -> PageMover:
    """All blocks in host memory, and at their first widths in the arena.

    Args:
        checkpoint: Of the blocks.
        arena: With the history of ``movement``, if that has one.
        bits: [n] widths.
        movement: How pages move; None: by a thread of the CPU.

    Raises:
        ValueError: If the weights do not fit into the arena.
    """
    movement = Movement() if movement is None else movement
    device = movement.device(arena)
    parent = HostParent(
        [_shape(block) for block in checkpoint.blocks],
        movement.layout,
        page_bytes=arena.page_bytes,
        parent_bits=checkpoint.levels[-1],
        min_bits=checkpoint.levels[0],
        allocate=device.host_memory,
    )
    parent.store_all(checkpoint.block(i) for i in range(len(checkpoint.blocks)))
    try:
        return PageMover(
            parent, arena, device, bits, rules=movement.rules, history=movement.history
        )
    except BaseException:
        device.close()
        raise


def moving_precision(
    plan: WeightPlan,
    checkpoint: QuantizedCheckpoint,
    settings: EngineSettings,
    mover: PageMover,
    arena: PageArena,
    log: DecisionLog,
) -> PrecisionControl | None:
    """The policy that moves widths; None where one width is fixed for all."""
    if isinstance(settings.precision, int):
        return None
    policy = PrecisionPolicy(
        plan.tables,
        arena_pages=arena.num_pages,
        page_bytes=arena.page_bytes,
        settings=precision_settings(settings),
    )
    layers = len({block.layer for block in checkpoint.blocks})
    return PrecisionControl(
        LoggedPrecision(policy, log),
        mover,
        arena,
        layers=layers,
        experts=len(checkpoint.blocks) // (2 * layers),
        calibrated_mass=checkpoint.routing_mass,
        hot_coverage=settings.hot_coverage,
        hot_bits=settings.hot_bits,
        tables=plan.tables,
        block_weights=np.array([b.rows * b.columns for b in checkpoint.blocks], dtype=np.int64),
    )
