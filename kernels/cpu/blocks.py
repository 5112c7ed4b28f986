"""Contiguous weights as the CPU kernels take them; arrays are checked when an object is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.arrays import check_array
from kernels.cpu.library import WeightsArgument
from kernels.planes import PlaneArray, check_planes

HalfArray = NDArray[np.float16]
IntArray = NDArray[np.int32]
CONTIGUOUS = -1  # page_shift of a block without pages
WIDTHS = "2..8"


@dataclass(frozen=True, eq=False)
class ContiguousBlock:
    """One expert matrix at one width.

    Args:
        planes: [>= bits, N, ceil(columns/32)], uint32, C-contiguous, most significant bit first.
        table: [N, 2**bits], float16, C-contiguous.
        bits: 2..8.
        columns: K, weights in a row.

    Raises:
        ValueError: If an array does not fit.
    """

    planes: PlaneArray
    table: HalfArray
    bits: int
    columns: int

    index: ClassVar[int] = 0
    num_pages: ClassVar[int] = 0
    widths: ClassVar[str] = WIDTHS

    def __post_init__(self) -> None:
        check_planes(self.planes, self.bits, self.columns)
        check_array("planes", self.planes, np.uint32, self.planes.shape)
        check_array("table", self.table, np.float16, (self.rows, 1 << self.bits))

    @property
    def rows(self) -> int:
        """N, outputs."""
        return int(self.planes.shape[1])

    @cached_property
    def argument(self) -> WeightsArgument:
        """What the library takes; valid as long as this object lives."""
        return contiguous_argument([self])

    def contiguous(self) -> ContiguousBlock:
        """This block."""
        return self


@dataclass(frozen=True, eq=False)
class ContiguousExperts:
    """The experts of one layer, each matrix at a width of its own.

    Args:
        blocks: 2E blocks in the order expert * 2 + module, module 0 = gate_up [2I, H] with the
            gate rows first, 1 = down [H, I].

    Raises:
        ValueError: If there are none or their shapes do not fit each other.
    """

    blocks: Sequence[ContiguousBlock]

    first_block: ClassVar[int] = 0
    num_pages: ClassVar[int] = 0
    widths: ClassVar[str] = WIDTHS

    def __post_init__(self) -> None:
        if not self.blocks or len(self.blocks) % 2:
            raise ValueError(f"blocks must be 2 per expert and not none, found {len(self.blocks)}")
        for i, block in enumerate(self.blocks):
            shape = (self.hidden, self.inner) if i % 2 else (2 * self.inner, self.hidden)
            if (block.rows, block.columns) != shape:
                raise ValueError(
                    f"block {i} must be {list(shape)}, found {[block.rows, block.columns]}"
                )

    @property
    def experts(self) -> int:
        """E."""
        return len(self.blocks) // 2

    @property
    def hidden(self) -> int:
        """H, the width of a token."""
        return self.blocks[0].columns

    @property
    def inner(self) -> int:
        """I, the width between the two matrices."""
        return self.blocks[0].rows // 2

    def block(self, index: int) -> ContiguousBlock:
        """Block expert * 2 + module."""
        return self.blocks[index]

    @cached_property
    def argument(self) -> WeightsArgument:
        """What the library takes; valid as long as this object lives."""
        return contiguous_argument(self.blocks)


def contiguous_argument(blocks: Sequence[ContiguousBlock]) -> WeightsArgument:
    """What the library takes for these blocks; valid as long as they and the result live."""
    lists = (
        np.array([b.bits for b in blocks], np.int32),
        np.array([b.planes.ctypes.data for b in blocks], np.uint64),
        np.array([b.table.ctypes.data for b in blocks], np.uint64),
    )
    bits, planes, tables = (x.ctypes.data for x in lists)
    argument = WeightsArgument(
        page_shift=CONTIGUOUS, min_bits=2, parent_bits=8, bits=bits, planes=planes, tables=tables
    )
    argument.kept_alive = lists
    return argument
