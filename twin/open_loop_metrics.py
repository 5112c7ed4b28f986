"""What one open-loop run did inside its window: rates, busy and idle shares, latencies, targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.scenario import Slo
from twin.open_loop import OpenLoopRun
from twin.output_statistics import mser5

LATENCIES = ("queue_s", "ttft_s", "tpot_s", "e2e_s")
TARGETS = ("ttft_s", "tpot_s", "e2e_s")
FEWEST_FOR_WARM_UP = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The span of a run that is measured.

    ``0 .. start_s``: the bundle fills up. ``start_s .. end_s``: requests arrive. After ``end_s``
    none arrives any more, or the run is over.

    Attributes:
        first: Index of the first request that is counted; it arrives at ``start_s``.
        start_s: Arrival of that request.
        end_s: Last arrival, or the horizon if that comes before. Where all requests arrive at
            once: the end of the run.
    """

    first: int
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Seconds from start to end, >= 0."""
        return max(0.0, self.end_s - self.start_s)


class Sums(NamedTuple):
    """What happened inside a window. See ``twin.open_log.SeriesPoint``."""

    tokens: float
    slot_s: float
    attention_s: float
    ffn_s: float
    barrier_wait_s: float


def window_of(run: OpenLoopRun, *, cut_warm_up: bool) -> Window:
    """The window of a run; without a warm-up cut it starts at the first arrival."""
    arrivals = run.arrival_s
    end_s = min(float(arrivals[-1]), run.end_s)
    first = _first_after_warm_up(run, end_s) if cut_warm_up else 0
    start_s = float(arrivals[first])
    return Window(first=first, start_s=start_s, end_s=end_s if end_s > start_s else run.end_s)


def _first_after_warm_up(run: OpenLoopRun, end_s: float) -> int:
    """First request that finds the bundle as usual: MSER-5 on TTFT and on filled slots, the later.

    TTFT alone does not see a bundle that fills up while nobody has to wait. At most half of the
    requests are cut.
    """
    first = 0
    seen = np.flatnonzero(np.isfinite(run.ttft_s))
    if len(seen) >= FEWEST_FOR_WARM_UP:
        first = int(seen[mser5(run.ttft_s[seen]).first])
    points = [point for point in run.series if point.time_s <= end_s]
    if len(points) >= FEWEST_FOR_WARM_UP:
        full = points[mser5([point.live_slots for point in points]).first]
        settled_s = full.time_s if full is not points[0] else 0.0
        first = max(first, int(np.searchsorted(run.arrival_s, settled_s)))
    return min(first, run.injected // 2)


def sums_within(run: OpenLoopRun, window: Window) -> Sums:
    """Sums over the window, from the running sums of the series, straight between its points."""
    time_s = [0.0, *(point.time_s for point in run.series), run.end_s]
    found = []
    for name in Sums._fields:
        so_far = [0.0, *(getattr(point, name) for point in run.series), getattr(run.totals, name)]
        before, after = np.interp([window.start_s, window.end_s], time_s, so_far)
        found.append(float(after - before))
    return Sums(*found)


class Measured:
    """A run seen through its window.

    Attributes:
        run: The run.
        window: What is measured of it.
        length_s: Seconds of the window.
        sums: What happened inside it.
        arrived: Requests that arrived inside it (its ends included).
        rows: Those of them that were completed, be it after the window.
        values: Latency name -> values of ``rows``; NaN where a request has none.
        served: Requests, of any arrival, whose last token was made inside it.
        offered_tokens: Output tokens asked for by its arrivals, without the one that starts it;
            0 where all arrive at once, which is no rate.
    """

    def __init__(self, run: OpenLoopRun, *, cut_warm_up: bool) -> None:
        self.run = run
        self.window = window_of(run, cut_warm_up=cut_warm_up)
        self.length_s = self.window.length_s
        self.sums = sums_within(run, self.window)
        is_done = np.isfinite(run.last_token_s)
        first = self.window.first
        self.arrived = max(0, run.injected - first)
        self.rows = first + np.flatnonzero(is_done[first:])
        self.values = {name: getattr(run, name)[self.rows] for name in LATENCIES}
        done_s = np.where(is_done, run.last_token_s, np.inf)
        self._is_served = (done_s > self.window.start_s) & (done_s <= self.window.end_s)
        self.served = int(self._is_served.sum())
        is_span_of_arrivals = self.window.end_s <= run.arrival_s[-1]
        later = slice(first + 1, run.injected if is_span_of_arrivals else first + 1)
        self.offered_tokens = int(run.output_tokens[later].sum())

    def finite(self, name: str) -> NDArray[np.float64]:
        """Values of a latency, in order of arrival, of the requests that have one."""
        values: NDArray[np.float64] = self.values[name]
        return values[np.isfinite(values)]

    def good_arrivals(self, slo: Slo) -> int:
        """How many requests that arrived in the window were completed within every target."""
        return int(meets_targets(self.run, slo)[self.rows].sum())

    def good_served(self, slo: Slo) -> int:
        """How many requests were completed in the window within every target."""
        return int((meets_targets(self.run, slo) & self._is_served).sum())


def meets_targets(run: OpenLoopRun, slo: Slo) -> NDArray[np.bool_]:
    """[n] whether a request was completed within every target; one token has no TPOT to miss."""
    meets = np.isfinite(run.last_token_s)
    for name in TARGETS:
        target = getattr(slo, name)
        if target is not None:
            value = getattr(run, name)
            meets &= np.isnan(value) | (value <= target)
    return meets
