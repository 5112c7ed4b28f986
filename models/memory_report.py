"""What fewer bits per expert weight free for the KV cache: the numbers of ``twin memory``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from models.kv_bytes import (
    BLOCK_TOKENS,
    VALUE_BYTES,
    KvTokenBytes,
    kv_block_pages,
    kv_growth_tokens,
    kv_layers,
    kv_token_bytes,
    kv_tokens_per_sequence,
)
from models.llm_parameters import ParameterCounts, count_parameters
from models.llm_shape import LlmShape
from models.plane_bytes import MAX_BITS, plane_bytes
from models.weight_memory import (
    BlockStorage,
    ExpertMemory,
    WeightMemoryError,
    bits_for_saving,
    bits_within,
    expert_memory,
    full_expert_bytes,
    other_bytes,
    saved_share,
)

PUBLISHED_SAVING = 0.72  # PagedWeight: 72.0 % less GPU memory than 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """What is asked about every model.

    Attributes:
        bits: Average widths, in the order of the report.
        storage: How weight blocks are held.
        saving: Share of the whole model that is to be saved.
        budget_bytes: Memory for weights and cache; None without a limit.
        num_sequences: Equally long sequences that share what the budget leaves.
        kv_value_bytes: Bytes per cached number.
    """

    bits: tuple[float, ...] = (2.0, 3.0, 4.0, 6.0, 8.0)
    storage: BlockStorage = field(default_factory=BlockStorage)
    saving: float = PUBLISHED_SAVING
    budget_bytes: int | None = None
    num_sequences: int = 1
    kv_value_bytes: int = VALUE_BYTES

    def __post_init__(self) -> None:
        for name, value in (
            ("budget_bytes", self.budget_bytes),
            ("num_sequences", self.num_sequences),
            ("kv_value_bytes", self.kv_value_bytes),
        ):
            if value is not None and value < 1:
                raise WeightMemoryError(f"{name}: must be >= 1, found {value}")
        if self.budget_bytes is None and self.num_sequences != 1:
            raise WeightMemoryError(
                "num_sequences: share what a budget leaves, and budget_bytes is not given"
            )
        if not 0.0 < self.saving < 1.0:
            raise WeightMemoryError(
                f"saving: must be more than 0 and less than 100 %, found {100 * self.saving:g} %"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUse:
    """What a budget leaves for the cache.

    Attributes:
        free_bytes: Budget less weights, in pages; negative where the weights do not fit.
        sequence_tokens: Tokens that each of the asked sequences can have, in blocks of whole
            pages: 0 where not every one has a block, None without a limit (every layer has a
            window, and all windows fit).
        num_sequences: The asked sequences.
    """

    free_bytes: int
    sequence_tokens: int | None
    num_sequences: int

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of all sequences."""
        return None if self.sequence_tokens is None else self.sequence_tokens * self.num_sequences

    @property
    def fits(self) -> bool:
        """Whether the weights fit."""
        return self.free_bytes >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthReport:
    """A model with its experts at one average width.

    Attributes:
        experts: Bytes of the experts.
        model_bytes: Experts and all else, pages not rounded.
        saving: Share of the bytes at 16 bits.
        saving_in_pages: The same, whole pages counted.
        freed_bytes: Bytes at 16 bits less those in pages.
        freed_kv_tokens: Tokens that freed pages hold in blocks of 16: beyond the sliding windows,
            or inside them where every layer has one.
        budget: What a budget leaves; None without one.
    """

    experts: ExpertMemory
    model_bytes: int
    saving: float
    saving_in_pages: float
    freed_bytes: int
    freed_kv_tokens: int
    budget: BudgetUse | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingTarget:
    """Widths at which the asked share of the whole model is saved.

    Attributes:
        saving: The share.
        bits: Largest average width that saves it: 8 where every width does, None where none does.
        bits_in_pages: The same, whole pages counted.
        saving_by_bits: What the whole widths on both sides of ``bits`` save, ascending; the lowest
            two where no width saves enough.
    """

    saving: float
    bits: float | None
    bits_in_pages: float | None
    saving_by_bits: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReport:
    """The cache of a model.

    Attributes:
        token_bytes: Bytes of one more token.
        block_pages: Pages of a block of 16 tokens of one layer, by kind of layer.
        window_bytes: Bytes of the sliding windows of one sequence when full.
    """

    token_bytes: KvTokenBytes
    block_pages: tuple[int, ...]
    window_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """One model.

    Attributes:
        shape: The model.
        parameters: Its parameters.
        other_bytes: Bytes at 16 bits of all but the experts.
        expert_bytes: Bytes at 16 bits of the experts; 0 in a dense model.
        num_blocks: Weight blocks: expert matrices.
        bit_plane_bytes: Bytes of one plane of all blocks.
        bit_plane_kv_tokens: Tokens that they hold, counted like ``freed_kv_tokens``.
        kv: Its cache.
        full_budget: What a budget leaves at 16 bits; None without one.
        widths: One report a width; empty in a dense model.
        target: Where the asked share is saved; None in a dense model.
        budget_bits: Largest average width whose pages fit the budget, with no room for a cache: 8
            where every width fits, None without a budget, or where none fits.
    """

    shape: LlmShape
    parameters: ParameterCounts
    other_bytes: int
    expert_bytes: int
    num_blocks: int
    bit_plane_bytes: int
    bit_plane_kv_tokens: int
    kv: KvReport
    full_budget: BudgetUse | None
    widths: tuple[WidthReport, ...]
    target: SavingTarget | None
    budget_bits: float | None


