"""Causal attention over keys and values in the pages of an arena; compiled paths only.

Queries, new keys and values, sums and results are float32; stored numbers are float32, bfloat16 or
float16, rounded to the nearest when written and widened exactly. A query's result is the same bit
for bit whatever other queries share the call, however a prompt is divided into calls, whatever the
number of threads and wherever the pages lie. It may differ between paths in the last bits. One
exception: where keys or values of later tokens of the same call are not finite, results of earlier
tokens may become NaN too.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.arrays import FloatArray, check_array, check_threads, output_array
from kernels.cpu.backend import backend

StoredType = Literal["float32", "bfloat16", "float16"]
_TYPE_IDS = {name: number for number, name in enumerate(get_args(StoredType))}  # source/attention.h
_MISSING_PAGE, _NO_RESOURCES = 1, 2


class StepArgument(ctypes.Structure):
    """`KvStep` of source/attention.h."""

    _fields_ = (
        ("sequences", ctypes.c_int64),
        ("first", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("block_pages", ctypes.c_int64),
        ("block_shift", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("arena", ctypes.c_void_p),
        ("num_pages", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
    )


class ShapeArgument(ctypes.Structure):
    """`KvShape` of source/attention.h."""

    _fields_ = (
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("first_page", ctypes.c_int64),
        ("page_shift", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """Heads of a layer, and how its keys and values lie in a page.

    A page begins with [tokens_per_page, 2 (keys, values), kv_heads, head_dim] stored numbers.

    Attributes:
        heads: Query heads, a multiple of kv_heads.
        kv_heads: Heads of keys and values, >= 1.
        head_dim: Numbers per head, >= 1.
        tokens_per_page: A power of two.
        first_page: Where the layer's pages begin in a block's row of a table.
        window_tokens: Tokens a query sees, itself included; None: all before it.
        stored: Type of the stored numbers.

    Raises:
        ValueError: If a value is out of range.
    """

    heads: int
    kv_heads: int
    head_dim: int
    tokens_per_page: int
    first_page: int = 0
    window_tokens: int | None = None
    stored: StoredType = "float32"

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim) < 1 or self.heads % self.kv_heads:
            raise ValueError(
                "heads must be a multiple of kv_heads, all of them and head_dim >= 1, found "
                f"{self.heads}, {self.kv_heads}, {self.head_dim}"
            )
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ValueError(f"window_tokens must be >= 1, found {self.window_tokens}")
        _require_power("tokens_per_page", self.tokens_per_page)
        if self.first_page < 0:
            raise ValueError(f"first_page must be >= 0, found {self.first_page}")
        if self.stored not in _TYPE_IDS:
            raise ValueError(f"stored must be one of {list(_TYPE_IDS)}, found {self.stored!r}")

    @property
    def used_page_bytes(self) -> int:
        """Bytes of a page that hold keys and values."""
        number_bytes = 4 if self.stored == "float32" else 2
        return self.tokens_per_page * 2 * self.kv_heads * self.head_dim * number_bytes

    @cached_property
    def argument(self) -> ShapeArgument:
        """What the library takes; valid as long as this object lives."""
        return ShapeArgument(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=self.window_tokens or 0,
            first_page=self.first_page,
            page_shift=self.tokens_per_page.bit_length() - 1,
            type=_TYPE_IDS[self.stored],
        )


class TokenPages:
    """New tokens of several sequences and the pages of all their tokens, for every layer.

    Attributes:
        tokens: T, new tokens of all sequences.
        page_bytes: Bytes of a page.
        block_tokens: Tokens of a block.
        block_pages: Pages of a block over all layers.
    """

    def __init__(
        self,
        arena: NDArray[np.uint8],
        *,
        block_tokens: int,
        tables: Sequence[NDArray[np.int32]],
        first: NDArray[np.int64],
        starts: NDArray[np.int64],
    ) -> None:
        """Describe a step; the arrays are read, not copied, as long as this object is used.

        Args:
            arena: [num_pages, page_bytes] uint8, C-contiguous; attention writes to it.
            block_tokens: A power of two.
            tables: Of every sequence [blocks, block_pages] int32, C-contiguous: a block's pages
                of all layers. Entries of tokens that no query of a layer sees may be negative.
            first: [n + 1] int64: rows of sequence i are ``first[i]`` to ``first[i + 1] - 1``.
            starts: [n] int64: tokens of each sequence before its new ones.

        Raises:
            ValueError: If an array does not fit.
        """
        _require_power("block_tokens", block_tokens)
        count = len(tables)
        check_array("first", first, np.int64, (count + 1,))
        check_array("starts", starts, np.int64, (count,))
        if arena.ndim != 2:
            raise ValueError(f"arena must be [num_pages, page_bytes], found {list(arena.shape)}")
        check_array("arena", arena, np.uint8, arena.shape)
        if first[0] or (np.diff(first) < 0).any() or (starts < 0).any():
            raise ValueError("first must begin at 0 and not descend, starts must be >= 0")
        pages = {table.shape[1] for table in tables} or {0}
        if len(pages) > 1:
            raise ValueError(f"tables must have the same number of pages a block, found {pages}")
        self.block_pages = pages.pop()
        for table in tables:
            check_array("a table", table, np.int32, (len(table), self.block_pages))
        self.tokens, self.block_tokens = int(first[-1]), block_tokens
        self.page_bytes = arena.shape[1]
        addresses = np.array([table.ctypes.data for table in tables], np.uintp)
        blocks = np.array([len(table) for table in tables], np.int64)
        self._kept = (arena, first, starts, addresses, blocks, *tables)
        self.argument = StepArgument(
            sequences=count,
            first=first.ctypes.data,
            starts=starts.ctypes.data,
            tables=addresses.ctypes.data,
            blocks=blocks.ctypes.data,
            block_pages=self.block_pages,
            block_shift=block_tokens.bit_length() - 1,
            arena=arena.ctypes.data,
            num_pages=arena.shape[0],
            page_bytes=self.page_bytes,
        )


def paged_attention(
    queries: FloatArray,
    layer: AttentionLayer,
    pages: TokenPages,
    *,
    scale: float,
    keys: FloatArray | None = None,
    values: FloatArray | None = None,
    threads: int = 1,
    path: str | None = None,
    out: FloatArray | None = None,
) -> FloatArray:
    """Write the new tokens' keys and values, then attend to all tokens up to each query.

    Args:
        queries: [T, heads, head_dim], float32, C-contiguous.
        layer: Shapes of the layer.
        pages: The step.
        scale: Factor of a product of query and key.
        keys: [T, kv_heads, head_dim], float32, C-contiguous; None: they are in their pages.
        values: Likewise; None together with keys.
        threads: Parts of the work are shared among this many, 1..256.
        path: As in `kernels.cpu.backend`; a compiled one.
        out: [T, heads * head_dim], float32, C-contiguous, written and returned; None makes one.

    Returns:
        [T, heads * head_dim], float32.

    Raises:
        ValueError: If an array does not fit, the path is not compiled, or a page of a token that
            a query sees does not lie in the arena (nothing is written then).
        MemoryError: If there is no memory for packed keys, or no thread can be started.
    """
    check_array("queries", queries, np.float32, (pages.tokens, layer.heads, layer.head_dim))
    shape = (pages.tokens, layer.kv_heads, layer.head_dim)
    if keys is not None and values is not None:
        check_array("keys", keys, np.float32, shape)
        check_array("values", values, np.float32, shape)
    elif keys is not None or values is not None:
        raise ValueError("keys and values must be given together")
    _check_fit(layer, pages)
    check_threads(threads)
    chosen = backend(path)
    if chosen.library is None:
        raise ValueError(f"attention needs a compiled path, found {chosen}")
    y = output_array(out, (pages.tokens, layer.heads * layer.head_dim))
    found = (ctypes.c_int64 * 3)()
    failed = chosen.library.handle.paged_attention(
        chosen.library.path_ids[chosen.name],
        ctypes.byref(pages.argument),
        ctypes.byref(layer.argument),
        queries.ctypes.data,
        None if keys is None else keys.ctypes.data,
        None if values is None else values.ctypes.data,
        scale * math.log2(math.e),
        y.ctypes.data,
        threads,
        found,
    )
    if failed:
        _refuse(failed, found, pages)
    return y


def _check_fit(layer: AttentionLayer, pages: TokenPages) -> None:
    if layer.used_page_bytes > pages.page_bytes:
        raise ValueError(
            f"{layer.tokens_per_page} tokens take {layer.used_page_bytes} bytes, "
            f"a page has {pages.page_bytes}"
        )
    own = pages.block_tokens // layer.tokens_per_page
    if not own or (pages.argument.sequences and layer.first_page + own > pages.block_pages):
        raise ValueError(
            f"{layer.tokens_per_page} tokens per page from page {layer.first_page} on: a block "
            f"has {pages.block_tokens} tokens and {pages.block_pages} pages"
        )


def _refuse(failed: int, found: Any, pages: TokenPages) -> None:
    if failed == _NO_RESOURCES:
        raise MemoryError("no memory or no threads left")
    assert failed == _MISSING_PAGE
    raise ValueError(
        f"sequence {found[0]} of the step: the page of token {found[1]} must be in "
        f"[0, {pages.argument.num_pages}), found {found[2]}"
    )


def _require_power(name: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name} must be a power of two, found {value}")
