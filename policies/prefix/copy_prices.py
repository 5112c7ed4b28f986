"""What one copy of a block is worth: the seconds lost if just this copy is given up.

A reader takes the best copy that is left, so a copy is worth the seconds of the next best way to
the block, less those of reading this one. A replica costs little to lose (its owner still has it);
the only copy of a long context's end costs the prefill of that block. With such prices owned and
replicated blocks compete in one ranking and no threshold has to be set.
"""

from __future__ import annotations

from models.prefix_costs import PrefixCosts


class CopyPrices:
    """Prices of copies on one node."""

    def __init__(self, costs: PrefixCosts, *, is_pooled: bool) -> None:
        """Fix the speeds.

        Args:
            costs: Of the node's model, memory, network and SSD.
            is_pooled: Whether other nodes read this node's owned blocks, over the network.
        """
        self._costs, self._is_pooled = costs, is_pooled

    def in_memory_s(
        self, depth: int, size_bytes: int, *, is_owned: bool, is_on_ssd: bool, is_elsewhere: bool
    ) -> float:
        """Seconds lost with a copy in memory.

        Args:
            depth: Position of the block in its chain.
            size_bytes: Of the block.
            is_owned: Whether the node owns it: then its readers are mostly elsewhere.
            is_on_ssd: Whether the node's SSD holds it as well.
            is_elsewhere: Whether another node's memory holds it.
        """
        costs = self._costs
        local_s = size_bytes / costs.local.bytes_per_s
        remote_s = local_s + size_bytes / costs.remote.bytes_per_s
        otherwise_s = costs.recompute_s(depth)
        if is_on_ssd:
            otherwise_s = min(otherwise_s, local_s + size_bytes / costs.ssd.bytes_per_s)
        if is_elsewhere:
            otherwise_s = min(otherwise_s, remote_s)
        is_last = not is_on_ssd and not is_elsewhere
        read_s = remote_s if is_owned and is_last and self._is_pooled else local_s
        return max(0.0, otherwise_s - read_s)

    def on_ssd_s(self, depth: int, size_bytes: int) -> float:
        """Seconds lost with a block on SSD once memory has given it up too."""
        costs = self._costs
        read_s = size_bytes / costs.local.bytes_per_s + size_bytes / costs.ssd.bytes_per_s
        return max(0.0, costs.recompute_s(depth) - read_s)
