"""Our store, server in a process of its own, in ``store_peers.py``."""

from __future__ import annotations

import hashlib

import numpy as np
from store_peer_timing import LOOKUP_KEYS, arguments, report

from runtime.store.bench import served

folder, block_bytes, num_blocks, repeats = arguments()
chains = [
    [hashlib.sha256(f"{r}/{i}".encode()).digest() for i in range(num_blocks)]
    for r in range(repeats)
]
options = (
    *("--dram", str(block_bytes * num_blocks * (repeats + 2))),
    *("--block-bytes", str(block_bytes), "--eviction", "lru"),
)
with served(folder, *options) as store:
    many = (chains[0] * LOOKUP_KEYS)[:LOOKUP_KEYS]

    def put(repeat: int, source: np.ndarray) -> None:
        stored = store.put(chains[repeat], [row.data for row in source], deadline_s=60).stored
        assert stored == num_blocks

    def get(repeat: int, target: np.ndarray) -> None:
        count = store.load_into(chains[repeat], [row.data for row in target], deadline_s=60)
        assert count == num_blocks

    report(put, get, lambda: store.lookup(many))
