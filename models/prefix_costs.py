"""Seconds of prefill, and of bringing blocks of keys and values from where they lie.

Prefill of n tokens behind c cached ones (every layer's matrix products, plus attention over what
came before), at a fraction of the device's peak, but never faster than the weights can be read:

    t(n, c) = max((2 N n + 4 L d (n c + n^2 / 2)) / (mfu F), weights / memory bandwidth) + t_fwd

with N parameters, L layers and d = heads * head size.

Loading is what happens at the same time and what does not: requests to other nodes run in parallel,
each as one stream; the node's own SSD and the way to the device come before and after them:

    load = lookup + own SSD + max over nodes (queue + remote bytes, + its SSD) + host to device
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds of prefill on one device (or one tensor-parallel group).

    Attributes:
        parameters: N, weights that take part in a token's forward pass.
        layers: L.
        heads, head_dim: Query heads and their size; d = heads * head_dim.
        weight_bytes: Bytes read once per forward pass.
        flops_per_s: Peak of the device.
        mfu: Share of the peak that prefill reaches, 0..1.
        memory_bytes_per_s: Device memory bandwidth.
        forward_s: Fixed seconds of a forward pass.
    """

    parameters: float
    layers: int
    heads: int
    head_dim: int
    weight_bytes: float
    flops_per_s: float
    mfu: float
    memory_bytes_per_s: float
    forward_s: float = 0.0

    def __post_init__(self) -> None:
        _require_finite(self, zero_is_allowed=("layers", "heads", "head_dim", "forward_s"))
        if self.mfu > 1.0:
            raise ValueError(f"mfu must be a share of the peak in 0..1, found {self.mfu}")

    def seconds(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Seconds to prefill ``new_tokens`` behind ``cached_tokens``; 0.0 for no new tokens."""
        if new_tokens <= 0:
            return 0.0
        floor_s = self.weight_bytes / self.memory_bytes_per_s
        return max(self.compute_s(new_tokens, cached_tokens), floor_s) + self.forward_s

    def compute_s(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Seconds of arithmetic alone: what one more block costs inside a larger prefill."""
        width = self.heads * self.head_dim
        attention = new_tokens * cached_tokens + new_tokens * new_tokens / 2
        flops = 2 * self.parameters * new_tokens + 4 * self.layers * width * attention
        return flops / (self.mfu * self.flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """How fast blocks come from one kind of place.

    Attributes:
        bytes_per_s: Of one stream with nothing beside it.
        request_s: Fixed seconds per request.
    """

    bytes_per_s: float
    request_s: float = 0.0

    def __post_init__(self) -> None:
        _require_finite(self, zero_is_allowed=("request_s",))

    def seconds(self, size_bytes: float) -> float:
        """Seconds for one request of that many bytes; 0.0 for none."""
        return self.request_s + size_bytes / self.bytes_per_s if size_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCosts:
    """What a block costs to compute or to bring to the device of a node.

    Attributes:
        prefill: Of the model on the device.
        block_tokens: Tokens of a block.
        local: Host memory of the node to its device.
        remote: Memory of another node to the memory of this one.
        ssd: The node's own SSD to its memory.
        lookup_s: Seconds of finding out what is stored.
    """

    prefill: PrefillCost
    block_tokens: int
    local: TierSpeed
    remote: TierSpeed
    ssd: TierSpeed
    lookup_s: float = 0.0

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be >= 1, found {self.block_tokens}")
        if not 0.0 <= self.lookup_s < math.inf:
            raise ValueError(f"lookup_s must be finite and >= 0, found {self.lookup_s}")

    def recompute_s(self, depth: int) -> float:
        """Seconds to compute the block at that depth again, its prefix being there."""
        return self.prefill.compute_s(self.block_tokens, depth * self.block_tokens)

    def request_s(self, memory_bytes: float, ssd_bytes: float = 0.0) -> float:
        """Seconds of one request to another node, of what it has in memory and on its SSD."""
        return self.remote.seconds(memory_bytes + ssd_bytes) + self.ssd.seconds(ssd_bytes)

    def load_s(
        self, total_bytes: float, ssd_bytes: float = 0.0, requests_s: Iterable[float] = ()
    ) -> float:
        """Seconds until blocks are on the device; what is neither remote nor on SSD is at hand.

        Args:
            total_bytes: All blocks, wherever they come from.
            ssd_bytes: Of them, on the node's own SSD.
            requests_s: Seconds of each request to another node; they run in parallel.
        """
        fetched_s = self.ssd.seconds(ssd_bytes) + max(requests_s, default=0.0)
        return self.lookup_s + fetched_s + self.local.seconds(total_bytes)


def _require_finite(table: PrefillCost | TierSpeed, *, zero_is_allowed: tuple[str, ...]) -> None:
    for field in fields(table):
        value = getattr(table, field.name)
        if not 0.0 <= value < math.inf or (value == 0.0 and field.name not in zero_is_allowed):
            bound = ">= 0" if field.name in zero_is_allowed else "> 0"
            raise ValueError(f"{field.name} must be finite and {bound}, found {value}")


# The model and device of the published experiments: BF16 weights, half of the peak in prefill.
MISTRAL_7B_ON_A100 = PrefillCost(
    parameters=7.24e9,
    layers=32,
    heads=32,
    head_dim=128,
    weight_bytes=14.48e9,
    flops_per_s=312e12,
    mfu=0.5,
    memory_bytes_per_s=1.555e12,
)
