"""Launchers of the tensor-core expert kernels: one layer in three launches, on a GPU or emulated.

    schedule   router output to work lists; tokens to int8 terms        moe_schedule.cu
    gate_up    act(gate x) * (up x), then its int8 terms                moe_tile.cu
    down       gate weight * down h, then the sum over a token's experts

The device alone decides what is read: widths, pages and routing come from arrays at fixed
addresses, so the launches of a layer can be captured once and replayed while they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kernels.cuda.load import Target, load_kernels
from kernels.cuda.tile_layout import (
    TILE_ROWS,
    UNIT_BYTES,
    UNIT_COLUMNS,
    TileShape,
    check_page_bytes,
)

HERE = Path(__file__).resolve().parent
TILE_SOURCE = HERE / "moe_tile.cu"
SCHEDULE_SOURCE = HERE / "moe_schedule.cu"
THREADS = 256
WARPS = 8
FEW_TOKENS = 16  # tokens of an expert that are multiplied as soon as a weight is decoded
MAX_EXPERTS = 2048
_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
_MODULES = {"gate_up": 0, "down": 1}

Activation = Literal["silu", "gelu_tanh"]
Array = Any  # numpy or cupy


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Sizes of the expert layers of one model.

    Attributes:
        experts: E of one layer, 1..2048.
        hidden: H, columns of gate_up and rows of down.
        intermediate: I; gate_up has 2 I rows, down I columns.
        top_k: Experts of a token, 1..E.
        activation: Of the gate.
    """

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        if not 1 <= self.experts <= MAX_EXPERTS:
            raise ValueError(f"experts must be 1..{MAX_EXPERTS}, found {self.experts}")
        if min(self.hidden, self.intermediate) < 1:
            raise ValueError(
                f"hidden and intermediate must be >= 1: {self.hidden}, {self.intermediate}"
            )
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be 1..{self.experts}, found {self.top_k}")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation must be silu or gelu_tanh, found {self.activation!r}")

    @property
    def gate_up(self) -> TileShape:
        """Tiles of a gate_up matrix."""
        return TileShape(2 * self.intermediate, self.hidden, halves=2)

    @property
    def down(self) -> TileShape:
        """Tiles of a down matrix."""
        return TileShape(self.hidden, self.intermediate)


