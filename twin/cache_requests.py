"""Requests of prompt blocks as columns: what a run of cache simulations reads.

A million block references take 8 MB here and cross to worker processes as they are; each process
turns one request at a time into plain integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from traces.prefix_workloads import PrefixRequest


class BlockRequest(NamedTuple):
    """One request: when, of which category, its blocks root first, its prompt's length."""

    time_s: float
    category: int
    prompt: tuple[int, ...]
    generated: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequests:
    """All requests of a workload, struct of arrays, in order of time.

    Attributes:
        time_s: [n] float64, never decreasing.
        category: [n] int64, kind of request; 0 where the workload tells none.
        prompt_tokens: [n] int64, >= 1.
        prompt_offsets: [n + 1] int64 into ``prompt_ids``.
        prompt_ids: [references] int64, dense ids >= 0; equal ids mean equal prompts up to there.
        generated_offsets: [n + 1] int64 into ``generated_ids``.
        generated_ids: [generated] int64, blocks that decoding filled, behind the prompt's.
        block_tokens: Tokens of a block, > 0; a prompt's last one may be part full.
    """

    time_s: NDArray[np.float64]
    category: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    prompt_offsets: NDArray[np.int64]
    prompt_ids: NDArray[np.int64]
    generated_offsets: NDArray[np.int64]
    generated_ids: NDArray[np.int64]
    block_tokens: int

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def num_references(self) -> int:
        """Blocks named by all prompts together."""
        return len(self.prompt_ids)

    @property
    def num_distinct(self) -> int:
        """Different blocks, prompts' and generated: the cache that never has to give one up."""
        return len(np.unique(np.concatenate((self.prompt_ids, self.generated_ids))))

    @property
    def longest_chain(self) -> int:
        """Most blocks of one request, prompt and generated."""
        lengths = np.diff(self.prompt_offsets) + np.diff(self.generated_offsets)
        return int(lengths.max(initial=0))

    def __iter__(self) -> Iterator[BlockRequest]:
        """One request after the other, as plain numbers."""
        prompt_ends, generated_ends = self.prompt_offsets.tolist(), self.generated_offsets.tolist()
        for i, (time_s, category) in enumerate(
            zip(self.time_s.tolist(), self.category.tolist(), strict=True)
        ):
            prompt = self.prompt_ids[prompt_ends[i] : prompt_ends[i + 1]]
            generated = self.generated_ids[generated_ends[i] : generated_ends[i + 1]]
            yield BlockRequest(time_s, category, tuple(prompt.tolist()), tuple(generated.tolist()))

    def hit_tokens(self, hits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of the leading ``hits`` [n] blocks of each prompt: [n]."""
        return np.minimum(hits * self.block_tokens, self.prompt_tokens)

    def unbounded_hits(self) -> NDArray[np.int64]:
        """Leading prompt blocks of each request that an earlier one named or generated: [n]."""
        n = len(self)
        first = np.full(_end_of(self.prompt_ids, self.generated_ids), n)
        for ids, offsets in (
            (self.prompt_ids, self.prompt_offsets),
            (self.generated_ids, self.generated_offsets),
        ):
            np.minimum.at(first, ids, np.repeat(np.arange(n), np.diff(offsets)))
        request = np.repeat(np.arange(n), np.diff(self.prompt_offsets))
        total = self.num_references
        unknown = np.where(first[self.prompt_ids] < request, total, np.arange(total))
        first_unknown = np.append(np.minimum.accumulate(unknown[::-1])[::-1], total)
        ends = self.prompt_offsets[1:]
        hits: NDArray[np.int64] = (
            np.minimum(first_unknown[self.prompt_offsets[:-1]], ends) - self.prompt_offsets[:-1]
        )
        return hits


def pack_requests(
    requests: Sequence[PrefixRequest], *, block_tokens: int, keeps_category: bool
) -> CacheRequests:
    """Columns of these requests; ids are renumbered densely, 0 for the smallest."""
    prompt_offsets, prompt_ids = _ragged([request.prompt for request in requests])
    generated_offsets, generated_ids = _ragged([request.generated for request in requests])
    _, ids = np.unique(np.concatenate((prompt_ids, generated_ids)), return_inverse=True)
    prompt_ids, generated_ids = ids[: len(prompt_ids)], ids[len(prompt_ids) :]
    category = [request.category if keeps_category else 0 for request in requests]
    return CacheRequests(
        time_s=np.array([request.time_s for request in requests], dtype=np.float64),
        category=np.array(category, dtype=np.int64),
        prompt_tokens=np.array([request.prompt_tokens for request in requests], dtype=np.int64),
        prompt_offsets=prompt_offsets,
        prompt_ids=prompt_ids,
        generated_offsets=generated_offsets,
        generated_ids=generated_ids,
        block_tokens=block_tokens,
    )


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets [n + 1] and the rows behind one another."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = np.fromiter((item for row in rows for item in row), np.int64, count=int(offsets[-1]))
    return offsets, flat


def _end_of(*columns: NDArray[np.int64]) -> int:
    """One more than the largest id."""
    return 1 + max((int(ids.max()) for ids in columns if len(ids)), default=-1)
