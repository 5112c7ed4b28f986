"""Which tokens stay in the draw, and the draw: exact, one row at a time, nothing shared.

Ties go to the lowest id everywhere, so ``top_k = 1``, a tiny ``top_p`` and temperature 0 agree, and
the tokens kept never depend on how a sort happens to order equals.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
TokenIds = npt.NDArray[np.intp]

_SORTED_AT_ONCE = 8192
_BLOCK = 256
_BINS = 4096
_BIN_SHIFT = 46  # of a float64's 52 bits of mantissa: 64 bins an octave


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that belongs to a seed and a place in the answer.

    A keyed hash of a counter: no state, so a sequence that is computed again, or elsewhere, draws
    the same. 53 bits.

    Args:
        seed: Any integer; its low 128 bits count.
        index: Number of the token in the answer, 0 for the first.

    Source:
        Counter-based generators: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    key = (seed & ((1 << 128) - 1)).to_bytes(16, "little")
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8, key=key).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def largest(logits: Logits, count: int) -> TokenIds:
    """Places of the ``count`` largest logits, ascending by place; of equals the first ones.

    Args:
        logits: [n], no NaN.
        count: >= 1; all places where it is n or more.
    """
    if count >= logits.size:
        return np.arange(logits.size)
    least = np.partition(logits, logits.size - count)[logits.size - count]
    places = np.flatnonzero(logits >= least)
    if places.size == count:
        return places
    equal = logits[places] == least
    surplus = places.size - count
    keep = np.ones(places.size, dtype=np.bool_)
    keep[np.flatnonzero(equal)[-surplus:]] = False
    return places[keep]


def scaled(logits: Logits, temperature: float) -> Weights:
    """Distance of each logit from the largest, over the temperature: [n], <= 0.

    The largest is taken off first, so no temperature overflows; what underflows has weight 0.

    Args:
        logits: [n], at least one above -inf, no NaN.
        temperature: > 0.
    """
    distance: Weights = np.subtract(logits, logits.max(), dtype=np.float64)
    if temperature != 1.0:
        with np.errstate(over="ignore"):
            distance /= temperature
    return distance


def nucleus(weights: Weights, top_p: float) -> Mask:
    """The smallest set of the heaviest that has at least ``top_p`` of the weight: [n].

    A token stays if those before it, heaviest first, have less than ``top_p`` together; so at
    least one does.

    Args:
        weights: [n], >= 0, not all 0; need not add up to 1.
        top_p: In (0, 1).
    """
    total = float(weights.sum())
    target = top_p * total
    # All weights below (1 - top_p) * total / n together are lighter than 1 - top_p, so the set
    # lies among the others; half of that leaves room for rounding.
    candidates = weights[weights >= 0.5 * (1.0 - top_p) * total / weights.size]
    count, mass = 0, 0.0
    if candidates.size > _SORTED_AT_ONCE:
        count, mass, candidates = _around_the_edge(candidates, target)
    descending = np.sort(candidates)[::-1]
    before = mass + (np.cumsum(descending) - descending)
    inside = max(1, int(np.searchsorted(before, target, side="left")))
    least = descending[inside - 1]
    keep = weights >= least
    surplus = int(np.count_nonzero(keep)) - count - inside
    if surplus > 0:
        keep[np.flatnonzero(weights == least)[-surplus:]] = False
    return np.asarray(keep, dtype=np.bool_)


def _around_the_edge(weights: Weights, target: float) -> tuple[int, float, Weights]:
    """Number and mass of the weights above the bin where the nucleus ends, and that bin's weights.

    Bins of equal ratio, heaviest first: the bits of a positive float, read as an integer, grow
    with it. So few are left to sort, however flat the distribution.
    """
    bits = weights.view(np.int64)
    bins = bits.max() - bits
    bins >>= _BIN_SHIFT
    np.minimum(bins, _BINS - 1, out=bins)
    running = np.cumsum(np.bincount(bins, weights=weights))
    edge = min(int(np.searchsorted(running, target)), running.size - 1)
    count = int(np.count_nonzero(bins < edge))
    return count, float(running[edge - 1]) if edge else 0.0, weights[bins == edge]


def draw(weights: Weights, share: float) -> int:
    """The place where the running sum of the weights passes ``share`` of their total.

    Args:
        weights: [n], >= 0, not all 0.
        share: In [0, 1).

    Returns:
        A place of positive weight.
    """
    blocks = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK))
    running = np.cumsum(blocks)
    target = share * running[-1]
    # "right": the first sum above the target, which one of weight 0 never is.
    block = int(np.searchsorted(running, target, side="right"))
    if block == blocks.size:  # share * total was rounded up to the total
        block = int(np.flatnonzero(blocks)[-1])
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    sums = np.cumsum(inside)
    if block > 0:
        sums += running[block - 1]
    place = int(np.searchsorted(sums, target, side="right"))
    if place == inside.size:  # the block's own sum was rounded differently
        place = int(np.flatnonzero(inside)[-1])
    return block * _BLOCK + place


def choose(
    logits: Logits, *, temperature: float, min_p: float, top_k: int, top_p: float, share: float
) -> int:
    """Draw one token: temperature, then min_p, top_k, top_p, then the inverse of the distribution.

    Args:
        logits: [vocabulary], at least one above -inf, no NaN.
        temperature: > 0.
        min_p: In [0, 1]; 0: off.
        top_k: 0: off.
        top_p: In (0, 1]; 1: off.
        share: The uniform number that decides, in [0, 1).
    """
    ids: TokenIds | None = None
    if 0 < top_k < logits.size:
        # Before min_p here: both keep the likeliest, so their order makes no difference, and
        # this leaves the exponentials of few.
        ids = largest(logits, top_k)
        logits = logits[ids]
    distance = scaled(logits, temperature)
    if min_p > 0.0:
        kept = np.flatnonzero(distance >= np.log(min_p))
        ids = kept if ids is None else ids[kept]
        distance = distance[kept]
    weights = np.exp(distance, out=distance)
    if top_p < 1.0:
        weights *= nucleus(weights, top_p)
    place = draw(weights, share)
    return place if ids is None else int(ids[place])
