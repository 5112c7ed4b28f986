"""Pages of the keys and values of running sequences, out of the arena shared with weights.

A sequence has a table ``[blocks, layout.block_pages]`` of page ids; new blocks get all their pages
at once. A layer with a sliding window gives the pages of blocks that no later query sees back when
the sequence next grows; their entries become ``LEFT_BEHIND``.

A page that a hold names stays in the arena until the hold ends, though its sequence may be gone by
then: a copy to somewhere else reads it meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runtime.model.kv_layout import KvLayout, LayerKv
from runtime.page_arena import PageArena

LEFT_BEHIND: Final = -1
FIRST_BLOCKS: Final = 8  # rows a new table has room for

PageIds = NDArray[np.int32]


class KvCacheError(RuntimeError):
    """Pages are not as they were stated to be."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence: tokens held, blocks it has pages for, and of every window its first block."""

    table: PageIds  # [room, block_pages]
    first_blocks: list[int]
    birth: int
    tokens: int = 0
    blocks: int = 0


@dataclass(slots=True, eq=False)
class PageHold:
    """Pages that stay in the arena until ``end``.

    Attributes:
        pages: [n] int32 page ids.
    """

    pages: PageIds
    _cache: KvCache | None = field(repr=False)

    def end(self) -> None:
        """Let the pages go; those that no sequence and no other hold has are free then.

        Ending again does nothing.
        """
        cache, self._cache = self._cache, None
        if cache is not None:
            cache._end_hold(self.pages)


