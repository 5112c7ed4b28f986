"""What memory and latency allow: KV capacity of a worker, and the time per output token."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.bundle import Bundle
from models.order_statistics import FloatArray
from models.slot_load import SlotMoments


def kv_tokens_needed(bundle: Bundle, moments: SlotMoments, z: float = 3.0) -> float:
    """KV tokens one attention worker needs: m B theta + z nu sqrt(m B).

    Args:
        bundle: Gives m and B.
        moments: Gives theta and nu.
        z: Standard deviations of load kept free.
    """
    return _tokens(bundle.microbatches * bundle.batch_per_worker, moments, z)


def largest_batch(
    capacity_tokens: float, moments: SlotMoments, microbatches: int, z: float = 3.0
) -> int | None:
    """Largest B whose m B slots fit into a worker's KV capacity; 0 if not even one does.

    Returns:
        None where there is no limit: slots hold no tokens at all.
    """
    if not capacity_tokens >= 0.0 or microbatches < 1:
        raise ValueError(
            "capacity_tokens must be >= 0 and microbatches >= 1, "
            f"found {capacity_tokens!r} and {microbatches!r}"
        )
    theta, spread = moments.theta_tokens, z * moments.nu_tokens
    if theta == 0.0:
        return None
    # With s = sqrt(m B): theta s^2 + z nu s - capacity <= 0.
    root = (math.sqrt(spread * spread + 4.0 * theta * capacity_tokens) - spread) / (2.0 * theta)
    batch = math.floor(root * root / microbatches)
    # The root is rounded: look at the neighbour.
    fits = _tokens((batch + 1) * microbatches, moments, z) <= capacity_tokens
    while batch > 0 and _tokens(batch * microbatches, moments, z) > capacity_tokens:
        batch -= 1
    return batch + 1 if fits else batch


def tpot_s(bundle: Bundle, cycle_s: ArrayLike) -> FloatArray:
    """[n] time per output token: a token needs m cycles in each of the L layers."""
    factor = bundle.num_layers * bundle.microbatches
    return np.asarray(factor * np.asarray(cycle_s, dtype=np.float64), dtype=np.float64)


def ratios_within(
    ratios: NDArray[np.int64], tpot_s: FloatArray, max_tpot_s: float
) -> NDArray[np.int64]:
    """The ratios whose expected time per output token is within the limit, in the given order."""
    return np.asarray(ratios[tpot_s <= max_tpot_s], dtype=np.int64)


def _tokens(num_slots: int, moments: SlotMoments, z: float) -> float:
    return num_slots * moments.theta_tokens + z * moments.nu_tokens * math.sqrt(num_slots)
