"""A queue whose pinned members are not stepped over again and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from policies.prefix.eviction.base import Key


class PinnedQueue:
    """Keys with sizes, oldest first; O(1) per call, amortised over a request.

    Pinned members that ``oldest`` meets are put aside until ``restore``. A member that is aside
    still belongs to the queue and counts in ``used_bytes``.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Key, int] = OrderedDict()
        self._aside: dict[Key, int] = {}
        self.used_bytes = 0

    def append(self, key: Key, size_bytes: int) -> None:
        """Enter a new member as the newest."""
        self._order[key] = size_bytes
        self.used_bytes += size_bytes

    def renew(self, key: Key) -> None:
        """Make a member the newest.

        Raises:
            KeyError: If it is none.
        """
        if key in self._aside:
            self._order[key] = self._aside.pop(key)
        else:
            self._order.move_to_end(key)

    def remove(self, key: Key) -> int:
        """Take a member out and return its bytes.

        Raises:
            KeyError: If it is none.
        """
        size_bytes = self._aside.pop(key) if key in self._aside else self._order.pop(key)
        self.used_bytes -= size_bytes
        return size_bytes

    def oldest(self, pinned: Container[Key]) -> Key | None:
        """The oldest member that is not pinned; it stays."""
        order = self._order
        while order:
            key = next(iter(order))
            if key not in pinned:
                return key
            self._aside[key] = order.pop(key)
        for key in self._aside:  # pins may have ended since
            if key not in pinned:
                return key
        return None

    def restore(self) -> None:
        """Put back what is aside, in its order, in front."""
        if self._aside:
            for key, size_bytes in reversed(self._aside.items()):
                self._order[key] = size_bytes
                self._order.move_to_end(key, last=False)
            self._aside = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._order or key in self._aside

    def __len__(self) -> int:
        return len(self._order) + len(self._aside)