class KvCache:
    """Pages of all sequences. Only the engine's thread calls it.

    Attributes:
        arena: Where pages come from.
        layout: What lies in them.
    """

    def __init__(self, arena: PageArena, layout: KvLayout) -> None:
        """Start without sequences.

        Raises:
            ValueError: If the pages of arena and layout differ in size.
        """
        if arena.page_bytes != layout.page_bytes:
            raise ValueError(
                f"page_bytes: the arena has {arena.page_bytes}, the layout {layout.page_bytes}"
            )
        self.arena, self.layout = arena, layout
        self._block_bytes = layout.block_pages * layout.page_bytes
        columns: dict[int, list[int]] = {}  # of a window: its pages in a row of a table
        for number, entry in enumerate(layout.layers):
            if isinstance(entry, LayerKv) and entry.window_tokens is not None:
                first = layout.first_page[number]
                columns.setdefault(entry.window_tokens, []).extend(
                    range(first, first + layout.pages_per_block[number])
                )
        self._windows = [(window, np.array(at)) for window, at in sorted(columns.items())]
        self._sequences: dict[int, _Sequence] = {}
        self._holds = np.zeros(arena.num_pages, np.int32)  # of every page
        self._orphan = np.zeros(arena.num_pages, np.bool_)  # held, but by no sequence
        self._held_pages = self._births = 0

    @property
    def held_pages(self) -> int:
        """Pages that sequences have or that holds keep."""
        return self._held_pages

    @property
    def sequences(self) -> tuple[int, ...]:
        """Numbers of the sequences, in order of ``add``."""
        return tuple(self._sequences)

    def add(self, sequence: int) -> None:
        """Begin an empty sequence.

        Raises:
            ValueError: If there is one of that number.
        """
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is in the cache already")
        table = np.full((FIRST_BLOCKS, self.layout.block_pages), LEFT_BEHIND, np.int32)
        self._births += 1
        self._sequences[sequence] = _Sequence(table, [0] * len(self._windows), self._births)

    def birth(self, sequence: int) -> int:
        """Differs whenever a sequence was released and added again.

        While it stays the same, blocks that a table has keep their pages.
        """
        return self._sequences[sequence].birth

    def tokens(self, sequence: int) -> int:
        """Tokens whose keys and values are held."""
        return self._sequences[sequence].tokens

    def room_tokens(self, sequence: int) -> int:
        """Tokens that the blocks of a sequence have room for, those held included."""
        return self._sequences[sequence].blocks * self.layout.block_tokens

    def pages_needed(self, sequence: int, added: int) -> int:
        """Pages that ``added`` more tokens take: ``layout.paging.grown``.

        Blocks that an earlier ``grow`` took and no token has reached yet count as there.
        """
        return self._blocks_needed(self._sequences[sequence], added) * self.layout.block_pages

    def grow(self, sequence: int, added: int) -> bool:
        """Give back what windows have left behind, then take pages for ``added`` more tokens.

        Returns:
            False if too few pages are free; none has been taken then.

        Raises:
            ValueError: If ``added`` is negative.
        """
        if added < 0:
            raise ValueError(f"added must be >= 0, found {added}")
        state = self._sequences[sequence]
        if self._windows:
            self._leave_behind(state)
        more = self._blocks_needed(state, added)
        if not more:
            return True
        pages = self.arena.take_kv(more, self._block_bytes)
        if pages is None:
            return False
        self._held_pages += pages.size
        want = state.blocks + more
        if want > len(state.table):
            room = max(want, 2 * len(state.table))
            table = np.full((room, self.layout.block_pages), LEFT_BEHIND, np.int32)
            table[: state.blocks] = state.table[: state.blocks]
            state.table = table
        state.table[state.blocks : want] = pages
        state.blocks = want
        return True

    def advance(self, sequence: int, added: int) -> None:
        """The next ``added`` tokens are written in every layer and count as held.

        Raises:
            ValueError: If there are no pages for them.
        """
        self.set_tokens(sequence, self._sequences[sequence].tokens + added)

    def set_tokens(self, sequence: int, tokens: int) -> None:
        """So many tokens are in place, in pages that ``grow`` has taken.

        Raises:
            ValueError: If there are no pages for them, or fewer than what windows left behind.
        """
        state = self._sequences[sequence]
        room = state.blocks * self.layout.block_tokens
        if not 0 <= tokens <= room:
            raise ValueError(f"sequence {sequence} has pages for {room} tokens, not for {tokens}")
        for (window, _), first in zip(self._windows, state.first_blocks, strict=True):
            if first and max(tokens + 1 - window, 0) // self.layout.block_tokens < first:
                raise ValueError(
                    f"sequence {sequence} cannot go back to {tokens} tokens: a window has left "
                    f"the blocks before {first} behind"
                )
        state.tokens = tokens

    def release(self, sequence: int) -> None:
        """Give all pages of a sequence back; those of holds when these end."""
        state = self._sequences.pop(sequence)
        pages = state.table[: state.blocks].ravel()
        self._let_go(pages[pages != LEFT_BEHIND])

    def block_pages(self, sequence: int, block: int) -> PageIds:
        """[layout.block_pages] page ids of one block; LEFT_BEHIND where a window has given it back.

        Raises:
            IndexError: If the sequence has no such block.
        """
        state = self._sequences[sequence]
        self._require_blocks(sequence, block, block + 1)
        pages: PageIds = state.table[block].copy()
        return pages

    def hold(self, sequence: int, first_block: int, stop_block: int) -> PageHold:
        """Keep the pages of blocks ``first_block`` to ``stop_block - 1`` in the arena.

        Raises:
            IndexError: If the sequence does not have these blocks.
        """
        self._require_blocks(sequence, first_block, stop_block)
        pages = self._sequences[sequence].table[first_block:stop_block].ravel()
        pages = pages[pages != LEFT_BEHIND]
        self._holds[pages] += 1  # a table names no page twice
        return PageHold(pages, self)

    def table(self, sequence: int) -> PageIds:
        """[blocks, layout.block_pages] page ids: the table itself, valid until the next ``grow``.

        Rows are C-contiguous.
        """
        state = self._sequences[sequence]
        return state.table[: state.blocks]

    def page_table(self, layer: int, sequence: int) -> PageIds:
        """[pages] ids of the pages that a layer reads, in order of tokens."""
        layout = self.layout
        first = layout.first_page[layer]
        stop = first + layout.pages_per_block[layout.source_layer[layer]]
        pages: PageIds = self.table(sequence)[:, first:stop].reshape(-1)
        return pages

    def check(self) -> None:
        """Recount against the arena's ledger.

        Raises:
            KvCacheError: If a page is lost, doubled, or held and free.
            RuntimeError: If the ledger itself does not add up.
        """
        self.arena.check()
        tables = [s.table[: s.blocks].ravel() for s in self._sequences.values()]
        pages = np.concatenate([*tables, np.flatnonzero(self._orphan).astype(np.int32)])
        pages = pages[pages != LEFT_BEHIND]
        if len(np.unique(pages)) != len(pages):
            raise KvCacheError("a page of keys and values has two owners")
        stated = self.arena.ledger.held_pages("kv")
        if not len(pages) == self._held_pages == stated:
            raise KvCacheError(
                f"keys and values have {len(pages)} pages, stated {self._held_pages}, "
                f"the ledger says {stated}"
            )
        owned = np.zeros(self.arena.num_pages, np.bool_)
        owned[pages] = True
        if np.any((self._holds > 0) & ~owned):
            raise KvCacheError("a held page has been given back")
        if np.any(self._orphan & (self._holds == 0)):
            raise KvCacheError("a page without sequence and hold has not been given back")
        if any(self.arena.ledger.holder_of(int(page)) != "kv" for page in pages):
            raise KvCacheError("a page of keys and values is not held by them in the ledger")

    def _blocks_needed(self, state: _Sequence, added: int) -> int:
        want = -(-(state.tokens + added) // self.layout.block_tokens)
        return max(want - state.blocks, 0)

    def _require_blocks(self, sequence: int, first: int, stop: int) -> None:
        blocks = self._sequences[sequence].blocks
        if not 0 <= first <= stop <= blocks:
            raise IndexError(f"sequence {sequence} has {blocks} blocks, not {first} to {stop - 1}")

    def _leave_behind(self, state: _Sequence) -> None:
        for at, (window, columns) in enumerate(self._windows):
            first = max(state.tokens + 1 - window, 0) // self.layout.block_tokens
            have = state.first_blocks[at]
            if first > have:
                self._let_go(state.table[have:first, columns].ravel())
                state.table[have:first, columns] = LEFT_BEHIND
                state.first_blocks[at] = first

    def _let_go(self, pages: PageIds) -> None:
        """Pages that their sequence has no more: free, unless held."""
        held = self._holds[pages] > 0
        self._orphan[pages[held]] = True
        self._give(pages[~held])

    def _end_hold(self, pages: PageIds) -> None:
        self._holds[pages] -= 1
        free = pages[self._orphan[pages] & (self._holds[pages] == 0)]
        self._orphan[free] = False
        self._give(free)

    def _give(self, pages: PageIds) -> None:
        if len(pages):
            self.arena.give_kv(pages)
            self._held_pages -= len(pages)
