"""Names of blocks that went, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict

from policies.prefix.eviction.base import Key


class Ghosts:
    """Remembers the last blocks that went, as many as would fill ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self.used_bytes = 0

    def add(self, key: Key, size_bytes: int) -> None:
        """Remember a block that goes; the oldest ones are forgotten for it."""
        self.discard(key)
        self._sizes[key] = size_bytes
        self.used_bytes += size_bytes
        while self.used_bytes > self._capacity_bytes:
            _key, forgotten_bytes = self._sizes.popitem(last=False)
            self.used_bytes -= forgotten_bytes

    def discard(self, key: Key) -> bool:
        """Forget a block; whether it was remembered."""
        size_bytes = self._sizes.pop(key, None)
        if size_bytes is None:
            return False
        self.used_bytes -= size_bytes
        return True

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)
