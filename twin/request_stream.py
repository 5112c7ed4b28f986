"""Endless lines of independent requests, at a constant cost a request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from traces.lengths import LengthPairs

BLOCK_REQUESTS = 2048


class RequestLaw:
    """A law of (prompt, output) pairs, prepared for drawing many in constant time each."""

    def __init__(self, lengths: LengthPairs) -> None:
        self._lengths = lengths
        equal = float(lengths.weight.min()) == float(lengths.weight.max())
        self._alias = None if equal else alias_table(lengths.weight)

    def draw(
        self, rng: np.random.Generator, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``size`` independent requests: prompt tokens, output tokens."""
        num_pairs = len(self._lengths.weight)
        if self._alias is None:
            index = rng.integers(0, num_pairs, size)
        else:
            accept, other = self._alias
            point = rng.random(size) * num_pairs
            index = point.astype(np.int64)
            index = np.where(point - index < accept[index], index, other[index])
        return self._lengths.prompt_tokens[index], self._lengths.output_tokens[index]

    def endless(self, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """One (prompt tokens, output tokens) after the other, drawn in blocks."""
        while True:
            prompts, outputs = self.draw(rng, BLOCK_REQUESTS)
            yield from zip(prompts.tolist(), outputs.tolist(), strict=True)


def alias_table(weight: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Walker's alias table of a discrete law, built without a loop.

    Column i of k is kept with probability ``accept[i]``, else replaced by ``other[i]``; columns
    are equally likely. Light columns are filled in order by heavy ones in order; a heavy column
    drawn below one is itself filled by the next heavy one.

    Args:
        weight: [k], > 0, any scale.

    Returns:
        accept [k] in [0, 1], other [k].

    Source:
        Walker, ACM TOMS 3, 1977; the sweeping construction of Hübschle-Schneider and Sanders,
        "Parallel weighted random sampling", ESA 2019, here by cumulative sums.
    """
    share = weight * (len(weight) / float(weight.sum()))
    accept = np.ones(len(weight))
    other = np.arange(len(weight), dtype=np.int64)
    light = np.flatnonzero(share < 1.0)
    heavy = np.flatnonzero(share >= 1.0)
    if len(light) == 0 or len(heavy) == 0:
        return accept, other
    missing = np.cumsum(1.0 - share[light])
    spare = np.cumsum(share[heavy] - 1.0)
    last = len(heavy) - 1
    before = np.concatenate(([0.0], missing[:-1]))
    filled_by = np.minimum(np.searchsorted(spare, before, side="right"), last)
    accept[light] = share[light]
    other[light] = heavy[filled_by]
    # A heavy column ends below one if some light column, given to it or to one before it, took
    # more than is left; where a light column takes exactly the rest, it ends at one.
    taker = np.minimum(np.searchsorted(missing, spare, side="right"), len(light) - 1)
    column = np.arange(len(heavy))
    is_below = (missing[taker] > spare) & (filled_by[taker] <= column) & (column < last)
    accept[heavy[is_below]] = np.clip(1.0 + (spare - missing[taker])[is_below], 0.0, 1.0)
    other[heavy[is_below]] = heavy[column[is_below] + 1]
    return accept, other
