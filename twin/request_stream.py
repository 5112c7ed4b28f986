"""An endless stream of independent requests, at a constant cost a request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from traces.lengths import LengthPairs

BLOCK_REQUESTS = 16_384


class RequestStream:
    """Independent (prompt, output) pairs of a law, handed out in blocks of fixed size.

    Blocks are the same whoever reads them and however fast, so every engine meets the same
    requests in the same order.
    """

    def __init__(self, lengths: LengthPairs, rng: np.random.Generator) -> None:
        self._lengths = lengths
        self._rng = rng
        equal = float(lengths.weight.min()) == float(lengths.weight.max())
        self._alias = None if equal else alias_table(lengths.weight)

    def next_block(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The next ``BLOCK_REQUESTS`` requests: prompt tokens, output tokens."""
        size = len(self._lengths.weight)
        if self._alias is None:
            index = self._rng.integers(0, size, BLOCK_REQUESTS)
        else:
            accept, other = self._alias
            point = self._rng.random(BLOCK_REQUESTS) * size
            index = point.astype(np.int64)
            index = np.where(point - index < accept[index], index, other[index])
        return self._lengths.prompt_tokens[index], self._lengths.output_tokens[index]

    def requests(self) -> Iterator[tuple[int, int]]:
        """One (prompt tokens, output tokens) after the other, without end."""
        while True:
            prompts, outputs = self.next_block()
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
    before = np.concatenate(([0.0], missing[:-1]))
    last = len(heavy) - 1
    accept[light] = share[light]
    other[light] = heavy[np.minimum(np.searchsorted(spare, before, side="right"), last)]
    overdrawn_by = np.searchsorted(missing, spare, side="right")
    is_overdrawn = (overdrawn_by < len(light)) & (np.arange(len(heavy)) < last)
    drawn = missing[np.minimum(overdrawn_by, len(light) - 1)]
    accept[heavy[is_overdrawn]] = np.clip(1.0 + (spare - drawn)[is_overdrawn], 0.0, 1.0)
    other[heavy[:-1]] = heavy[1:]
    other[heavy[~is_overdrawn]] = heavy[~is_overdrawn]
    return accept, other