def memory_report(shape: LlmShape, question: MemoryQuestion) -> MemoryReport:
    """Work out one model.

    Raises:
        WeightMemoryError: If a width is out of range.
    """
    blocks = shape.expert_matrices
    others, experts = other_bytes(shape), full_expert_bytes(shape)
    plane = sum(group.count * plane_bytes(group.rows, group.columns) for group in blocks)
    budget_bits = None
    if blocks and question.budget_bytes is not None:
        budget_bits = bits_within(
            shape, question.budget_bytes - others, question.storage, in_pages=True
        )
    return MemoryReport(
        shape=shape,
        parameters=count_parameters(shape),
        other_bytes=others,
        expert_bytes=experts,
        num_blocks=sum(group.count for group in blocks),
        bit_plane_bytes=plane,
        bit_plane_kv_tokens=_grown_tokens(shape, plane, question),
        kv=_kv_report(shape, question),
        full_budget=_budget_use(shape, others + experts, question),
        widths=tuple(_width(shape, bits, question) for bits in question.bits) if blocks else (),
        target=_target(shape, question) if blocks else None,
        budget_bits=budget_bits,
    )


def parse_bits(text: str, *, min_bits: int = 2, max_bits: int = 8) -> tuple[float, ...]:
    """Average widths from a list like ``2,3,3.5``.

    Raises:
        WeightMemoryError: If an entry is no number within ``min_bits``..``max_bits``.
    """
    widths = []
    for entry in text.split(","):
        try:
            width = float(entry)
        except ValueError:
            width = math.nan
        if not min_bits <= width <= max_bits:
            raise WeightMemoryError(
                f"bits: must be numbers within {min_bits}..{max_bits}, separated by commas, "
                f"found {entry.strip()!r}"
            )
        widths.append(width)
    return tuple(widths)


def _width(shape: LlmShape, bits: float, question: MemoryQuestion) -> WidthReport:
    experts = expert_memory(shape, bits, question.storage)
    others = other_bytes(shape)
    freed = full_expert_bytes(shape) - experts.paged_bytes
    return WidthReport(
        experts=experts,
        model_bytes=others + experts.total_bytes,
        saving=saved_share(shape, experts.total_bytes),
        saving_in_pages=saved_share(shape, experts.paged_bytes),
        freed_bytes=freed,
        freed_kv_tokens=_grown_tokens(shape, max(freed, 0), question),
        budget=_budget_use(shape, others + experts.paged_bytes, question),
    )


def _target(shape: LlmShape, question: MemoryQuestion) -> SavingTarget:
    storage, saving = question.storage, question.saving
    bits = bits_for_saving(shape, saving, storage)
    lower = storage.min_bits if bits is None else math.floor(bits)
    return SavingTarget(
        saving=saving,
        bits=bits,
        bits_in_pages=bits_for_saving(shape, saving, storage, in_pages=True),
        saving_by_bits={
            width: saved_share(shape, expert_memory(shape, width, storage).total_bytes)
            for width in (lower, lower + 1)
            if width <= MAX_BITS
        },
    )


def _budget_use(shape: LlmShape, weight_bytes: int, question: MemoryQuestion) -> BudgetUse | None:
    if question.budget_bytes is None:
        return None
    free = question.budget_bytes - weight_bytes
    tokens = kv_tokens_per_sequence(
        shape,
        max(free, 0) // question.storage.page_bytes,
        num_sequences=question.num_sequences,
        page_bytes=question.storage.page_bytes,
        value_bytes=question.kv_value_bytes,
    )
    return BudgetUse(free_bytes=free, sequence_tokens=tokens, num_sequences=question.num_sequences)


def _grown_tokens(shape: LlmShape, num_bytes: int, question: MemoryQuestion) -> int:
    """Tokens by which running sequences can grow with so many bytes more, in whole pages."""
    return kv_growth_tokens(
        shape,
        num_bytes // question.storage.page_bytes,
        page_bytes=question.storage.page_bytes,
        value_bytes=question.kv_value_bytes,
    )


def _kv_report(shape: LlmShape, question: MemoryQuestion) -> KvReport:
    groups = kv_layers(shape, value_bytes=question.kv_value_bytes)
    return KvReport(
        token_bytes=kv_token_bytes(shape, value_bytes=question.kv_value_bytes),
        block_pages=tuple(
            kv_block_pages(group, page_bytes=question.storage.page_bytes, block_tokens=BLOCK_TOKENS)
            for group in groups
        ),
        window_bytes=sum(
            group.num_layers * group.token_bytes * group.window_tokens
            for group in groups
            if group.window_tokens is not None
        ),
    )
