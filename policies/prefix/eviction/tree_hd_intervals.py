"""When blocks of a class are used again: hazards of reuse by age, open waits included.

A block waits from one use to the next. Waiting times fall into half-octave age bins. For every
class and bin two numbers are kept: how many waits *entered* the bin and how many *ended* in it by a
reuse; their ratio is the hazard of the bin. Waits that are still open count for the bins that they
have passed so far, so blocks that never come back are seen as such (Kaplan and Meier's estimator
for censored data). Both numbers fade by the same factor with every refit.

Open waits are not listed one by one: those that began in the same period form a cohort, of which
only the number per class is kept, so a refit costs cohorts x classes, whatever the memory holds.

Source:
    Kaplan and Meier, JASA 53 (1958); ranks as in Beckmann et al., LHD, NSDI 2018, with the best
    horizon of Gittins's index.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 40
FIRST_EDGE_S = 0.5
PRIOR_HAZARD = 0.3  # of a wait of age a: PRIOR_HAZARD / (a + 1 s) per second
PRIOR_WEIGHT = 20.0  # waits that the prior counts for in every bin
DECAY = 0.9
MAX_COHORTS = 64

_EDGES_S: list[float] = [FIRST_EDGE_S * 2 ** (i / 2) for i in range(NUM_BINS - 1)]
_LOW_S = np.array([0.0, *_EDGES_S])
_HIGH_S = np.array([*_EDGES_S, _EDGES_S[-1] * 2**0.5])
_PRIOR = 1.0 - ((_LOW_S + 1.0) / (_HIGH_S + 1.0)) ** PRIOR_HAZARD
_ROW = NUM_BINS + 1  # entries per class of a list of differences


def age_bin(age_s: float) -> int:
    """The bin of an age: 0 below 0.5 s, then two bins per octave, the last without end."""
    return bisect_right(_EDGES_S, age_s)


class ReuseIntervals:
    """Hazards and ranks per class.

    Attributes:
        rank: ``rank[class][bin]``: reuses per second that keeping a block of that class and age
            brings, at the best horizon: max over m of P(reuse within m bins) / E(seconds until the
            reuse or the end of the m bins). Renewed by ``refit``.
    """

    def __init__(self, num_classes: int, now: float = 0.0) -> None:
        self._ended = np.zeros((0, NUM_BINS))
        self._entered = np.zeros((0, NUM_BINS))
        # Since the last refit; entered as differences along the bins.
        self._new_ended: list[int] = []
        self._new_entered: list[int] = []
        self._begin_s: list[float] = [now]
        self._waiting: list[list[int]] = [[]]
        self._passed: list[int] = [-1]  # bin that a cohort had reached at the last refit
        self.rank: list[list[float]] = []
        self._unknown: list[float] = _ranks(_PRIOR[None, :])[0].tolist()
        for _ in range(num_classes):
            self.add_class()

    def add_class(self) -> int:
        """A class of which nothing is known; its number."""
        self.rank.append(self._unknown)
        self._new_ended += [0] * _ROW
        self._new_entered += [0] * _ROW
        for waiting in self._waiting:
            waiting.append(0)
        return len(self.rank) - 1

    def begin(self, kind: int) -> None:
        """A wait of a block of that class begins now."""
        self._waiting[-1][kind] += 1

    def end(self, kind: int, since_s: float, now: float) -> None:
        """A wait that began at ``since_s`` ended by a reuse."""
        self._new_ended[kind * _ROW + self._close(kind, since_s, now)] += 1

    def give_up(self, kind: int, since_s: float, now: float) -> None:
        """A wait is no longer followed; it counts for the bins that it passed."""
        self._close(kind, since_s, now)

    def rename(self, kind: int, new_kind: int, since_s: float) -> None:
        """A waiting block changed its class."""
        waiting = self._waiting[bisect_right(self._begin_s, since_s) - 1]
        waiting[kind] -= 1
        waiting[new_kind] += 1

    def refit(self, now: float) -> None:
        """Learn from what ended and what still waits; open a new cohort.

        Must be called before anything begins at this very ``now``, which must be later than the
        last call's.
        """
        self._pass_cohorts(now)
        shape = (len(self.rank), _ROW)
        unmet = ((0, len(self.rank) - len(self._entered)), (0, 0))
        entered = np.array(self._new_entered, dtype=np.float64).reshape(shape)
        ended = np.array(self._new_ended, dtype=np.float64).reshape(shape)
        self._entered = np.pad(self._entered * DECAY, unmet)
        self._entered += np.cumsum(entered, axis=1)[:, :NUM_BINS]
        self._ended = np.pad(self._ended * DECAY, unmet) + ended[:, :NUM_BINS]
        self._new_ended = [0] * len(self._new_ended)
        self._new_entered = [0] * len(self._new_entered)
        self._begin_s.append(now)
        self._waiting.append([0] * len(self.rank))
        self._passed.append(-1)
        if len(self._begin_s) > MAX_COHORTS:
            self._merge_old_cohorts()
        self.rank = _ranks(self.hazards()).tolist()

    def hazards(self) -> NDArray[np.float64]:
        """[num_classes, NUM_BINS] probability that a wait which enters the bin ends in it."""
        ended = self._ended + PRIOR_WEIGHT * _PRIOR
        entered = np.maximum(self._entered, self._ended) + PRIOR_WEIGHT
        hazard: NDArray[np.float64] = ended / entered
        return hazard

    def _close(self, kind: int, since_s: float, now: float) -> int:
        cohort = bisect_right(self._begin_s, since_s) - 1
        self._waiting[cohort][kind] -= 1
        reached = bisect_right(_EDGES_S, now - since_s)
        row = kind * _ROW
        # The cohort as a whole was counted up to _passed; this wait went on to ``reached`` (or, if
        # it began late in its cohort, not so far: then the difference takes the excess back).
        self._new_entered[row + self._passed[cohort] + 1] += 1
        self._new_entered[row + reached + 1] -= 1
        return reached

    def _pass_cohorts(self, now: float) -> None:
        ends = [*self._begin_s[1:], now]
        for i, begin_s in enumerate(self._begin_s):
            reached = age_bin(now - (begin_s + ends[i]) / 2)
            if reached == self._passed[i]:
                continue
            entered, before = self._new_entered, self._passed[i] + 1
            for kind, number in enumerate(self._waiting[i]):
                if number:
                    entered[kind * _ROW + before] += number
                    entered[kind * _ROW + reached + 1] -= number
            self._passed[i] = reached

    def _merge_old_cohorts(self) -> None:
        """Pairs of the older half become one: relative ages lose little."""
        half = len(self._begin_s) // 4 * 2
        waiting = [
            [a + b for a, b in zip(self._waiting[i], self._waiting[i + 1], strict=True)]
            for i in range(0, half, 2)
        ]
        self._waiting[:half] = waiting
        self._begin_s[:half] = self._begin_s[0:half:2]
        # Bins between the two marks are counted for the elder alone: at most one or two per pair.
        self._passed[:half] = self._passed[0:half:2]


def _ranks(hazard: NDArray[np.float64]) -> NDArray[np.float64]:
    """[classes, bins] best ratio of reuses to seconds waited, from each bin's begin on."""
    num_classes = len(hazard)
    survival = np.ones((num_classes, NUM_BINS + 1))
    np.cumprod(1.0 - hazard, axis=1, out=survival[:, 1:])
    # Seconds waited in a bin: all of it without a reuse, half of it in the mean with one.
    seconds = survival[:, :-1] * (_HIGH_S - _LOW_S) * (1.0 - hazard / 2)
    waited = np.zeros((num_classes, NUM_BINS + 1))
    np.cumsum(seconds, axis=1, out=waited[:, 1:])
    reused = survival[:, :-1, None] - survival[:, None, 1:]
    spent = waited[:, None, 1:] - waited[:, :-1, None]
    ahead = np.triu(np.ones((NUM_BINS, NUM_BINS), dtype=bool)) & (spent > 0)
    ratio = np.divide(reused, spent, out=np.zeros_like(reused), where=ahead)
    best: NDArray[np.float64] = ratio.max(axis=2)
    return best
