"""Named random streams: chance is derived from what it is for, not from call order."""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, name: str, replication: int = 0) -> np.random.Generator:
    """A generator of its own for every (seed, name, replication).

    A new name shifts no other stream, so two policies under one seed meet the same arrivals.

    Args:
        seed: The scenario's seed, >= 0.
        name: What the numbers are for, e.g. ``"arrivals"``.
        replication: Which independent repetition, >= 0.

    Raises:
        ValueError: If seed or replication is negative.
    """
    if seed < 0 or replication < 0:
        raise ValueError(f"seed and replication must be >= 0, found {seed} and {replication}")
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype=np.uint32)
    entropy = [seed & 0xFFFFFFFF, seed >> 32, replication, *(int(w) for w in words)]
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(entropy)))
