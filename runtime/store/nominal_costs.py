"""Prices of blocks where nobody has said what computing them costs.

They rank blocks against each other; whether to load at all is only decided with costs that the user
gave. Mistral-7B on an A100 at half of its peak, host memory over PCIe 4, a 100 Gbit/s network, one
NVMe drive.
"""

from __future__ import annotations

from models.prefix_costs import MISTRAL_7B_ON_A100, PrefixCosts, TierSpeed

MISTRAL_7B_BYTES_PER_TOKEN = 131_072


def nominal_costs(block_bytes: int) -> PrefixCosts:
    """Costs of a block of that many bytes of keys and values."""
    return PrefixCosts(
        prefill=MISTRAL_7B_ON_A100,
        block_tokens=max(1, round(block_bytes / MISTRAL_7B_BYTES_PER_TOKEN)),
        local=TierSpeed(bytes_per_s=14e9),
        remote=TierSpeed(bytes_per_s=12e9, request_s=60e-6),
        ssd=TierSpeed(bytes_per_s=3e9, request_s=100e-6),
    )
