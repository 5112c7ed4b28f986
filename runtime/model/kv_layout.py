"""Where the keys and values of a token lie: layers, pages of a layer, blocks over all layers.

A page belongs to one layer and holds ``tokens_per_page`` neighbouring tokens of one sequence as
``[tokens_per_page, 2 (keys, values), kv_heads, head_dim]`` from its first byte on; what is left of
the page is unused. A block is ``block_tokens`` neighbouring tokens in all layers that keep keys and
values: ``block_pages`` pages, layer by layer, within a layer by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from models.kv_bytes import BLOCK_TOKENS, KvLayers
from models.kv_paging import KvPaging, kv_paging

STORED_TYPES: Final = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
LEAST_PAGE_BYTES: Final = 1 << 10
MOST_PAGE_BYTES: Final = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKv:
    """Keys and values of one layer.

    Attributes:
        kv_heads: Heads stored per token, >= 1.
        head_dim: Numbers per head, >= 1.
        window_tokens: A query sees itself and the tokens before it, this many in all; None: all.

    Raises:
        ValueError: If a number is below 1.
    """

    kv_heads: int
    head_dim: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        window = 1 if self.window_tokens is None else self.window_tokens
        if min(self.kv_heads, self.head_dim, window) < 1:
            raise ValueError(f"kv_heads, head_dim and window_tokens must be >= 1, found {self}")

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.kv_heads * self.head_dim * dtype.itemsize


class KvLayout:
    """Pages of the keys and values of a model.

    Attributes:
        layers: What every layer keeps, or the number of the earlier layer whose keys and values it
            uses.
        dtype: Stored type.
        page_bytes: Bytes of a page.
        block_tokens: Tokens of a block.
        source_layer: Per layer, the layer whose pages it reads: itself, or the one named.
        tokens_per_page: Per layer, of the pages it reads.
        pages_per_block: Per layer, pages of its own; 0 where it uses another layer's.
        first_page: Per layer, where the pages it reads begin among the pages of a block.
        block_pages: Pages of one block over all layers.
        paging: The same in the arithmetic of the policies.
        signature: Text that is equal where a block's bytes mean the same. The size of a page is
            not part of it: the used parts of a block's pages, joined, are the same bytes whatever
            it is.
    """

    def __init__(
        self,
        layers: Sequence[LayerKv | int],
        dtype: torch.dtype,
        page_bytes: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        """Divide blocks into pages.

        Args:
            layers: See Attributes.
            dtype: float32, bfloat16 or float16.
            page_bytes: A power of two.
            block_tokens: A power of two.

        Raises:
            ValueError: If a value is out of range, a token does not fit a page, or a layer uses one
                that has no keys and values of its own.
        """
        if dtype not in STORED_TYPES:
            allowed = ", ".join(STORED_TYPES.values())
            raise ValueError(f"keys and values are stored as {allowed}, not {dtype}")
        for name, value in (("page_bytes", page_bytes), ("block_tokens", block_tokens)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, found {value}")
        self.layers = tuple(layers)
        self.dtype, self.page_bytes, self.block_tokens = dtype, page_bytes, block_tokens
        self.source_layer = tuple(self._source(number) for number in range(len(self.layers)))
        tokens: list[int] = []
        pages: list[int] = []
        first: list[int] = []
        for number, source in enumerate(self.source_layer):
            own = source == number
            first.append(sum(pages) if own else first[source])
            tokens.append(self._tokens_per_page(number) if own else tokens[source])
            pages.append(block_tokens // tokens[number] if own else 0)
        self.tokens_per_page, self.pages_per_block = tuple(tokens), tuple(pages)
        self.first_page = tuple(first)
        self.block_pages = sum(pages)
        if not self.block_pages:
            raise ValueError("layers: none keeps keys and values")
        self.paging: KvPaging = kv_paging(
            self.kv_layers(), page_bytes=page_bytes, block_tokens=block_tokens
        )
        self.signature = self._signature()

    def kv(self, layer: int) -> LayerKv:
        """Shape of the keys and values that a layer reads, its own or another's."""
        entry = self.layers[self.source_layer[layer]]
        assert isinstance(entry, LayerKv)
        return entry

    def used_page_bytes(self, layer: int) -> int:
        """Bytes of a page that hold keys and values, from its first byte on."""
        return self.tokens_per_page[layer] * self.kv(layer).token_bytes(self.dtype)

    def kv_layers(self) -> tuple[KvLayers, ...]:
        """Layers of equal pages and window, in order of first appearance.

        A token's bytes are a whole part of a page, unused bytes included, so that a block's pages
        counted from them are the pages it takes.
        """
        counts: Counter[tuple[int, int | None]] = Counter()
        for number, entry in enumerate(self.layers):
            if isinstance(entry, LayerKv):
                share = self.page_bytes // self.tokens_per_page[number]
                counts[share, entry.window_tokens] += 1
        return tuple(
            KvLayers(num_layers=count, token_bytes=token_bytes, window_tokens=window)
            for (token_bytes, window), count in counts.items()
        )

    def _source(self, number: int) -> int:
        entry = self.layers[number]
        if isinstance(entry, LayerKv):
            return number
        if not 0 <= entry < number or not isinstance(self.layers[entry], LayerKv):
            raise ValueError(
                f"layer {number} uses keys and values of layer {entry}, "
                "which is no earlier layer with its own"
            )
        return entry

    def _tokens_per_page(self, number: int) -> int:
        token_bytes = self.kv(number).token_bytes(self.dtype)
        fitting = self.page_bytes // token_bytes
        if not fitting:
            raise ValueError(
                f"page_bytes: a token of layer {number} has {token_bytes} bytes of keys and "
                f"values, a page {self.page_bytes}"
            )
        return min(1 << (fitting.bit_length() - 1), self.block_tokens)

    def _signature(self) -> str:
        parts = [f"k:v;{STORED_TYPES[self.dtype]};{self.block_tokens}"]
        for entry in self.layers:
            if isinstance(entry, LayerKv):
                window = "" if entry.window_tokens is None else f"w{entry.window_tokens}"
                parts.append(f"{entry.kv_heads}x{entry.head_dim}{window}")
            else:
                parts.append(f"={entry}")
        return ";".join(parts)


def default_page_bytes(layers: Iterable[LayerKv | int], dtype: torch.dtype) -> int:
    """The power of two that holds a block of the widest layer, from 1 KiB to 32 KiB."""
    widest = max((e.token_bytes(dtype) for e in layers if isinstance(e, LayerKv)), default=1)
    block_bytes = BLOCK_TOKENS * widest
    return min(max(1 << (block_bytes - 1).bit_length(), LEAST_PAGE_BYTES), MOST_PAGE_BYTES)
