"""Pages of the KV cache: blocks of 16 tokens of every layer, from the arena shared with weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.kv_bytes import BLOCK_TOKENS, KvLayers, kv_block_pages
from policies.weight_page_ledger import PageLedger

Ints = NDArray[np.int64]
PageIds = NDArray[np.int32]


class KvPages:
    """Pages of every running sequence.

    Layers without a window keep all blocks. A layer with one keeps the blocks that the next query
    still sees; older ones are given back when the sequence next grows.
    """

    def __init__(
        self,
        ledger: PageLedger,
        layers: Sequence[KvLayers],
        *,
        page_bytes: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._ledger, self._block_tokens = ledger, block_tokens
        self._whole_pages = 0  # of one block in all layers without a window
        self._windows: list[tuple[int, int]] = []  # tokens; pages of one block in those layers
        for group in layers:
            pages = group.num_layers * kv_block_pages(
                group, page_bytes=page_bytes, block_tokens=block_tokens
            )
            if group.window_tokens is None:
                self._whole_pages += pages
            else:
                self._windows.append((group.window_tokens, pages))
        self._whole: dict[int, list[PageIds]] = {}
        self._sliding: dict[int, list[deque[PageIds]]] = {}
        self._first_block: dict[int, list[int]] = {}  # of every window

    def pages_needed(self, held: Ints, added: Ints) -> Ints:
        """[n] pages that sequences take to grow from ``held`` tokens by ``added``, each >= 0."""
        size = self._block_tokens
        have, want = -(-held // size), -(-(held + added) // size)
        pages: Ints = (want - have) * self._whole_pages
        for window, block_pages in self._windows:
            first = np.maximum(held + 1 - window, 0) // size
            pages = pages + np.maximum(want - np.maximum(have, first), 0) * block_pages
        return pages

    def leave_behind(self, sequence: int, held: int) -> None:
        """Give back the window blocks that no query after ``held`` tokens sees."""
        if not self._windows or sequence not in self._sliding:
            return
        leaving: list[PageIds] = []
        for at, (window, _) in enumerate(self._windows):
            first = max(held + 1 - window, 0) // self._block_tokens
            blocks = self._sliding[sequence][at]
            while self._first_block[sequence][at] < first and blocks:
                leaving.append(blocks.popleft())
                self._first_block[sequence][at] += 1
        if leaving:
            self._ledger.give(np.concatenate(leaving), "kv")

    def reserve(self, sequence: int, held: int, added: int) -> bool:
        """Take the pages for ``added`` tokens more; False (nothing changes) if they are not there.

        ``leave_behind`` comes first.
        """
        needed = int(self.pages_needed(np.array([held]), np.array([added]))[0])
        pages = self._ledger.take(needed, "kv")
        if pages is None:
            return False
        self._enter(sequence, held, added, pages)
        return True

    def reserve_all(self, sequences: Ints, held: Ints, added: Ints) -> bool:
        """``reserve`` for many, in order, all or none."""
        needed = self.pages_needed(held, added)
        if self._windows:
            for place in range(len(sequences)):
                self.leave_behind(int(sequences[place]), int(held[place]))
        pages = self._ledger.take(int(needed.sum()), "kv")
        if pages is None:
            return False
        grows = np.flatnonzero(needed)
        ends = np.cumsum(needed[grows])
        first = 0
        for place, end in zip(grows.tolist(), ends.tolist(), strict=True):
            self._enter(
                int(sequences[place]), int(held[place]), int(added[place]), pages[first:end]
            )
            first = end
        return True

    def release(self, sequence: int) -> None:
        """Give back every page of a sequence."""
        pages = self._whole.pop(sequence, [])
        for blocks in self._sliding.pop(sequence, []):
            pages.extend(blocks)
        self._first_block.pop(sequence, None)
        if pages:
            self._ledger.give(np.concatenate(pages), "kv")

    def _enter(self, sequence: int, held: int, added: int, pages: PageIds) -> None:
        size = self._block_tokens
        have, want = -(-held // size), -(-(held + added) // size)
        split = (want - have) * self._whole_pages
        if split:
            self._whole.setdefault(sequence, []).append(pages[:split])
        if not self._windows:
            return
        if sequence not in self._sliding:
            self._sliding[sequence] = [deque() for _ in self._windows]
            self._first_block[sequence] = [0] * len(self._windows)
        for at, (window, block_pages) in enumerate(self._windows):
            first = max(max(held + 1 - window, 0) // size, have)
            blocks = self._sliding[sequence][at]
            if not blocks:
                self._first_block[sequence][at] = first
            for _ in range(want - first):
                blocks.append(pages[split : split + block_pages])
                split += block_pages
