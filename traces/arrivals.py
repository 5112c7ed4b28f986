"""When requests come: arrival processes as arrays of seconds.

Every generator returns arrival_s: [num_requests] float64, seconds, never decreasing, first >= 0.
Processes with a changing rate are drawn in operational time, in which the rate is 1, and mapped
back through the cumulated rate; only a rate given as a function needs thinning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from traces.argument_checks import (
    require_between,
    require_count,
    require_not_negative,
    require_positive,
)

RateFunction = Callable[[NDArray[np.float64]], ArrayLike]


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTable:
    """A rate that is constant on intervals.

    Attributes:
        start_s: Start of each interval, rising, the first is 0.
        rate_per_s: Requests per second from that start on, >= 0.
        period_s: After this long the table begins again; None: the last rate holds for ever.
    """

    start_s: tuple[float, ...]
    rate_per_s: tuple[float, ...]
    period_s: float | None = None

    def __post_init__(self) -> None:
        if not self.start_s or len(self.start_s) != len(self.rate_per_s):
            raise ValueError(
                "start_s and rate_per_s must be of one length >= 1, found "
                f"{len(self.start_s)} and {len(self.rate_per_s)}"
            )
        for start in self.start_s:
            require_not_negative("start_s", start)
        for rate in self.rate_per_s:
            require_not_negative("rate_per_s", rate)
        if self.start_s[0] != 0.0:
            raise ValueError(f"start_s must begin at 0, found {self.start_s[0]!r}")
        if any(b <= a for a, b in zip(self.start_s, self.start_s[1:], strict=False)):
            raise ValueError("start_s must rise from interval to interval")
        if self.period_s is None:
            if self.rate_per_s[-1] == 0.0:
                raise ValueError("the last rate_per_s must be > 0 where period_s is not given")
        elif require_positive("period_s", self.period_s) <= self.start_s[-1]:
            raise ValueError(f"period_s must be > the last start_s, found {self.period_s!r}")
        elif max(self.rate_per_s) == 0.0:
            raise ValueError("at least one rate_per_s must be > 0")

    def mean_rate_per_s(self) -> float:
        """Mean over one period; without a period, the rate that holds for ever."""
        if self.period_s is None:
            return self.rate_per_s[-1]
        widths = np.diff(np.append(self.start_s, self.period_s))
        return float(widths @ np.asarray(self.rate_per_s)) / self.period_s

    def seconds_of(self, operational: NDArray[np.float64]) -> NDArray[np.float64]:
        """The instants at which the cumulated rate reaches the given values (>= 0, rising)."""
        starts, rates = np.asarray(self.start_s), np.asarray(self.rate_per_s)
        if self.period_s is None:
            ends, rounds = starts[1:], np.zeros(len(operational))
            cumulated = np.concatenate(([0.0], np.cumsum(np.diff(starts) * rates[:-1])))
            inside = operational
        else:
            ends = np.append(starts[1:], self.period_s)
            cumulated = np.concatenate(([0.0], np.cumsum((ends - starts) * rates)))
            rounds, inside = np.divmod(operational, cumulated[-1])
        # side="right" passes over intervals of rate 0, on which the cumulated rate stands still
        index = np.minimum(np.searchsorted(cumulated, inside, side="right") - 1, len(rates) - 1)
        seconds = starts[index] + (inside - cumulated[index]) / rates[index]
        if self.period_s is not None:
            seconds = np.minimum(seconds, ends[index]) + rounds * self.period_s
        return np.asarray(seconds, dtype=np.float64)


def poisson(
    rng: np.random.Generator, *, rate_per_s: float, num_requests: int
) -> NDArray[np.float64]:
    """Independent exponential gaps of mean 1 / rate_per_s."""
    rate = require_positive("rate_per_s", rate_per_s)
    count = require_count("num_requests", num_requests)
    return np.cumsum(rng.exponential(1.0 / rate, count))


def gamma(
    rng: np.random.Generator, *, rate_per_s: float, cv: float, num_requests: int
) -> NDArray[np.float64]:
    """Independent gamma gaps of mean 1 / rate_per_s and coefficient of variation ``cv``.

    cv = 1 is a Poisson process, cv < 1 is more even, cv > 1 comes in bursts, cv = 0 is a clock.
    """
    rate = require_positive("rate_per_s", rate_per_s)
    return np.cumsum(_unit_gaps(rng, cv, require_count("num_requests", num_requests))) / rate


def on_off(
    rng: np.random.Generator,
    *,
    on_rate_per_s: float,
    off_rate_per_s: float,
    mean_on_s: float,
    mean_off_s: float,
    num_requests: int,
) -> NDArray[np.float64]:
    """A Poisson process whose rate switches between two values (Markov-modulated).

    Stays in each state are exponential; the first state is drawn from the long-run shares.

    Args:
        rng: Source of chance.
        on_rate_per_s: Rate while on, > 0.
        off_rate_per_s: Rate while off, >= 0.
        mean_on_s: Mean length of a stay in on, > 0.
        mean_off_s: Mean length of a stay in off, > 0.
        num_requests: How many arrivals, >= 1.

    Raises:
        ValueError: If an argument breaks its rule.
    """
    rates = np.array(
        [
            require_positive("on_rate_per_s", on_rate_per_s),
            require_not_negative("off_rate_per_s", off_rate_per_s),
        ]
    )
    means_s = np.array(
        [require_positive("mean_on_s", mean_on_s), require_positive("mean_off_s", mean_off_s)]
    )
    operational = np.cumsum(rng.exponential(1.0, require_count("num_requests", num_requests)))
    first = 0 if rng.random() < means_s[0] / means_s.sum() else 1
    order = np.array([first, 1 - first])
    stays_s: list[NDArray[np.float64]] = []
    reached = 0.0
    while reached <= operational[-1]:
        missing = (operational[-1] - reached) / float(means_s @ rates)
        block = rng.exponential(1.0, (int(missing) + 64, 2)) * means_s[order]
        reached += float((block @ rates[order]).sum())
        stays_s.append(block.ravel())
    stays = np.concatenate(stays_s)
    cumulated = np.concatenate(([0.0], np.cumsum(stays * np.tile(rates[order], len(stays) // 2))))
    clock_s = np.concatenate(([0.0], np.cumsum(stays)))
    return np.interp(operational, cumulated, clock_s)


def time_varying(
    rng: np.random.Generator,
    *,
    rate_per_s: RateFunction | RateTable | Sequence[tuple[float, float]],
    num_requests: int,
    max_rate_per_s: float | None = None,
    cv: float = 1.0,
) -> NDArray[np.float64]:
    """Arrivals whose rate changes with time.

    Args:
        rng: Source of chance.
        rate_per_s: A ``RateTable``, pairs of (start in s, rate) of which the last holds for ever,
            or a function of instants [k] in s giving rates [k]; the function is thinned.
        num_requests: How many arrivals, >= 1.
        max_rate_per_s: An upper bound of the function, needed with a function only.
        cv: Coefficient of variation of the gaps in operational time; 1 for a function.

    Raises:
        ValueError: If an argument breaks its rule, or the function leaves [0, max_rate_per_s].
    """
    count = require_count("num_requests", num_requests)
    if callable(rate_per_s):
        if max_rate_per_s is None:
            raise ValueError("max_rate_per_s is needed where rate_per_s is a function")
        if cv != 1.0:
            raise ValueError(f"cv must be 1 where rate_per_s is a function, found {cv!r}")
        return _thinned(rng, rate_per_s, require_positive("max_rate_per_s", max_rate_per_s), count)
    if isinstance(rate_per_s, RateTable):
        table = rate_per_s
    else:
        table = RateTable(
            start_s=tuple(float(start) for start, _ in rate_per_s),
            rate_per_s=tuple(float(rate) for _, rate in rate_per_s),
        )
    return table.seconds_of(np.cumsum(_unit_gaps(rng, cv, count)))


def replay(
    arrival_s: ArrayLike, *, rate_scale: float = 1.0, num_requests: int | None = None
) -> NDArray[np.float64]:
    """The arrivals of a trace, faster or slower, again and again.

    A round lasts the trace's duration and one mean gap, so that looping keeps the mean rate.

    Args:
        arrival_s: [n] seconds, never decreasing.
        rate_scale: How many times faster than the trace, > 0.
        num_requests: How many arrivals to return; None: the trace once.

    Raises:
        ValueError: If the trace is empty, unsorted or not finite, or is to be looped although all
            its requests come at one instant.
    """
    source = np.asarray(arrival_s, dtype=np.float64)
    scale = require_positive("rate_scale", rate_scale)
    if source.ndim != 1 or len(source) == 0:
        raise ValueError(f"arrival_s must be a row of at least one time, found {source.shape}")
    if not np.all(np.isfinite(source)):
        raise ValueError("arrival_s must be finite")
    if np.any(np.diff(source) < 0.0):
        where = int(np.argmax(np.diff(source) < 0.0)) + 1
        raise ValueError(f"arrival_s must never decrease, found a step back at number {where}")
    relative: NDArray[np.float64] = (source - source[0]) / scale
    n = len(relative)
    count = n if num_requests is None else require_count("num_requests", num_requests)
    if count <= n:
        return relative[:count]
    if relative[-1] == 0.0:
        raise ValueError("arrival_s spans no time and cannot be looped")
    period_s = float(relative[-1]) * n / (n - 1)
    rounds, index = np.divmod(np.arange(count), n)
    looped: NDArray[np.float64] = relative[index] + rounds * period_s
    return looped


def _unit_gaps(rng: np.random.Generator, cv: float, count: int) -> NDArray[np.float64]:
    """Gaps of mean 1 and the given coefficient of variation: [count]."""
    variation = require_between("cv", cv, 0.0, 1000.0)
    if variation < 1e-6:
        return np.ones(count)
    if variation == 1.0:
        return rng.exponential(1.0, count)
    shape = 1.0 / (variation * variation)
    return rng.gamma(shape, 1.0 / shape, count)


def _thinned(
    rng: np.random.Generator, rate: RateFunction, bound: float, count: int
) -> NDArray[np.float64]:
    """Lewis and Shedler (1979): candidates at the bound, kept with probability rate / bound."""
    kept: list[NDArray[np.float64]] = []
    num_kept, num_tried, now_s = 0, 0, 0.0
    while num_kept < count:
        accepted = (num_kept + 1) / (num_tried + 1)
        block = int(min(4_000_000, 1.1 * (count - num_kept) / accepted + 1000))
        times = now_s + np.cumsum(rng.exponential(1.0 / bound, block))
        rates = np.asarray(rate(times), dtype=np.float64)
        if rates.shape != times.shape:
            raise ValueError(f"rate_per_s must give one rate an instant, found {rates.shape}")
        if not np.all((rates >= 0.0) & (rates <= bound * (1.0 + 1e-12))):
            worst = times[np.argmax(~((rates >= 0.0) & (rates <= bound)))]
            raise ValueError(
                f"rate_per_s must stay within [0, max_rate_per_s = {bound:g}], "
                f"found {float(np.asarray(rate(np.array([worst])))[0])!r} at {worst:g} s"
            )
        chosen = times[rng.random(block) * bound < rates]
        kept.append(chosen)
        num_kept, num_tried, now_s = num_kept + len(chosen), num_tried + block, float(times[-1])
        if num_tried > 1_000_000 and num_kept * 10_000 < num_tried:
            raise ValueError(
                "rate_per_s must not stay below 1/10000 of max_rate_per_s, "
                f"found {num_kept} arrivals in {now_s:g} s"
            )
    return np.concatenate(kept)[:count]
