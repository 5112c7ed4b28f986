"""Launchers of the tensor-core expert kernels: one layer in three launches, on a GPU or emulated.

    schedule   router output to work lists; tokens to int8 terms        moe_schedule.cu
    gate_up    act(gate x) * (up x), then its int8 terms                moe_tile.cu
    down       gate weight * down h, then the sum over a token's experts

The device alone decides what is read: widths, pages and routing come from arrays at fixed
addresses, so the launches of a layer can be captured once and replayed while they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kernels.cuda.load import Target, load_kernels
from kernels.cuda.moe_tile_arguments import (
    WARPS,
    Activation,
    Array,
    DevicePages,
    MoeShape,
    Tiling,
    check_array,
)
from kernels.cuda.tile_layout import (
    TILE_ROWS,
    UNIT_BYTES,
    UNIT_COLUMNS,
    check_page_bytes,
)

__all__ = [
    "Activation",
    "DevicePages",
    "MoeShape",
    "MoeTileLayer",
    "Tiling",
    "kernel_variants",
    "shared_bytes",
    "tile_expression",
    "token_blocks",
]

HERE = Path(__file__).resolve().parent
TILE_SOURCE = HERE / "moe_tile.cu"
SCHEDULE_SOURCE = HERE / "moe_schedule.cu"
THREADS = 256
FEW_TOKENS = 16  # tokens of an expert that are multiplied as soon as a weight is decoded
_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
_RESERVED_SHARED_BYTES = 1024  # of each block, by the system
_MODULES = {"gate_up": 0, "down": 1}

ModuleName = Literal["gate_up", "down"]


def token_blocks(num_tokens: int) -> int:
    """Blocks of four tokens that a kernel must be built for: 1, 2 or 4."""
    return 1 if num_tokens <= 4 else 2 if num_tokens <= 8 else 4


def tile_expression(module: ModuleName, num_tokens: int) -> str:
    """The instance of moe_tile for launches of up to num_tokens tokens."""
    many = "true" if num_tokens > FEW_TOKENS else "false"
    return f"moe_tile<{_MODULES[module]}, {token_blocks(num_tokens)}, {many}>"


def shared_bytes(num_tokens: int) -> int:
    """Dynamic shared memory of moe_tile in bytes."""
    turn = 512
    few = 32768 + WARPS * token_blocks(num_tokens) * 4 * 24 * 4 + token_blocks(num_tokens) * 256
    if num_tokens > FEW_TOKENS:
        return turn + WARPS * 4096 + max(few, 65536 + 65536)
    return turn + WARPS * 8192 + few


class MoeTileLayer:
    """The expert layers of one model, for up to `max_tokens` tokens a call.

    All buffers are made once and never move. Not safe for two streams at a time.

    Args:
        shape: Sizes.
        pages: The weights.
        max_tokens: T at most; above 16 the kernels that decode once for many tokens are used.
        target: "gpu" for cupy arrays, "emulation" for numpy arrays.
        grid: Thread blocks of a launch; by default all that the GPU holds at once.
        schedule: Order of execution under emulation.
        ubsan: Trap on undefined behaviour under emulation.
        tilings: For gate_up and down; chosen from the shapes by default.

    Raises:
        ValueError: If an argument is out of range, the page lists are too short for the shapes or
            the GPU has too little shared memory (it takes 99.75 KiB up to 4 tokens, 160.5 KiB
            above 16).
        kernels.cuda.load.GpuUnavailableError: Target "gpu" without one.
    """

    def __init__(
        self,
        shape: MoeShape,
        pages: DevicePages,
        *,
        max_tokens: int,
        target: Target,
        grid: int | None = None,
        schedule: int = 0,
        ubsan: bool = False,
        tilings: tuple[Tiling, Tiling] | None = None,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, found {max_tokens}")
        self.shape, self.pages, self.max_tokens, self.target = shape, pages, max_tokens, target
        self._many = max_tokens > FEW_TOKENS
        self._check_page_lists()
        self._tilings = tilings or (
            Tiling.choose(shape.gate_up, many=self._many),
            Tiling.choose(shape.down, many=self._many),
        )
        if self._many and any(t.item_tiles != 8 for t in self._tilings):
            raise ValueError("more than 16 tokens need tilings of 8 row tiles an item")
        self._xp = _array_module(target)
        self._grid = grid or self._default_grid()
        self._schedule, self._tiles = self._load(schedule, ubsan)
        self._allocate()

    @property
    def layers(self) -> int:
        """Layers that the pages hold."""
        return int(self.pages.bits.shape[0] // (2 * self.shape.experts))

    def __call__(
        self,
        layer: int,
        tokens: Array,
        expert_index: Array,
        gate_weight: Array,
        out: Array,
        *,
        expert_scale: Array | None = None,
    ) -> None:
        """One layer: out[t] = sum over choices of gate weight * expert(tokens[t]).

        Args:
            layer: In 0..layers-1.
            tokens: [T, H], float32 or float16, or uint16 holding bfloat16 bits; T <= max_tokens.
            expert_index: [T, top_k], int32; a value outside [0, E) is no expert (padding).
            gate_weight: [T, top_k], float32.
            out: [T, H], float32, written.
            expert_scale: [E], float32: a factor of each expert's output.

        Raises:
            ValueError: If an array does not fit.
        """
        s = self.shape
        count = tokens.shape[0] if getattr(tokens, "ndim", 0) == 2 else -1
        if not 1 <= count <= self.max_tokens:
            raise ValueError(f"tokens must be [1..{self.max_tokens}, {s.hidden}]: {tokens.shape}")
        kind = _KINDS["bfloat16" if str(tokens.dtype) == "uint16" else _dtype(tokens)]
        check_array("tokens", tokens, str(tokens.dtype), (count, s.hidden))
        check_array("expert_index", expert_index, "int32", (count, s.top_k))
        check_array("gate_weight", gate_weight, "float32", (count, s.top_k))
        check_array("out", out, "float32", (count, s.hidden))
        if expert_scale is not None:
            check_array("expert_scale", expert_scale, "float32", (s.experts,))
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer must be 0..{self.layers - 1}, found {layer}")
        first_block = layer * 2 * s.experts
        self._launch_schedule(first_block, count, kind, tokens, expert_index, out)
        self._launch_tiles(0, first_block, count, gate_weight, expert_scale, out)
        self._launch_tiles(1, first_block, count, gate_weight, expert_scale, out)
        if self._many:
            self._launch_combine(count, out)

    # ------------------------------------------------------------ launches
    def _launch_schedule(
        self, first_block: int, count: int, kind: int, tokens: Array, index: Array, out: Array
    ) -> None:
        s, units = self.shape, self.shape.gate_up.units
        grid = 1 + -(-count * units // WARPS)
        arguments = (index, self.pages.bits, self._plan, tokens, self._x, self._x_scales, out)
        numbers = [first_block, s.experts, s.top_k, self._max_slots, s.down.units]
        numbers += [self._num_tickets, count, s.hidden, units, kind]
        shared = 4 * (WARPS + 1) * s.experts
        self._schedule(
            (grid,), (THREADS,), (*arguments, *map(np.int32, numbers)), shared_mem=shared
        )

    def _launch_tiles(
        self, module: int, first_block: int, count: int, weight: Array, scale: Array, out: Array
    ) -> None:
        s, p = self.shape, self.pages
        tiles = (s.gate_up, s.down)[module]
        tiling = self._tilings[module]
        x = (self._x, self._x_scales) if module == 0 else (self._h, self._h_scales)
        rows = self._h_rows if module == 0 else self._rows
        arrays = [p.arena, p.bits, p.plane_pages, p.table_pages, *x, weight, scale, self._plan]
        arrays += [rows, self._h, self._h_scales, out, self._partial]
        numbers = [first_block, p.plane_pages.shape[1], p.plane_pages.shape[2]]
        numbers += [p.table_pages.shape[1], p.table_pages.shape[2], p.min_bits]
        numbers += [check_page_bytes(p.page_bytes), s.experts, self._max_slots, s.down.units]
        numbers += [tiles.row_tiles, tiles.full_units, tiles.units - tiles.full_units]
        numbers += [tiling.item_tiles, tiling.split_log2, s.top_k, count]
        numbers += [s.intermediate if module == 0 else s.hidden]
        numbers += [int(s.activation == "gelu_tanh"), int(not self._many)]
        self._tiles[module](
            (self._grid,),
            (THREADS,),
            (*arrays, *map(np.int32, numbers)),
            shared_mem=shared_bytes(self.max_tokens),
        )

    def _launch_combine(self, count: int, out: Array) -> None:
        s = self.shape
        numbers = (s.experts, self._max_slots, s.down.units, s.top_k, count, s.hidden)
        grid = min(self._grid * 4, -(-count * s.hidden // THREADS))
        arguments = (self._rows, self._plan, out, *map(np.int32, numbers))
        self._combine((grid,), (THREADS,), arguments)

    # ------------------------------------------------------------ setting up
    def _check_page_lists(self) -> None:
        s, p = self.shape, self.pages
        blocks = p.bits.shape[0]
        if not blocks or blocks % (2 * s.experts):
            raise ValueError(f"bits must hold whole layers of {2 * s.experts} blocks: {blocks}")
        need = -(-max(s.gate_up.plane_bytes, s.down.plane_bytes) // p.page_bytes)
        if p.plane_pages.shape[2] < need:
            raise ValueError(f"plane_pages needs {need} pages a plane: {p.plane_pages.shape}")
        largest = max(s.gate_up.plane_bytes, s.down.plane_bytes)
        if largest + UNIT_BYTES >= 2**32:
            raise ValueError(f"a plane must be below 4 GiB, found {largest} bytes")

    def _load(self, schedule: int, ubsan: bool) -> tuple[Any, tuple[Any, Any]]:
        plan = load_kernels(
            SCHEDULE_SOURCE, target=self.target, schedule=schedule, ubsan=ubsan
        ).get_function("moe_schedule")
        modules = [
            load_kernels(
                TILE_SOURCE,
                target=self.target,
                name_expressions=[expression],
                schedule=schedule,
                ubsan=ubsan,
            )
            for expression in self._expressions()
        ]
        tiles = [m.get_function(e) for m, e in zip(modules, self._expressions(), strict=True)]
        for kernel in tiles:
            kernel.max_dynamic_shared_size_bytes = shared_bytes(self.max_tokens)
        self._combine = modules[0].get_function("moe_tile_combine")
        return plan, (tiles[0], tiles[1])

    def _expressions(self) -> Sequence[str]:
        return [
            tile_expression("gate_up", self.max_tokens),
            tile_expression("down", self.max_tokens),
        ]

    def _default_grid(self) -> int:
        if self.target == "emulation":
            return 2
        import cupy

        attributes = cupy.cuda.Device().attributes
        need = shared_bytes(self.max_tokens)
        if need > attributes["MaxSharedMemoryPerBlockOptin"]:
            raise ValueError(
                f"a block needs {need} bytes of shared memory, this GPU allows "
                f"{attributes['MaxSharedMemoryPerBlockOptin']}"
            )
        # all blocks must be at work at once: the first two items of each are its own
        fit = attributes["MaxSharedMemoryPerMultiprocessor"] // (need + _RESERVED_SHARED_BYTES)
        blocks = min(fit, 2 if self.max_tokens <= 8 else 1)
        return int(attributes["MultiProcessorCount"] * blocks)

    def _allocate(self) -> None:
        s, xp = self.shape, self._xp
        slots = self._max_slots = self.max_tokens * s.top_k
        units, groups = s.gate_up.units, s.down.units
        row_groups = -(-s.down.row_tiles // self._tilings[1].item_tiles)
        self._num_tickets = s.experts * groups + row_groups
        self._plan = xp.zeros(3 * s.experts + 4 + 2 * slots + self._num_tickets, xp.int32)
        self._x = xp.zeros((self.max_tokens, units, 2 * UNIT_COLUMNS), xp.int8)
        self._x_scales = xp.zeros((self.max_tokens, units), xp.float32)
        self._h = xp.zeros((slots, groups, 2 * UNIT_COLUMNS), xp.int8)
        self._h_scales = xp.zeros((slots, groups), xp.float32)
        self._h_rows = xp.zeros((slots, groups * UNIT_COLUMNS), xp.float32)
        self._rows = xp.zeros((slots, s.hidden), xp.float32)
        self._partial = None
        if self.max_tokens > 64:
            tiles = max(s.gate_up.row_tiles, s.down.row_tiles)
            self._partial = xp.zeros((slots, tiles * TILE_ROWS), xp.float32)


Variant = tuple[str, Path, tuple[str, ...], tuple[str, ...]]


def kernel_variants() -> list[Variant]:
    """Every kernel of these sources: (name, source, defines, name expressions)."""
    variants: list[Variant] = [("moe_schedule", SCHEDULE_SOURCE, (), ())]
    modules: tuple[ModuleName, ModuleName] = ("gate_up", "down")
    for module in modules:
        for num_tokens in (4, 8, 16, 17):
            many = "_many" if num_tokens > FEW_TOKENS else ""
            name = f"moe_tile_{module}_{token_blocks(num_tokens)}{many}"
            variants.append((name, TILE_SOURCE, (), (tile_expression(module, num_tokens),)))
    return variants


def _array_module(target: Target) -> Any:
    if target == "emulation":
        return np
    import cupy

    return cupy


def _dtype(array: Array) -> str:
    name = str(array.dtype)
    if name not in _KINDS:
        raise ValueError(f"tokens must be float32, float16 or bfloat16 bits (uint16): {name}")
    return name
