"""Sequences whose pages follow from their tokens, so that a wrong byte is always seen."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from policies.prefix.keys import Namespace
from runtime.engine.prefix_blocks import PrefixBlocks
from runtime.engine.prefix_keys import PrefixKeys
from runtime.model.kv_cache import LEFT_BEHIND, KvCache
from runtime.model.kv_layout import KvLayout, LayerKv
from runtime.page_arena import PageArena

PAGE_BYTES = 1024
WHOLE = LayerKv(kv_heads=2, head_dim=8)  # 128 bytes a token: 8 tokens a page, 2 pages a block
BLOCK_BYTES = 4 * PAGE_BYTES
PATIENCE_S = 20.0


def layout(*layers: LayerKv | int, dtype: torch.dtype = torch.float32) -> KvLayout:
    return KvLayout(layers or (WHOLE, WHOLE), dtype, PAGE_BYTES)


def namespace(own: KvLayout, **changes: Any) -> Namespace:
    given: dict[str, Any] = {
        "model": "tiny",
        "revision": "a1",
        "dtype": "float32",
        "layout": own.signature,
        "layers": "0-1",
        "kv_heads": "2",
        "block": own.block_tokens,
    }
    return Namespace(**(given | changes))


def new_cache(own: KvLayout | None = None, *, num_pages: int = 256) -> KvCache:
    return KvCache(PageArena(num_pages, page_bytes=PAGE_BYTES), own or layout())


def prompt(length: int, *, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def expected(tokens: Sequence[int], own: KvLayout) -> np.ndarray:
    """[blocks, pages of a block, page bytes]: what the pages of full blocks hold."""
    size = own.block_tokens
    blocks = []
    for stop in range(size, len(tokens) + 1, size):
        seed = hashlib.sha256(np.array(tokens[:stop], np.int64).tobytes()).digest()
        bytes_ = np.random.default_rng(list(seed)).bytes(own.block_pages * own.page_bytes)
        blocks.append(np.frombuffer(bytes_, np.uint8).reshape(own.block_pages, own.page_bytes))
    return np.array(blocks).reshape(len(blocks), own.block_pages, own.page_bytes)


def compute(cache: KvCache, sequence: int, tokens: Sequence[int], *, step: int = 10**9) -> None:
    """Begin a sequence and fill its pages as a model would, ``step`` tokens a pass."""
    cache.add(sequence)
    want = expected(tokens, cache.layout)
    size = cache.layout.block_tokens
    for start in range(0, len(tokens), step):
        added = min(step, len(tokens) - start)
        assert cache.grow(sequence, added)
        for block in range(start // size, (start + added) // size):
            pages = cache.block_pages(sequence, block)
            kept = pages != LEFT_BEHIND
            cache.arena.buffer.array[pages[kept]] = want[block][kept]
        cache.advance(sequence, added)


def held(cache: KvCache, sequence: int, blocks: int) -> np.ndarray:
    """[blocks, pages of a block, page bytes]: what the pages hold."""
    return cache.arena.buffer.array[cache.table(sequence)[:blocks]]


def chain(prefix: PrefixBlocks, tokens: Sequence[int], salt: str = "") -> PrefixKeys:
    keys = prefix.keys(salt)
    keys.update(tokens)
    return keys


def until(poll: Callable[[], list[Any]], count: int = 1) -> list[Any]:
    """What a poll brings in all, once it has brought so much."""
    found: list[Any] = []
    end = time.monotonic() + PATIENCE_S
    while len(found) < count:
        found += poll()
        assert time.monotonic() < end, "nothing ended"
        time.sleep(0.001)
    return found


def saved(prefix: PrefixBlocks, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
    """Save all full blocks of a sequence and wait; how many are in the store."""
    keys = chain(prefix, tokens, salt)
    assert prefix.start_save(sequence, keys, 0, len(keys)) == len(keys)
    (end,) = until(prefix.poll_saves)
    return int(end.blocks)


def loaded(
    prefix: PrefixBlocks, cache: KvCache, sequence: int, tokens: Sequence[int], salt: str = ""
) -> Any:
    """Begin a sequence with what the store has of its full blocks, and wait."""
    keys = chain(prefix, tokens, salt)
    cache.add(sequence)
    assert cache.grow(sequence, len(tokens))
    prefix.start_load(sequence, keys, 0, len(keys))
    (end,) = until(prefix.poll_loads)
    return end
