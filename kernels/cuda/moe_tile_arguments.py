"""What the launchers of the tensor-core expert kernels take, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kernels.cuda.tile_layout import TileShape, check_page_bytes

WARPS = 8
MAX_EXPERTS = 2048

Activation = Literal["silu", "gelu_tanh"]
Array = Any  # numpy or cupy


def check_array(name: str, array: Array, dtype: str, shape: tuple[int | None, ...]) -> None:
    """Refuse an array that is not contiguous, of this dtype and shape (None: any extent)."""
    fits = str(array.dtype) == dtype and array.ndim == len(shape)
    fits = fits and all(w is None or h == w for h, w in zip(array.shape, shape, strict=True))
    if not fits or not array.flags.c_contiguous:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{name} must be contiguous {dtype} [{wanted}], found {array.dtype} {array.shape}"
        )


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
        check_array("arena", self.arena, "uint8", (None,))
        check_array("bits", self.bits, "int32", (None,))
        blocks = self.bits.shape[0]
        check_array("plane_pages", self.plane_pages, "int32", (blocks, None, None))
        check_array("table_pages", self.table_pages, "int32", (blocks, None, None))
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
