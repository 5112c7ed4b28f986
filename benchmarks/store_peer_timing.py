"""What every system is asked in ``store_peers.py``; needs numpy alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

LOOKUP_KEYS = 512


def arguments() -> tuple[Path, int, int, int]:
    """Folder, bytes of a block, number of blocks, repeats."""
    folder, block_bytes, num_blocks, repeats = sys.argv[1:5]
    return Path(folder), int(block_bytes), int(num_blocks), int(repeats)


def report(
    put: Callable[[int, np.ndarray], None],
    get: Callable[[int, np.ndarray], None],
    lookup: Callable[[], None],
    settle: Callable[[], object] = lambda: None,
) -> None:
    """Time the verbs and print one JSON line.

    Args:
        put: Stores [num_blocks, block_bytes] under the keys of a repeat.
        get: Copies them out.
        lookup: Asks for 512 keys.
        settle: Called untimed after each put.
    """
    _, block_bytes, num_blocks, repeats = arguments()
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    size = source.nbytes

    def rate(work: Callable[[int], object], after: Callable[[], object] = lambda: None) -> list:
        rates = []
        for repeat in range(repeats):
            start = time.perf_counter()
            work(repeat)
            rates.append(size / (time.perf_counter() - start) / 1e9)
            after()
        return rates

    np.copyto(target, source)
    found = {"memcpy": rate(lambda _: np.copyto(target, source))}
    found["put"] = rate(lambda r: put(r, source), settle)
    target[:] = 0
    get(0, target)
    if not np.array_equal(source, target):
        raise SystemExit("wrong bytes")
    found["get"] = rate(lambda r: get(r, target))
    times = []
    for _ in range(30):
        start = time.perf_counter()
        lookup()
        times.append((time.perf_counter() - start) * 1e6)
    found["lookup_us"] = times
    print(json.dumps(found), flush=True)
