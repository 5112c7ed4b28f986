"""Places of the prefix store: seconds of saving, looking up and loading blocks through the engine.

Everything goes through ``PrefixBlocks``, from and to the pages of an arena, with its threads and
deadlines: what the engine waits for. Wall time.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from runtime.engine.prefix_blocks import PrefixBlocks, PrefixLimits
from runtime.engine.prefix_identity import model_namespace
from runtime.engine.prefix_keys import PrefixKeys
from runtime.model.kv_cache import KvCache
from runtime.model.kv_layout import KvLayout
from runtime.page_arena import PageArena
from runtime.profile_clock import ProfileError
from runtime.store.bench import served
from runtime.store.prefix_store import PrefixStore
from runtime.store.store import open_store

Tier = Literal["memory", "ssd", "served"]
TIERS: Final[tuple[Tier, ...]] = ("memory", "ssd", "served")
PATIENCE_S: Final = 20.0
LIMITS: Final = PrefixLimits(lookup_s=PATIENCE_S, load_s=PATIENCE_S, save_s=PATIENCE_S)
MOST_BYTES: Final = 256 << 20
"""Of all blocks that are saved."""


@dataclass(frozen=True, slots=True)
class TierTimes:
    """Medians.

    Attributes:
        load_bytes: [n] bytes of the calls.
        load_s, save_s: [n] seconds.
        lookup_s: Of one lookup of the longest chain.
    """

    load_bytes: tuple[float, ...]
    load_s: tuple[float, ...]
    save_s: tuple[float, ...]
    lookup_s: float


def measure_tier(
    tier: Tier,
    folder: Path,
    layout: KvLayout,
    *,
    rounds: int,
    blocks: Sequence[int] = (1, 8, 32),
    place: Path | None = None,
) -> TierTimes:
    """Seconds of one place.

    Args:
        tier: ``memory``: a store in this process; ``ssd``: the same, blocks having left its
            memory (the system's page cache may hold them); ``served``: a server process's, through
            its socket.
        folder: Of the checkpoint.
        layout: Of its keys and values.
        rounds: Of which medians are taken, >= 1.
        blocks: Sizes of calls.
        place: Where folders are made; None: where temporary ones are.

    Raises:
        ProfileError: If a call does not bring what it should.
        StoreSetupError: If the store does not start.
    """
    block_bytes = layout.block_pages * layout.page_bytes
    most = max(2, MOST_BYTES // max(1, block_bytes * rounds * len(blocks)))
    sizes = sorted({min(size, most) for size in blocks})
    largest = sizes[-1]
    total = block_bytes * rounds * sum(sizes)
    with _store(tier, block_bytes, total, largest, place) as store:
        arena = PageArena(2 * largest * layout.block_pages + 1, page_bytes=layout.page_bytes)
        pages = arena.buffer.array
        pages[:] = np.random.default_rng(0).integers(0, 256, pages.shape, dtype=np.uint8)
        cache = KvCache(arena, layout)
        woken = threading.Event()
        namespace = model_namespace(folder, layout, revision="profile")
        prefix = PrefixBlocks(store, cache, namespace, limits=LIMITS, on_done=woken.set)
        try:
            return _measure(prefix, store, cache, woken, sizes, rounds)
        finally:
            prefix.close()


def _measure(
    prefix: PrefixBlocks,
    store: PrefixStore,
    cache: KvCache,
    woken: threading.Event,
    sizes: Sequence[int],
    rounds: int,
) -> TierTimes:
    block_tokens = cache.layout.block_tokens
    saves: dict[int, list[float]] = {size: [] for size in sizes}
    loads: dict[int, list[float]] = {size: [] for size in sizes}
    lookups: list[float] = []
    chains: list[tuple[int, PrefixKeys]] = []
    for number in range(rounds):
        for size in sizes:
            keys = prefix.keys()
            keys.update([(number * 1000 + size + i) % 50_000 for i in range(size * block_tokens)])
            with _sequence(cache, 0, size * block_tokens):
                saves[size].append(_save(prefix, keys, size, woken))
            store.flush(deadline_s=PATIENCE_S)  # else a small memory is full of what is not on disk
            chains.append((size, keys))
    for size, keys in chains:
        start_s = time.perf_counter()
        found = prefix.lookup(keys)
        took_s = time.perf_counter() - start_s
        if size == sizes[-1]:
            lookups.append(took_s)
        if found != size:
            raise ProfileError(f"prefix store: {found} of {size} blocks are there after saving")
        with _sequence(cache, 1, size * block_tokens):
            loads[size].append(_load(prefix, keys, size, woken))
    block_bytes = cache.layout.block_pages * cache.layout.page_bytes
    return TierTimes(
        load_bytes=tuple(float(size * block_bytes) for size in sizes),
        load_s=tuple(float(np.median(loads[size])) for size in sizes),
        save_s=tuple(float(np.median(saves[size])) for size in sizes),
        lookup_s=float(np.median(lookups)),
    )


def _save(prefix: PrefixBlocks, keys: PrefixKeys, size: int, woken: threading.Event) -> float:
    woken.clear()
    start_s = time.perf_counter()
    prefix.start_save(0, keys, 0, size)
    while not (ended := prefix.poll_saves()):
        _wait(woken, start_s)
    took_s = time.perf_counter() - start_s
    if ended[0].blocks != size:
        raise ProfileError(f"prefix store: a save ended: {ended[0].reason or 'not all blocks'}")
    return took_s


def _load(prefix: PrefixBlocks, keys: PrefixKeys, size: int, woken: threading.Event) -> float:
    woken.clear()
    start_s = time.perf_counter()
    prefix.start_load(1, keys, 0, size)
    while not (ended := prefix.poll_loads()):
        _wait(woken, start_s)
    took_s = time.perf_counter() - start_s
    if ended[0].blocks != size:
        raise ProfileError(f"prefix store: a load ended: {ended[0].reason or 'not all blocks'}")
    return took_s


def _wait(woken: threading.Event, start_s: float) -> None:
    if time.perf_counter() - start_s > PATIENCE_S:
        raise ProfileError(f"prefix store: a transfer did not end within {PATIENCE_S:g} s")
    woken.wait(0.05)
    woken.clear()


@contextmanager
def _sequence(cache: KvCache, number: int, tokens: int) -> Iterator[None]:
    cache.add(number)
    cache.grow(number, tokens)
    cache.set_tokens(number, tokens)
    try:
        yield
    finally:
        cache.release(number)


@contextmanager
def _store(
    tier: Tier, block_bytes: int, total_bytes: int, largest: int, place: Path | None
) -> Iterator[PrefixStore]:
    """A store with room for all in memory, or for next to nothing there and all on disk."""
    room = 2 * total_bytes + 64 * block_bytes
    # A socket's path must be short, so a served store is not made just anywhere.
    made = Path(tempfile.mkdtemp(prefix="profile-", dir=None if tier == "served" else place))
    try:
        if tier == "served":
            options = ("--dram", str(room), "--block-bytes", str(block_bytes))
            with served(made, *options) as store:
                yield store
            return
        least = 2 * largest * block_bytes
        dram, ssd = (room, 0) if tier == "memory" else (least, 4 * room + (64 << 20))
        with open_store(made, dram=dram, ssd=ssd, block_bytes=block_bytes) as store:
            yield store
    finally:
        shutil.rmtree(made, ignore_errors=True)
