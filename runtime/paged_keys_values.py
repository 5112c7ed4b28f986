"""Keys and values of running sequences, in pages of the arena that weights live in too.

A page holds the keys and values of ``tokens_per_page`` consecutive tokens of one sequence in one
layer. Pages need not be neighbours, so a page that a weight plane gave up serves as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class PageSource(Protocol):
    """Where pages come from: all of a reservation or none."""

    def take(self, count: int) -> NDArray[np.int64] | None:
        """Ids of ``count`` pages, or None when there are not as many."""
        ...

    def give_back(self, pages: NDArray[np.int64]) -> None:
        """Return pages taken before."""
        ...


@dataclass(slots=True)
class SequencePages:
    """Pages of one sequence: [layers, pages] ids, and how many tokens they hold."""

    pages: NDArray[np.int64]
    tokens: int = 0


@dataclass(slots=True)
class PagedKeysValues:
    """Key and value pages of all sequences.

    Args:
        buffer: [bytes] uint8, the arena.
        page_bytes: Size of a page.
        layers: Layers of the model, each with pages of its own.
        key_value_heads: Heads stored per token.
        head_dim: Numbers per head.
        dtype: Stored type of a number.

    Raises:
        ValueError: If a page is too small for the keys and values of one token.
    """

    buffer: NDArray[np.uint8]
    page_bytes: int
    layers: int
    key_value_heads: int
    head_dim: int
    source: PageSource
    dtype: torch.dtype = torch.float32
    sequences: dict[int, SequencePages] = field(default_factory=dict)
    tokens_per_page: int = field(init=False)
    _slots: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        token_numbers = 2 * self.key_value_heads * self.head_dim
        page_numbers = self.page_bytes // self.dtype.itemsize
        self.tokens_per_page = page_numbers // token_numbers
        if self.tokens_per_page == 0:
            raise ValueError(
                f"page_bytes: a token needs {token_numbers * self.dtype.itemsize} bytes of keys "
                f"and values per layer, a page has {self.page_bytes}"
            )
        numbers = torch.from_numpy(self.buffer).view(self.dtype).view(-1, page_numbers)
        used = self.tokens_per_page * token_numbers
        self._slots = numbers[:, :used].view(
            -1, self.tokens_per_page, 2, self.key_value_heads, self.head_dim
        )

    def pages_needed(self, sequence: int, new_tokens: int) -> int:
        """Pages that ``new_tokens`` more tokens of a sequence take, over all layers."""
        held = self.sequences.get(sequence)
        tokens, pages = (held.tokens, held.pages.shape[1]) if held else (0, 0)
        return self.layers * max(0, -(-(tokens + new_tokens) // self.tokens_per_page) - pages)

    def reserve(self, sequence: int, new_tokens: int) -> bool:
        """Get the pages for more tokens, all of them or none; False says there are too few."""
        needed = self.pages_needed(sequence, new_tokens)
        held = self.sequences.get(sequence)
        if held is None:
            held = SequencePages(np.empty((self.layers, 0), dtype=np.int64))
        if needed:
            pages = self.source.take(needed)
            if pages is None:
                return False
            held.pages = np.hstack([held.pages, pages.reshape(self.layers, -1)])
        self.sequences[sequence] = held
        return True

    def write(self, layer: int, sequence: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store [n, heads, head_dim] keys and values behind the tokens held so far."""
        held = self.sequences[sequence]
        positions = np.arange(held.tokens, held.tokens + len(keys))
        pages = torch.from_numpy(held.pages[layer, positions // self.tokens_per_page])
        offsets = torch.from_numpy(positions % self.tokens_per_page)
        self._slots[pages, offsets, 0] = keys.to(self.dtype)
        self._slots[pages, offsets, 1] = values.to(self.dtype)

    def read(
        self, layer: int, sequence: int, tokens: int, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, heads, head_dim] of tokens ``first`` to ``tokens``, as float32."""
        start = first // self.tokens_per_page
        stop = -(-tokens // self.tokens_per_page)
        pages = torch.from_numpy(self.sequences[sequence].pages[layer, start:stop])
        stored = self._slots[pages].flatten(0, 1)
        shift = start * self.tokens_per_page
        both = stored[first - shift : tokens - shift].float()
        return both[:, 0], both[:, 1]

    def advance(self, sequence: int, new_tokens: int) -> None:
        """The tokens written in every layer now count as held."""
        self.sequences[sequence].tokens += new_tokens

    def release(self, sequence: int) -> int:
        """Give all pages of a sequence back; how many they were."""
        held = self.sequences.pop(sequence)
        pages = held.pages.reshape(-1)
        self.source.give_back(pages)
        return len(pages)
