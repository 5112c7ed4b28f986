"""Which pages of the arena are free, and whether weights or the KV cache hold the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_history import Event

Holder = Literal["weights", "kv"]

FREE: Final = 0
_CODE_BY_HOLDER: dict[Holder, int] = {"weights": 1, "kv": 2}


class PageLedger:
    """Free stack of pages and a holder per page; taking and giving cost O(1) per page.

    A reservation is all or nothing. weights + kv + free pages are the arena at any time.

    Attributes:
        num_pages: Size of the arena in pages.
        refused: Reservations that found too few free pages, by holder.
    """

    def __init__(self, num_pages: int, *, history: Callable[[Event], None] | None = None) -> None:
        """Start with every page free.

        Args:
            num_pages: >= 1.
            history: Told the size, and every page that the KV cache takes or gives back.

        Raises:
            ValueError: If there is no page.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages must be >= 1, not {num_pages}")
        self.num_pages = num_pages
        self.refused: dict[Holder, int] = {"weights": 0, "kv": 0}
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free = num_pages
        self._holder = np.zeros(num_pages, np.uint8)
        self._mark = np.zeros(num_pages, np.int32)  # scratch of `give`
        self._held = {"weights": 0, "kv": 0}
        self._history = history
        if history is not None:
            history({"ev": "arena", "pages": num_pages})

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return self._free

    def held_pages(self, holder: Holder) -> int:
        """Pages of one holder."""
        return self._held[holder]

    def holder_of(self, page: int) -> Literal["free", "weights", "kv"]:
        """Who holds a page."""
        names: tuple[Literal["free", "weights", "kv"], ...] = ("free", "weights", "kv")
        return names[int(self._holder[page])]

    def take(self, num_pages: int, holder: Holder) -> NDArray[np.int32] | None:
        """Reserve pages for a holder, all of them or none.

        Returns:
            [num_pages] int32 page ids, or None (nothing has changed) if fewer are free.

        Raises:
            ValueError: If num_pages is negative.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages must be >= 0, not {num_pages}")
        if num_pages > self._free:
            self.refused[holder] += 1
            return None
        pages = self._stack[self._free - num_pages : self._free][::-1].copy()
        self._free -= num_pages
        self._held[holder] += num_pages
        self._holder[pages] = _CODE_BY_HOLDER[holder]
        if self._history is not None and holder == "kv" and num_pages:
            self._history({"ev": "kv_alloc", "pages": pages.tolist()})
        return pages

    def give(self, pages: NDArray[np.int32], holder: Holder) -> None:
        """Return pages; the page returned last is taken first.

        Raises:
            RuntimeError: If a page is not held by ``holder`` or is named twice (nothing changes).
        """
        code = _CODE_BY_HOLDER[holder]
        if np.any((pages < 0) | (pages >= self.num_pages)):
            raise RuntimeError(f"pages outside the arena of {self.num_pages} pages given back")
        wrong = pages[self._holder[pages] != code]
        if len(wrong):
            raise RuntimeError(
                f"page {wrong[0]} is given back by {holder}, held by {self.holder_of(wrong[0])}"
            )
        order = np.arange(len(pages), dtype=np.int32)
        self._mark[pages] = order
        if np.any(self._mark[pages] != order):
            raise RuntimeError(f"a page is given back twice in one call by {holder}")
        self._holder[pages] = FREE
        self._stack[self._free : self._free + len(pages)] = pages
        self._free += len(pages)
        self._held[holder] -= len(pages)
        if self._history is not None and holder == "kv" and len(pages):
            self._history({"ev": "kv_free", "pages": pages.tolist()})

    def state_pages(self) -> None:
        """Write a recount of the arena into the history."""
        if self._history is not None:
            self._history({"ev": "pages", **self._held, "free": self._free})

    def check(self) -> None:
        """Recount every page.

        Raises:
            RuntimeError: If a page is lost, doubled or held by two.
        """
        counts = np.bincount(self._holder, minlength=3)
        stated = [self._free, self._held["weights"], self._held["kv"]]
        if counts.tolist() != stated:
            raise RuntimeError(f"free, weights, kv pages are {counts.tolist()}, stated {stated}")
        free = np.sort(self._stack[: self._free])
        if not np.array_equal(free, np.flatnonzero(self._holder == FREE)):
            raise RuntimeError("the free stack and the holders of pages disagree")
