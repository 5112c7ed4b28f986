"""Nothing may be left of whatever went wrong: pins, leases, reservations, slots, bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from runtime.store.store import PrefixStore
from tests.runtime.store.conftest import BLOCK, block

QUIET_S = 15.0


def settled(store: PrefixStore) -> Mapping[str, float]:
    """Gauges once nothing is under way; fails if anything stays."""
    end = time.monotonic() + QUIET_S
    busy = ("pinned_blocks", "leases", "reservations", "overdue_slots", "sends_waiting")
    while True:
        gauges: Mapping[str, float] = store.stats(deadline_s=5)["gauges"]
        left = {name: gauges[name] for name in busy if gauges[name]}
        if not left:
            break
        assert time.monotonic() < end, left
        time.sleep(0.02)
    assert gauges["free_slots"] + gauges["memory_blocks"] == gauges["slots"], gauges
    assert gauges["memory_used_bytes"] == gauges["memory_blocks"] * BLOCK, gauges
    return gauges


def right(store: PrefixStore, keys: list[bytes], deadline_s: float = 5.0) -> int:
    """How many leading blocks there are; each has to be the one asked for."""
    with store.load(keys, deadline_s=deadline_s) as found:
        for key, view in zip(keys, found.views, strict=False):
            assert bytes(view) == block(key), "a wrong byte"
        return found.leading


def counter(store: PrefixStore, name: str) -> int:
    return int(store.stats(deadline_s=5)["counters"].get(name, 0))
