"""How many pages a sequence's keys and values take, block by block.

Keys and values grow in blocks of tokens over all layers. Layers without a sliding window keep all
blocks; layers with one keep those that the next query still sees, and give the others back when the
sequence next grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.kv_bytes import BLOCK_TOKENS, KvLayers, kv_block_pages
from models.plane_bytes import DEFAULT_PAGE_BYTES

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPaging:
    """Pages of a block of tokens.

    Attributes:
        block_tokens: Tokens of a block, >= 1.
        whole_pages: Pages of one block in all layers without a window, >= 0.
        windows: (window in tokens, pages of one block in all layers of that window), ascending.
    """

    block_tokens: int
    whole_pages: int
    windows: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.whole_pages < 0:
            raise ValueError(
                "block_tokens must be >= 1 and whole_pages >= 0, "
                f"found {self.block_tokens} and {self.whole_pages}"
            )
        if not self.whole_pages and not self.windows:
            raise ValueError("whole_pages: 0 without windows leaves nothing to hold")

    def grown(self, held: Ints, added: Ints) -> Ints:
        """[n] pages that sequences take to grow from ``held`` tokens by ``added``, each >= 0."""
        size = self.block_tokens
        have, want = -(-held // size), -(-(held + added) // size)
        pages: Ints = (want - have) * self.whole_pages
        for window, block_pages in self.windows:
            first = np.maximum(held + 1 - window, 0) // size
            pages = pages + np.maximum(want - np.maximum(have, first), 0) * block_pages
        return pages

    def held(self, tokens: Ints, grown_from: Ints) -> Ints:
        """[n] pages held after growing from ``grown_from`` tokens to ``tokens``.

        What a window no longer sees was given back before growing.
        """
        size = self.block_tokens
        blocks = -(-tokens // size)
        pages: Ints = blocks * self.whole_pages
        for window, block_pages in self.windows:
            first = np.maximum(grown_from + 1 - window, 0) // size
            pages = pages + np.maximum(blocks - first, 0) * block_pages
        return pages


def kv_paging(
    layers: Sequence[KvLayers],
    *,
    page_bytes: int = DEFAULT_PAGE_BYTES,
    block_tokens: int = BLOCK_TOKENS,
) -> KvPaging:
    """Paging of a model's caching layers (``models.kv_bytes.kv_layers``), blocks in whole pages."""
    whole = 0
    windows: dict[int, int] = {}
    for group in layers:
        pages = group.num_layers * kv_block_pages(
            group, page_bytes=page_bytes, block_tokens=block_tokens
        )
        if group.window_tokens is None:
            whole += pages
        else:
            windows[group.window_tokens] = windows.get(group.window_tokens, 0) + pages
    return KvPaging(
        block_tokens=block_tokens, whole_pages=whole, windows=tuple(sorted(windows.items()))
    )
