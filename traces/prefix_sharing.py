"""How much of a trace's prompts a prefix cache could serve, whatever the engine.

A block's id stands for the prompt up to the end of that block, so a request can reuse the blocks
from the left as long as each is known: the leading known blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.request import Trace
from traces.spread import Spread, spread

LRU_SIZES_BLOCKS = (1_000, 3_000, 10_000, 30_000, 100_000)
MAX_LRU_REFERENCES = 1_000_000  # above, the pass in Python would take many seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStatistics:
    """Sharing of prompt blocks.

    Attributes:
        block_tokens: Tokens per block.
        num_references: Blocks named by all requests together.
        num_distinct: Different blocks.
        used_once_share: Share of the different blocks that are named once only.
        unbounded_hit_share: Share of prompt tokens that a cache without limit, empty at the
            start, serves: the most that any prefix cache can.
        lru_hit_share_by_blocks: The same for least-recently-used caches of that many blocks;
            empty where the trace names too many blocks for a quick pass.
        reuse_gap_s: Spread of the time between two uses of a block; None without times or reuse.
    """

    block_tokens: int
    num_references: int
    num_distinct: int
    used_once_share: float
    unbounded_hit_share: float
    lru_hit_share_by_blocks: Mapping[int, float]
    reuse_gap_s: Spread | None


def prefix_statistics(trace: Trace) -> PrefixStatistics | None:
    """Sharing of prompt blocks; None where the trace has none."""
    if trace.block_offsets is None or trace.block_ids is None or len(trace.block_ids) == 0:
        return None
    offsets, ids = trace.block_offsets, trace.block_ids
    if int(ids.max()) < 2 * len(ids) and int(ids.min()) >= 0:  # dense, as readers give them
        compact, counts = ids, np.bincount(ids)
        counts = counts[counts > 0]
    else:
        _, compact, counts = np.unique(ids, return_inverse=True, return_counts=True)
    lru: dict[int, float] = {}
    if len(ids) <= MAX_LRU_REFERENCES:
        lru = {
            size: hit_share(trace, lru_hits(offsets, compact, size)) for size in LRU_SIZES_BLOCKS
        }
    return PrefixStatistics(
        block_tokens=trace.block_tokens,
        num_references=len(ids),
        num_distinct=len(counts),
        used_once_share=float(np.mean(counts == 1)),
        unbounded_hit_share=hit_share(trace, unbounded_hits(offsets, compact)),
        lru_hit_share_by_blocks=lru,
        reuse_gap_s=_reuse_gaps(trace.arrival_s, offsets, compact),
    )


def hit_share(trace: Trace, hit_blocks: NDArray[np.int64]) -> float:
    """Share of all prompt tokens in the leading hit blocks [n]; a last block may be part full."""
    hit_tokens = np.minimum(hit_blocks * trace.block_tokens, trace.prompt_tokens)
    return float(hit_tokens.sum() / trace.prompt_tokens.sum())


def unbounded_hits(offsets: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Leading blocks of each request that an earlier request named: [n].

    Args:
        offsets: [n + 1] into ``ids``.
        ids: [total] block ids, >= 0, not much larger than they are many.
    """
    n, total = len(offsets) - 1, len(ids)
    request = np.repeat(np.arange(n), np.diff(offsets))
    first_request = np.full(int(ids.max()) + 1, n)
    np.minimum.at(first_request, ids, request)
    return _leading_run(first_request[ids] < request, offsets, total)


def lru_hits(
    offsets: NDArray[np.int64], ids: NDArray[np.int64], size_blocks: int
) -> NDArray[np.int64]:
    """Leading blocks of each request found in a least-recently-used cache: [n].

    A request first reads its leading known blocks, then all its blocks become the most recent.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = np.zeros(len(offsets) - 1, dtype=np.int64)
    plain: Sequence[int] = ids.tolist()
    for i in range(len(hits)):
        blocks = plain[int(offsets[i]) : int(offsets[i + 1])]
        run = 0
        for block in blocks:
            if block not in cache:
                break
            run += 1
        hits[i] = run
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size_blocks:
            cache.popitem(last=False)
    return hits


def _leading_run(
    is_known: NDArray[np.bool_], offsets: NDArray[np.int64], total: int
) -> NDArray[np.int64]:
    """How many entries of each row are known before the first that is not: [n]."""
    unknown = np.where(is_known, total, np.arange(total))
    first_unknown = np.minimum.accumulate(unknown[::-1])[::-1]
    first_unknown = np.append(first_unknown, total)
    run: NDArray[np.int64] = np.minimum(first_unknown[offsets[:-1]], offsets[1:]) - offsets[:-1]
    return run


def _reuse_gaps(
    arrival_s: NDArray[np.float64] | None, offsets: NDArray[np.int64], ids: NDArray[np.int64]
) -> Spread | None:
    if arrival_s is None:
        return None
    used_s = np.repeat(arrival_s, np.diff(offsets))
    order = np.argsort(ids, kind="stable")
    same_block = np.diff(ids[order]) == 0
    return spread(np.diff(used_s[order])[same_block])
