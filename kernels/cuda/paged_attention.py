"""Launchers of paged_attention.cu: write new keys and values, attend, on a GPU or emulated.

A context of `max_tokens` is cut into chunks of 256 keys, of more where that would be above 64
chunks: the cut depends on a position and on this limit alone, so that a query's result has the same
bits whatever else is in the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from kernels.cuda.load import KernelFunction, Target, load_kernels

__all__ = ["NUMBER_TYPES", "AttentionKernels", "AttentionShape", "PackedTables", "kernel_variants"]

SOURCE: Final = Path(__file__).with_name("paged_attention.cu")
NUMBER_TYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 2}
UNIT_KEYS: Final = 256
MAX_CHUNKS: Final = 64
MAX_HEAD_DIM: Final = 512
PARTIAL_BYTES: Final = 128 << 20
_THREADS: Final = 128
_WRITE_THREADS: Final = 256
_MOST_TILE_TOKENS: Final = 32
_SCORE_STRIDE: Final = UNIT_KEYS + 4
_DEFAULT_SHARED_BYTES: Final = 48 << 10

Array = Any  # of the target: numpy, or what CuPy takes for a pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        heads: Of queries, a multiple of ``kv_heads``.
        kv_heads: Stored per token.
        head_dim: Numbers of a head, a multiple of 8 up to 512.
        stored: Type of keys and values: float32, float16 or bfloat16.
        page_tokens: Tokens of a page, a power of two.
        first_page: Where the layer's pages begin among those of a block.
        window_tokens: A query sees itself and the tokens before it, this many in all; None: all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    stored: str
    page_tokens: int
    first_page: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.stored not in NUMBER_TYPES:
            raise ValueError(f"stored must be {', '.join(NUMBER_TYPES)}, found {self.stored!r}")
        if not 8 <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 8:
            raise ValueError(
                f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, found {self.head_dim}"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads or self.heads < 1:
            raise ValueError(f"heads must be a multiple of kv_heads: {self.heads}, {self.kv_heads}")
        if self.page_tokens < 1 or self.page_tokens & (self.page_tokens - 1):
            raise ValueError(f"page_tokens must be a power of two, found {self.page_tokens}")

    @property
    def padded_dim(self) -> int:
        """``head_dim`` as the kernel is built for it."""
        return -(-self.head_dim // 32) * 32

    def rows(self, is_single: bool) -> int:
        """Query rows of a thread block: 16 where every sequence has one new token."""
        wide = self.stored != "float32" and self.padded_dim <= 256
        return 32 if wide and not is_single else 16

    def tile_tokens(self, is_single: bool) -> int:
        """Tokens of one sequence that share a thread block."""
        return 1 if is_single else max(1, self.rows(is_single) // (self.heads // self.kv_heads))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTables:
    """Where pages are, at fixed addresses.

    Attributes:
        arena: [bytes] uint8, 16-byte aligned.
        page_bytes: A power of two.
        tables: [slots, max_blocks, block_pages] int32, below 0 where no page is.
        max_blocks, block_pages: Its extents.
        block_tokens: A power of two.
    """

    arena: Array
    page_bytes: int
    tables: Array
    max_blocks: int
    block_pages: int
    block_tokens: int


class AttentionKernels:
    """Attention of the layers of one model. Not safe for two streams at a time.

    Args:
        pages: Arena and tables.
        max_heads: Most query heads of a layer.
        max_head_dim: Most numbers of a head.
        partials: Makes the buffers of partial results: [n] float32, given n.
        target: ``gpu`` or ``emulation``.
        schedule: Order of execution under emulation.
        chunk_keys: Keys of a chunk, a multiple of 256; None: by the length of the tables.
        partial_bytes: Of partial results at most; launches are cut to it.
    """

    def __init__(
        self,
        pages: PackedTables,
        *,
        max_heads: int,
        max_head_dim: int,
        partials: Any,
        target: Target,
        schedule: int = 0,
        chunk_keys: int | None = None,
        partial_bytes: int = PARTIAL_BYTES,
    ) -> None:
        self._pages, self._target, self._schedule = pages, target, schedule
        tokens = pages.max_blocks * pages.block_tokens
        least = -(-tokens // (MAX_CHUNKS * UNIT_KEYS)) * UNIT_KEYS
        self.chunk_keys = max(UNIT_KEYS, least) if chunk_keys is None else chunk_keys
        if self.chunk_keys < UNIT_KEYS or self.chunk_keys % UNIT_KEYS:
            raise ValueError(f"chunk_keys must be a multiple of {UNIT_KEYS}, found {chunk_keys}")
        self.max_chunks = -(-tokens // self.chunk_keys)
        row_numbers = max_heads * self.max_chunks * (max_head_dim + 2)
        self.partial_tokens = max(_MOST_TILE_TOKENS, partial_bytes // (4 * row_numbers))
        self._partial = partials(self.partial_tokens * max_heads * self.max_chunks * max_head_dim)
        self._sums = partials(2 * self.partial_tokens * max_heads * self.max_chunks)

    def write(
        self,
        shape: AttentionShape,
        keys: Array,
        values: Array,
        positions: Array,
        slots: Array,
        *,
        num_tokens: int,
        new_type: str,
        strides: tuple[int, int],
    ) -> None:
        """New keys and values into their pages.

        Args:
            shape: Of the layer.
            keys, values: [T, kv_heads, head_dim], each head's numbers without gaps.
            positions, slots: [T] int32: of every token, and which table its pages are in.
            num_tokens: T.
            new_type: Of ``keys`` and ``values``.
            strides: Numbers from a token to the next, of keys and values.
        """
        kernel = _write_kernel(NUMBER_TYPES[shape.stored], self._target, self._schedule)
        arguments = (self._pages.arena, self._pages.tables, positions, slots, keys, values)
        numbers = (np.int32(NUMBER_TYPES[new_type]), *map(np.int64, strides))
        kernel((num_tokens,), (_WRITE_THREADS,), (*arguments, *numbers, *self._page_numbers(shape)))

    def attend(
        self,
        shape: AttentionShape,
        queries: Array,
        out: Array,
        positions: Array,
        slots: Array,
        tiles: Sequence[tuple[Array, int, int, int]],
        *,
        query_type: str,
        query_stride: int,
        scale: float,
        is_single: bool,
        chunks: int | None = None,
    ) -> None:
        """Attention of new tokens whose keys and values have been written.

        Args:
            shape: Of the layer.
            queries: [T, heads, head_dim], each token's numbers without gaps.
            out: [T, heads, head_dim], of the same type, written.
            positions, slots: [T] int32.
            tiles: Launches: [n, 2] int32 of first token and tokens (of one sequence, at most
                ``shape.tile_tokens``), n, and of all of them the first token and the number of
                tokens, at most ``partial_tokens``.
            query_type: Of ``queries`` and ``out``.
            query_stride: Numbers from a token to the next.
            scale: Factor of every product.
            is_single: Whether all tiles have one token.
            chunks: That any of the tokens sees; None: as many as the tables allow.
        """
        chunks = self.max_chunks if chunks is None else chunks
        rows, number = shape.rows(is_single), NUMBER_TYPES[shape.stored]
        kernel = _attend_kernel(number, shape.padded_dim, rows, self._target, self._schedule)
        combine = _combine_kernel(number, self._target, self._schedule)
        head_blocks = -(-(shape.heads // shape.kv_heads) // rows)
        window = shape.window_tokens or 0
        for listed, count, first_token, num_tokens in tiles:
            arrays = (self._pages.arena, self._pages.tables, positions, slots, listed, queries, out)
            numbers = (
                np.int32(NUMBER_TYPES[query_type]),
                np.int64(query_stride),
                *map(np.int32, (shape.heads, head_blocks, window, self.chunk_keys, first_token)),
                np.float32(scale),
            )
            kernel(
                (count, shape.kv_heads * head_blocks, chunks),
                (_THREADS,),
                (*arrays, self._partial, self._sums, *numbers, *self._page_numbers(shape)),
                shared_mem=shared_bytes(number, shape.padded_dim, rows),
            )
            if chunks > 1:
                sizes = (NUMBER_TYPES[query_type], chunks, window, self.chunk_keys)
                combine(
                    (num_tokens, shape.heads),
                    (_THREADS,),
                    (self._partial, self._sums, positions, out,
                     *map(np.int32, (*sizes, first_token, shape.head_dim))),
                )  # fmt: skip

    def prepare(self, shape: AttentionShape) -> None:
        """Load the kernels of a layer, so that nothing is compiled while a graph is captured."""
        number = NUMBER_TYPES[shape.stored]
        _write_kernel(number, self._target, self._schedule)
        for is_single in (True, False):
            rows = shape.rows(is_single)
            _attend_kernel(number, shape.padded_dim, rows, self._target, self._schedule)

    def _page_numbers(self, shape: AttentionShape) -> tuple[Any, ...]:
        pages = self._pages
        sizes = (
            pages.max_blocks,
            pages.block_pages,
            shape.first_page,
            pages.block_tokens.bit_length() - 1,
            shape.page_tokens.bit_length() - 1,
            shape.kv_heads,
            shape.head_dim,
            4 if shape.stored == "float32" else 2,
        )
        return (np.int64(pages.page_bytes), *map(np.int32, sizes))


def shared_bytes(number: int, padded_dim: int, rows: int) -> int:
    """Dynamic shared memory of paged_attention in bytes."""
    number_bytes = 4 if number == NUMBER_TYPES["float32"] else 2
    return 8 * UNIT_KEYS + 4 * rows * (_SCORE_STRIDE + 3) + number_bytes * rows * padded_dim


def kernel_variants(
    dims: Sequence[int] = (32, 64, 96, 128, 256, 512),
) -> list[tuple[str, tuple[str, ...]]]:
    """Instances by name, for each stored type, head and number of rows: (name, expressions)."""
    variants = []
    for stored, number in NUMBER_TYPES.items():
        for dim in dims:
            both = {16} if stored == "float32" or dim > 256 else {16, 32}
            expressions = tuple(_attend_expression(number, dim, rows) for rows in sorted(both))
            variants.append((f"{stored}-{dim}", (*expressions, _write_expression(number))))
    return variants


def _attend_expression(number: int, padded_dim: int, rows: int) -> str:
    return f"paged_attention<{number}, {padded_dim}, {rows}>"


def _write_expression(number: int) -> str:
    return f"write_keys_values<{number}>"


@cache
def _attend_kernel(
    number: int, padded_dim: int, rows: int, target: Target, schedule: int
) -> KernelFunction:
    expression = _attend_expression(number, padded_dim, rows)
    module = load_kernels(SOURCE, target=target, name_expressions=[expression], schedule=schedule)
    kernel = module.get_function(expression)
    need = shared_bytes(number, padded_dim, rows)
    if need > _DEFAULT_SHARED_BYTES:
        kernel.max_dynamic_shared_size_bytes = need
    return kernel


@cache
def _small_kernels(number: int, target: Target, schedule: int) -> Any:
    return load_kernels(
        SOURCE, target=target, name_expressions=[_write_expression(number)], schedule=schedule
    )


def _write_kernel(number: int, target: Target, schedule: int) -> KernelFunction:
    kernel: KernelFunction = _small_kernels(number, target, schedule).get_function(
        _write_expression(number)
    )
    return kernel


def _combine_kernel(number: int, target: Target, schedule: int) -> KernelFunction:
    kernel: KernelFunction = _small_kernels(number, target, schedule).get_function("combine_chunks")
    return kernel
