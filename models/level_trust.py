"""Which level of theory to trust for a workload and batch size."""

from __future__ import annotations

import math

from models.slot_load import SlotMoments

PEARSON3_FROM_TRUST = 0.05
EXACT_FROM_SKEW = 3.0


def gaussian_trust(moments: SlotMoments, batch_per_worker: int) -> float:
    """q = |worker cv * worker skew|: the Gaussian level's worst error is about 20 q percent.

    Source:
        Measured against the exact law, docs/theory.md.
    """
    if moments.theta_tokens == 0.0:
        return 0.0
    return abs(moments.nu_tokens / moments.theta_tokens * moments.skew) / batch_per_worker


def recommended_level(moments: SlotMoments, batch_per_worker: int) -> str:
    """The cheapest level to trust: exact for a very skewed worker load, else by ``gaussian_trust``.

    Under ``mean_field`` only for a load that does not vary at all.
    """
    if moments.nu_tokens == 0.0:
        return "mean_field"
    if abs(moments.skew) / math.sqrt(batch_per_worker) > EXACT_FROM_SKEW:
        return "exact"
    trust = gaussian_trust(moments, batch_per_worker)
    return "pearson3" if trust >= PEARSON3_FROM_TRUST else "gaussian"


def trust_warnings(level: str, moments: SlotMoments, batch_per_worker: int) -> tuple[str, ...]:
    """Why a level's prediction should not be relied on; empty where it may."""
    q = gaussian_trust(moments, batch_per_worker)
    skew = moments.skew / math.sqrt(batch_per_worker)
    if level == "gaussian" and q >= PEARSON3_FROM_TRUST:
        return (
            f"gaussian: the worker load is skewed (cv * skew = {q:.2f}); throughput may be off by "
            f"about {20.0 * q:.0f} %; use pearson3 or exact",
        )
    if level == "pearson3" and abs(skew) > EXACT_FROM_SKEW:
        return (f"pearson3: the worker load is very skewed ({skew:.1f}); use exact",)
    return ()