@dataclass(frozen=True, slots=True)
class DevicePages:
    """Where the weights of all layers lie, as runtime/page_tables.py describes it.

    Streams are those of tile_layout.py (planes) and decode_tables.py (tables).

    Attributes:
        arena: [bytes], uint8, 16-byte aligned.
        page_bytes: A power of two >= 1024.
        min_bits: Width of the first table, m.
        bits: [n], int32: width of each block, in 2..8 and >= m.
        plane_pages: [n, B, P], int32.
        table_pages: [n, tables, T], int32: the table of width q at q - m.
    """

    arena: Array
    page_bytes: int
    min_bits: int
    bits: Array
    plane_pages: Array
    table_pages: Array

    def __post_init__(self) -> None:
        check_page_bytes(self.page_bytes)
        _check("arena", self.arena, "uint8", (None,))
        _check("bits", self.bits, "int32", (None,))
        blocks = self.bits.shape[0]
        _check("plane_pages", self.plane_pages, "int32", (blocks, None, None))
        _check("table_pages", self.table_pages, "int32", (blocks, None, None))
        if not 2 <= self.min_bits <= 8:
            raise ValueError(f"min_bits must be 2..8, found {self.min_bits}")
        if self.plane_pages.size >= 2**31 or self.table_pages.size >= 2**31:
            raise ValueError("plane_pages and table_pages must have fewer than 2**31 entries")


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one module's rows and columns are shared out.

    Attributes:
        item_tiles: Row tiles of a work item, 2, 4 or 8.
        split_log2: Log2 of the warps that share a row tile's columns; 8 >> split_log2 row tiles
            are at work at a time and divide item_tiles.
    """

    item_tiles: int
    split_log2: int

    def __post_init__(self) -> None:
        if self.item_tiles not in (2, 4, 8) or not 0 <= self.split_log2 <= 3:
            raise ValueError(f"item_tiles must be 2, 4 or 8 and split_log2 0..3, found {self}")
        if self.item_tiles % (WARPS >> self.split_log2):
            raise ValueError(f"8 >> split_log2 must divide item_tiles, found {self}")

    @classmethod
    def choose(cls, shape: TileShape, *, many: bool) -> Tiling:
        """About four units of 256 columns for each warp; eight row tiles where tokens are many."""
        split_log2 = max(0, min(2, (shape.units // 3).bit_length() - 1))
        return cls(8 if many else WARPS >> split_log2, split_log2)


def token_blocks(num_tokens: int) -> int:
    """Blocks of four tokens that a kernel must be built for: 1, 2 or 4."""
    return 1 if num_tokens <= 4 else 2 if num_tokens <= 8 else 4


def tile_expression(module: Literal["gate_up", "down"], num_tokens: int) -> str:
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
        max_tokens: T at most.
        target: "gpu" for cupy arrays, "emulation" for numpy arrays.
        grid: Thread blocks of a launch; by default two (or one) for each multiprocessor.
        schedule: Order of execution under emulation.
        tilings: For gate_up and down; chosen from the shapes by default.

    Raises:
        ValueError: If an argument is out of range or the page lists are too short for the shapes.
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
        _check("tokens", tokens, str(tokens.dtype), (count, s.hidden))
        _check("expert_index", expert_index, "int32", (count, s.top_k))
        _check("gate_weight", gate_weight, "float32", (count, s.top_k))
        _check("out", out, "float32", (count, s.hidden))
        if expert_scale is not None:
            _check("expert_scale", expert_scale, "float32", (s.experts,))
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
        numbers = (first_block, s.experts, s.top_k, self._max_slots, s.down.units)
        numbers += (self._num_tickets, count, s.hidden, units, kind)
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
        arrays = (p.arena, p.bits, p.plane_pages, p.table_pages, *x, weight, scale, self._plan)
        arrays += (rows, self._h, self._h_scales, out, self._partial)
        numbers = (first_block, p.plane_pages.shape[1], p.plane_pages.shape[2])
        numbers += (p.table_pages.shape[1], p.table_pages.shape[2], p.min_bits)
        numbers += (check_page_bytes(p.page_bytes), s.experts, self._max_slots, s.down.units)
        numbers += (tiles.row_tiles, tiles.full_units, tiles.units - tiles.full_units)
        numbers += (tiling.item_tiles, tiling.split_log2, s.top_k, count)
        numbers += (s.intermediate if module == 0 else s.hidden,)
        numbers += (int(s.activation == "gelu_tanh"), int(not self._many))
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

        processors = cupy.cuda.Device().attributes["MultiProcessorCount"]
        return int(processors) * (2 if self.max_tokens <= 8 else 1)

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


def kernel_variants() -> list[tuple[str, Path, tuple[str, ...], tuple[str, ...]]]:
    """Every kernel of these sources: (name, source, defines, name expressions)."""
    variants = [("moe_schedule", SCHEDULE_SOURCE, (), ())]
    for module in ("gate_up", "down"):
        for num_tokens in (4, 8, 16, 17):
            expression = tile_expression(module, num_tokens)
            many = "_many" if num_tokens > FEW_TOKENS else ""
            name = f"moe_tile_{module}_{token_blocks(num_tokens)}{many}"
            variants.append((name, TILE_SOURCE, (), (expression,)))
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


def _check(name: str, array: Array, dtype: str, shape: tuple[int | None, ...]) -> None:
    fits = str(array.dtype) == dtype and array.ndim == len(shape)
    fits = fits and all(w is None or h == w for h, w in zip(array.shape, shape, strict=True))
    if not fits or not array.flags.c_contiguous:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{name} must be contiguous {dtype} [{wanted}], found {array.dtype} {array.shape}"
        )
