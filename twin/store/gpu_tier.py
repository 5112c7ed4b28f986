"""The blocks of keys and values that a GPU's own memory holds: least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from policies.prefix.eviction.base import Key


class GpuTier:
    """Prefix cache of one GPU, as engines keep it: full blocks, LRU, the end of a prompt first."""

    def __init__(self, capacity_blocks: int) -> None:
        """An empty cache of ``capacity_blocks`` blocks; 0: nothing is ever kept."""
        if capacity_blocks < 0:
            raise ValueError(f"capacity_blocks must be >= 0, found {capacity_blocks}")
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, keys: Sequence[Key]) -> int:
        """How many of the first blocks are there."""
        blocks = self._blocks
        for count, key in enumerate(keys):
            if key not in blocks:
                return count
        return len(keys)

    def keep(self, keys: Sequence[Key]) -> None:
        """A prompt has been computed: its first blocks that fit are there now, all just used.

        The deepest counts as used first, so that it leaves first.
        """
        kept = keys[: self._capacity]
        blocks = self._blocks
        for key in reversed(kept):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)
