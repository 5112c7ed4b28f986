"""Bytes of a whole model whose experts are held at fewer bits, and the bits that fit into bytes.

An average between two widths is a mix: so many blocks of every shape at the upper width that their
share is the fraction. Everything else of the model stays at 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from models.llm_parameters import count_parameters
from models.llm_shape import LlmShape
from models.plane_bytes import (
    DEFAULT_MIN_BITS,
    DEFAULT_PAGE_BYTES,
    MAX_BITS,
    MIN_PAGE_BYTES,
    ResidentTables,
    TableEntry,
    block_bytes,
    block_pages,
    plane_bytes,
)

FULL_BYTES = 2  # a weight of 16 bits


class WeightMemoryError(ValueError):
    """A question about memory that has no answer; the message says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStorage:
    """How weight blocks are held on the device.

    Attributes:
        tables: Which tables are resident: that of the width in use, or those of all widths up to
            it, so that a drop moves no bytes.
        entry: What a table entry is.
        page_bytes: Bytes of a page; every plane and every table is rounded up by itself.
        min_bits: The lowest width a block can drop to.
    """

    tables: ResidentTables = "active"
    entry: TableEntry = "fp16"
    page_bytes: int = DEFAULT_PAGE_BYTES
    min_bits: int = DEFAULT_MIN_BITS

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("tables", self.tables, ResidentTables),
            ("entry", self.entry, TableEntry),
        ):
            if value not in get_args(choices):
                allowed = ", ".join(get_args(choices))
                raise WeightMemoryError(f"{name}: must be one of {allowed}, found {value!r}")
        if self.page_bytes < MIN_PAGE_BYTES or self.page_bytes & (self.page_bytes - 1):
            raise WeightMemoryError(
                f"page_bytes: must be a power of two >= {MIN_PAGE_BYTES:,}, "
                f"found {self.page_bytes:,}"
            )
        if not 1 <= self.min_bits <= MAX_BITS:
            raise WeightMemoryError(
                f"min_bits: must be within 1..{MAX_BITS}, found {self.min_bits}"
            )

    def block_bytes(self, rows: int, columns: int, bits: int) -> int:
        """Bytes of a block of so many rows and columns at ``bits``."""
        return block_bytes(
            rows, columns, bits, min_bits=self.min_bits, tables=self.tables, entry=self.entry
        )

    def block_pages(self, rows: int, columns: int, bits: int) -> int:
        """Its pages."""
        return block_pages(
            rows,
            columns,
            bits,
            page_bytes=self.page_bytes,
            min_bits=self.min_bits,
            tables=self.tables,
            entry=self.entry,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMemory:
    """All routed experts of a model at an average width.

    Attributes:
        bits: Bits per weight in planes, as really mixed.
        plane_bytes: Bytes of the planes.
        table_bytes: Bytes of the resident tables.
        paged_bytes: Bytes of the pages that hold both.
        num_weights: Weights of all experts, >= 1.
    """

    bits: float
    plane_bytes: int
    table_bytes: int
    paged_bytes: int
    num_weights: int

    @property
    def total_bytes(self) -> int:
        """Planes and tables."""
        return self.plane_bytes + self.table_bytes

    @property
    def effective_bits(self) -> float:
        """Bits per weight, tables included."""
        return 8 * self.total_bytes / self.num_weights

    @property
    def page_waste(self) -> float:
        """Share by which pages exceed what they hold."""
        return self.paged_bytes / self.total_bytes - 1.0


def other_bytes(shape: LlmShape) -> int:
    """Bytes at 16 bits of everything that is no routed expert."""
    return FULL_BYTES * count_parameters(shape).other


def full_expert_bytes(shape: LlmShape) -> int:
    """Bytes at 16 bits of the routed experts."""
    return FULL_BYTES * count_parameters(shape).experts


def saved_share(shape: LlmShape, expert_bytes: float) -> float:
    """Share of the whole model's bytes at 16 bits that is saved when experts take so many."""
    full = other_bytes(shape) + full_expert_bytes(shape)
    return 1.0 - (other_bytes(shape) + expert_bytes) / full


def expert_memory(shape: LlmShape, bits: float, storage: BlockStorage) -> ExpertMemory:
    """The experts at an average of ``bits``.

    Args:
        shape: A model with experts.
        bits: Average width, ``storage.min_bits``..8; a fraction mixes its two neighbours.
        storage: How blocks are held.

    Raises:
        WeightMemoryError: If the model has no experts or ``bits`` is out of range.
    """
    _require_experts(shape)
    if not storage.min_bits <= bits <= MAX_BITS:
        raise WeightMemoryError(
            f"bits: must be within {storage.min_bits}..{MAX_BITS}, found {bits}"
        )
    low = math.floor(bits)
    planes = total = pages = weights = plane_bits = 0
    for group in shape.expert_matrices:
        n, k = group.rows, group.columns
        num_upper = round((bits - low) * group.count)
        for width, count in ((low, group.count - num_upper), (low + 1, num_upper)):
            if count:
                planes += count * width * plane_bytes(n, k)
                total += count * storage.block_bytes(n, k, width)
                pages += count * storage.block_pages(n, k, width)
                plane_bits += count * width * n * k
                weights += count * n * k
    return ExpertMemory(
        bits=plane_bits / weights,
        plane_bytes=planes,
        table_bytes=total - planes,
        paged_bytes=pages * storage.page_bytes,
        num_weights=weights,
    )


def bits_within(
    shape: LlmShape, expert_bytes: float, storage: BlockStorage, *, in_pages: bool = False
) -> float | None:
    """The largest average width at which the experts take no more than ``expert_bytes``.

    Between two whole widths bytes grow in proportion to the share of blocks at the upper one.

    Args:
        shape: A model with experts.
        expert_bytes: What they may take.
        storage: How blocks are held.
        in_pages: Count whole pages.

    Returns:
        ``storage.min_bits``..8; None where even the lowest width takes more.

    Raises:
        WeightMemoryError: If the model has no experts.
    """
    best: float | None = None
    below = 0
    for width in range(storage.min_bits, MAX_BITS + 1):
        found = expert_memory(shape, width, storage)
        size = found.paged_bytes if in_pages else found.total_bytes
        if size > expert_bytes:
            return best if best is None else best + (expert_bytes - below) / (size - below)
        best, below = float(width), size
    return best


def bits_for_saving(
    shape: LlmShape, saving: float, storage: BlockStorage, *, in_pages: bool = False
) -> float | None:
    """The largest average width that saves a share of the whole model's bytes at 16 bits.

    Args:
        shape: A model with experts.
        saving: Share, e.g. 0.72.
        storage: How blocks are held.
        in_pages: Count whole pages.

    Returns:
        ``storage.min_bits``..8; None where even the lowest width saves less.

    Raises:
        WeightMemoryError: If the model has no experts.
    """
    _require_experts(shape)
    full = other_bytes(shape) + full_expert_bytes(shape)
    return bits_within(
        shape, (1.0 - saving) * full - other_bytes(shape), storage, in_pages=in_pages
    )


def _require_experts(shape: LlmShape) -> None:
    if not shape.expert_matrices:
        raise WeightMemoryError(f"{shape.name}: has no experts to hold at fewer bits")
