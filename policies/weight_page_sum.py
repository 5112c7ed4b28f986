"""Who holds which page of an arena, replayed from a history (the last part of rule R7)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class PageOwners:
    """Owner of every page of one arena; each call returns what is wrong, or None.

    An owner is any hashable value, for instance ``("plane", 3, "A")`` or ``"kv"``.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._owner_by_page: dict[int, Hashable] = {}
        self._pages_by_owner: dict[Hashable, set[int]] = {}

    def take(self, pages: Sequence[int], owner: Hashable) -> str | None:
        """Enter ``owner`` for pages that must exist, be free and differ."""
        for page in pages:
            if not 0 <= page < self.num_pages:
                return f"page {page} lies outside the arena of {self.num_pages} pages"
            if page in self._owner_by_page:
                return f"page {page} has two owners: {self._owner_by_page[page]} and {owner}"
            self._owner_by_page[page] = owner
            self._pages_by_owner.setdefault(owner, set()).add(page)
        return None

    def give(self, pages: Sequence[int], owner: Hashable) -> str | None:
        """Free pages that must all belong to ``owner``."""
        for page in pages:
            if self._owner_by_page.get(page) != owner:
                return f"page {page} is given back by {owner}, which does not hold it"
            del self._owner_by_page[page]
            self._pages_by_owner[owner].remove(page)
        return None

    def give_all(self, owner: Hashable, stated: Sequence[int] | None) -> str | None:
        """Free every page of one owner; ``stated``, if given, must be just these."""
        held = self._pages_by_owner.pop(owner, set())
        if stated is not None and (held != set(stated) or len(held) != len(stated)):
            return f"{owner} holds pages {sorted(held)} and gives back {sorted(stated)}"
        for page in held:
            del self._owner_by_page[page]
        return None

    def recount(self, weights: int, kv: int, free: int) -> str | None:
        """Compare stated numbers of pages with the replayed ones."""
        if weights + kv + free != self.num_pages:
            return (
                f"weights {weights} + kv {kv} + free {free} pages are not the arena's "
                f"{self.num_pages}"
            )
        held_kv = len(self._pages_by_owner.get("kv", ()))
        held_weights = len(self._owner_by_page) - held_kv
        if (weights, kv) != (held_weights, held_kv):
            return (
                f"stated weights {weights} and kv {kv} pages, by the history {held_weights} "
                f"and {held_kv}"
            )
        return None
