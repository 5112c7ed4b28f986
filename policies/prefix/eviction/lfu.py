"""Least frequently used."""

from __future__ import annotations

from policies.prefix.eviction.ranked import Rank, Ranked, RankedBlocks


class Lfu(RankedBlocks):
    """The block with fewest uses goes first; of equals the one used longest ago, then the deeper.

    Uses are counted while a block is resident; nothing is remembered of one that went. Counts never
    age, so yesterday's favourites stay: for comparison.
    """

    def _rank(self, block: Ranked) -> Rank:
        return (block.uses, block.request, -block.depth)
