"""What an open-loop run notes down as it goes: bounded room, however long the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_SERIES_POINTS = 4096
_BINS_PER_UNIT = 1000.0
_SHORTEST_GAP_S = 1e-12


class SeriesPoint(NamedTuple):
    """State at the end of a step, once requests have left and others have joined.

    Attributes:
        time_s: When.
        queue_length: Requests that wait for a slot.
        live_slots: Filled slots of all microbatches.
        load_tokens: Tokens held in all slots.
        max_load_tokens: Tokens that the fullest worker read in that step.
        step_s: Length of that step: the gap between two tokens of its requests.
        tokens: Tokens made since the start of the run, as are the sums below.
        slot_s: Seconds that slots were filled, of all slots together.
        attention_s: Seconds of attention, of all workers together.
        ffn_s: Seconds the FFN server worked.
        barrier_wait_s: Slowest minus mean attention worker, over all stages.
    """

    time_s: float
    queue_length: int
    live_slots: int
    load_tokens: int
    max_load_tokens: int
    step_s: float
    tokens: int
    slot_s: float
    attention_s: float
    ffn_s: float
    barrier_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GapHistogram:
    """Gaps between consecutive tokens of a request (ITL), all tokens pooled.

    Attributes:
        gap_s: [k] ascending; centres of bins 0.1 % wide.
        num_gaps: [k] gaps in each bin.
        total_s: Exact sum of all gaps.
    """

    gap_s: NDArray[np.float64]
    num_gaps: NDArray[np.int64]
    total_s: float

    @property
    def mean_s(self) -> float:
        """Exact mean; NaN without gaps."""
        count = int(self.num_gaps.sum())
        return self.total_s / count if count else math.nan

    def quantiles(self, probabilities: Sequence[float]) -> NDArray[np.float64]:
        """Gaps that a share of all gaps does not exceed, to 0.05 %; NaN without gaps."""
        if len(self.gap_s) == 0:
            return np.full(len(probabilities), math.nan)
        up_to = np.cumsum(self.num_gaps)
        rank = np.asarray(probabilities) * up_to[-1]
        index = np.minimum(np.searchsorted(up_to, rank, side="left"), len(up_to) - 1)
        quantiles: NDArray[np.float64] = self.gap_s[index]
        return quantiles


def merge_gaps(histograms: Sequence[GapHistogram]) -> GapHistogram:
    """All gaps of several runs in one histogram."""
    number = [np.rint(np.log(one.gap_s) * _BINS_PER_UNIT - 0.5) for one in histograms]
    bins, place = np.unique(np.concatenate(number), return_inverse=True)
    num_gaps = np.zeros(len(bins), dtype=np.int64)
    np.add.at(num_gaps, place, np.concatenate([one.num_gaps for one in histograms]))
    return GapHistogram(
        gap_s=np.exp((bins + 0.5) / _BINS_PER_UNIT),
        num_gaps=num_gaps,
        total_s=sum(one.total_s for one in histograms),
    )


class GapCounter:
    """Counts gaps in bins of equal ratio, one weighted entry a step, never one a token."""

    def __init__(self) -> None:
        self._num_by_bin: dict[int, int] = {}
        self._total_s = 0.0

    def add(self, gap_s: float, num_gaps: int) -> None:
        """``num_gaps`` gaps of ``gap_s`` >= 0; below ``_SHORTEST_GAP_S`` all fall into one bin.

        Far from 0 the clock cannot tell a short step from none.
        """
        number = math.floor(math.log(max(gap_s, _SHORTEST_GAP_S)) * _BINS_PER_UNIT)
        self._num_by_bin[number] = self._num_by_bin.get(number, 0) + num_gaps
        self._total_s += gap_s * num_gaps

    def histogram(self) -> GapHistogram:
        """All counted gaps."""
        numbers = np.array(sorted(self._num_by_bin), dtype=np.int64)
        return GapHistogram(
            gap_s=np.exp((numbers + 0.5) / _BINS_PER_UNIT),
            num_gaps=np.array([self._num_by_bin[int(b)] for b in numbers], dtype=np.int64),
            total_s=self._total_s,
        )


class SeriesSampler:
    """Every k-th point of a series; k doubles when the points become too many."""

    def __init__(self) -> None:
        self.points: list[SeriesPoint] = []
        self._stride = 1
        self._until_next = 1

    def is_due(self) -> bool:
        """Whether the step that just ended is to be kept. To be asked once a step."""
        self._until_next -= 1
        if self._until_next:
            return False
        if len(self.points) == MAX_SERIES_POINTS:
            del self.points[1::2]
            self._stride *= 2
        self._until_next = self._stride
        return True
