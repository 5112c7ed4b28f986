"""What holding a weight block at a width costs: bytes and damage, and the hull between them.

The widths of a block form a curve of (bytes, damage). Only its lower convex hull matters for a
threshold on damage per byte. From any width the next vertex of the hull above it is the one with
the steepest fall of damage per byte, whatever lies below; so one table of next vertices serves
every floor, also one that falls inside a pooled run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Levels = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_TOTAL_BYTES = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class BlockTables:
    """Bytes, damage and hull of every weight block.

    Attributes:
        bits: Widths, ascending; level ``j`` means ``bits[j]``.
        bytes_: [num_blocks, num_levels] int64, bytes a block holds, not falling with the width.
        damage: [num_blocks, num_levels] float64, >= 0.
        next_level: [num_blocks, num_levels] int64, the next hull vertex above a level; the level
            itself where no wider one has less damage.
        ratio: [num_blocks, num_levels] float64, damage saved per byte by that step; 0 where there
            is none, infinite where it costs no bytes.
    """

    bits: tuple[int, ...]
    bytes_: Ints
    damage: Floats
    next_level: Levels
    ratio: Floats

    @property
    def num_blocks(self) -> int:
        """How many weight blocks."""
        return len(self.bytes_)

    @property
    def top_level(self) -> int:
        """The level of the widest bits."""
        return len(self.bits) - 1


def block_tables(bytes_: ArrayLike, damage: ArrayLike, bits: Sequence[int]) -> BlockTables:
    """Checked tables with their hulls.

    Args:
        bytes_: [num_blocks, num_levels] whole numbers >= 0.
        damage: [num_blocks, num_levels] finite, >= 0; need be neither convex nor falling.
        bits: Ascending widths.

    Raises:
        ValueError: Naming the first block and width that break a rule.
    """
    widths = tuple(int(b) for b in bits)
    if not widths or any(b <= a for a, b in zip((0, *widths), widths, strict=False)):
        raise ValueError(f"bits must be ascending and >= 1, found {list(bits)}")
    given = np.asarray(bytes_)
    harm = np.ascontiguousarray(damage, dtype=np.float64)
    for name, table in (("bytes_", given), ("damage", harm)):
        if table.ndim != 2 or table.shape[1] != len(widths):
            raise ValueError(
                f"{name} must be [num_blocks, {len(widths)}] for bits {list(widths)}, "
                f"found shape {list(table.shape)}"
            )
    if given.shape != harm.shape:
        raise ValueError(f"bytes_ has {len(given):,} blocks, but damage has {len(harm):,}")
    _require(np.isfinite(given) & (given >= 0) & (given < MAX_TOTAL_BYTES), "bytes_", given, widths)
    held = np.ascontiguousarray(given, dtype=np.int64)
    _require(held == given, "bytes_", given, widths, "a whole number")
    rises = np.ones(held.shape, dtype=bool)
    rises[:, 1:] = held[:, 1:] >= held[:, :-1]
    _require(rises, "bytes_", held, widths, "at least that of the width below")
    _require(np.isfinite(harm) & (harm >= 0), "damage", harm, widths)
    if float(given[:, -1].sum(dtype=np.float64)) >= MAX_TOTAL_BYTES:
        raise ValueError("bytes_ of all blocks must stay below 2**53 in sum")
    top = np.full(len(held), len(widths) - 1, dtype=np.int64)
    return BlockTables(widths, held, harm, *hull_steps(held, harm, top))


def hull_steps(bytes_: Ints, damage: Floats, cap_level: Levels) -> tuple[Levels, Floats]:
    """Next hull vertex above every level, none above ``cap_level``, and its damage per byte.

    Equal slopes are pooled: the farthest vertex is next.

    Args:
        bytes_: [num_blocks, num_levels].
        damage: [num_blocks, num_levels].
        cap_level: [num_blocks].

    Returns:
        ``next_level`` and ``ratio`` as in ``BlockTables``.
    """
    num_levels = bytes_.shape[1]
    next_level = np.tile(np.arange(num_levels), (len(bytes_), 1))
    ratio = np.zeros(bytes_.shape)
    for low in range(num_levels):
        for high in range(low + 1, num_levels):
            saved = damage[:, low] - damage[:, high]
            cost = (bytes_[:, high] - bytes_[:, low]).astype(np.float64)
            slope = np.where(saved > 0.0, np.inf, 0.0)
            np.divide(saved, cost, out=slope, where=(saved > 0.0) & (cost > 0.0))
            better = (slope > 0.0) & (slope >= ratio[:, low]) & (high <= cap_level)
            ratio[better, low] = slope[better]
            next_level[better, low] = high
    return next_level, ratio


def _require(
    holds: NDArray[np.bool_],
    name: str,
    table: NDArray[np.generic],
    bits: tuple[int, ...],
    rule: str = "finite and >= 0",
) -> None:
    if not holds.all():
        block, level = (int(entry[0]) for entry in np.nonzero(~holds))
        raise ValueError(
            f"{name} of block {block} at {bits[level]} bits must be {rule}, "
            f"found {table[block, level]}"
        )
