"""GreedyDual-Size with Frequency: cost and size against frequency, aged by inflation.

    H = L + F C / S

with F uses since the block became resident, C seconds lost without it, S its bytes, and L the H of
the last victim: what is not used again is overtaken by newcomers, which start at the raised L.
Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms" (USENIX 1997); Cherkasova, "Improving WWW
Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (HP Labs 1998).

Conventions: equal H gives up the deeper block, then the one used longest ago; an access renews H
with the L of that moment, and the newcomers of a request enter with the L that its evictions left.
"""

from __future__ import annotations

from policies.prefix.eviction.ranked import Rank, Ranked, RankedBlocks, RankedLeaves


class _Inflated(RankedBlocks):
    """The rank H, and L that follows the victims."""

    def _rank(self, block: Ranked) -> Rank:
        return (block.base + block.uses * block.cost_s / block.size_bytes, -block.depth, 0.0)

    def _given_up(self, rank: Rank) -> None:
        self._base = max(self._base, rank[0])


class Gdsf(_Inflated):
    """GDSF; C is what each block was priced at.

    A driver that has no better price than a block's position prices all blocks alike for this
    policy (``prices_position``): with a cost that grows along the chain and no closure, roots look
    cheaper than their tails and go first.
    """

    prices_position = False


class GdsfPosition(_Inflated):
    """GDSF whose C grows with the position in the chain; for comparison."""


class TreeGdsf(_Inflated, RankedLeaves):
    """GDSF among the leaves, C growing with the position: a root is kept for what is behind it."""
