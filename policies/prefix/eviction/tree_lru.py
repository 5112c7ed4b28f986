"""Recency among the leaves of the prefix tree.

A block with a resident block behind it is not a candidate, so prefixes stay whole whatever is
pinned or lost.
"""

from __future__ import annotations

from policies.prefix.eviction.ranked import Rank, Ranked, RankedLeaves


class TreeLru(RankedLeaves):
    """The leaf used longest ago goes first, of one request the deeper."""

    def _rank(self, block: Ranked) -> Rank:
        return (block.request, -block.depth, 0.0)


class TreeSlru(RankedLeaves):
    """Leaves used once go before leaves used again; within each segment as ``TreeLru``.

    Segmented LRU (Karedla, Love and Wherry, IEEE Computer 1994) without a bound on the protected
    segment, as radix-tree caches use it.
    """

    def _rank(self, block: Ranked) -> Rank:
        return (block.uses > 1, block.request, -block.depth)
