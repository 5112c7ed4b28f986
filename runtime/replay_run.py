"""What a replay keeps: fates of requests, peaks and means over time, a series of samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_SAMPLES = 4000

SERIES = (
    "time_s",
    "mean_bits",
    "damage",
    "weight_pages",
    "kv_pages",
    "free_pages",
    "kv_tokens",
    "running",
    "waiting",
    "is_copying",
    "loading",
    "steps",
    "generated_tokens",
    "cached_tokens",
    "preemptions",
)
"""Columns of the time series; the first ten are those of the twin."""


@dataclass(slots=True)
class Series:
    """Samples at least ``every_s`` apart; every second one goes when there are too many."""

    every_s: float = 0.02
    rows: list[tuple[float, ...]] = field(default_factory=list)
    _next_s: float = 0.0

    def is_due(self, now: float) -> bool:
        """Whether a sample should be taken."""
        return now >= self._next_s

    def add(self, row: tuple[float, ...]) -> None:
        """Keep a sample: values in the order of ``SERIES``."""
        self.rows.append(row)
        if len(self.rows) >= MAX_SAMPLES:
            self.rows = self.rows[::2]
            self.every_s *= 2
        self._next_s = row[0] + self.every_s

    def columns(self) -> dict[str, Floats]:
        """Column -> values."""
        table = np.array(self.rows, dtype=np.float64).reshape(-1, len(SERIES))
        return {name: table[:, at].copy() for at, name in enumerate(SERIES)}


@dataclass(slots=True)
class Totals:
    """Sums over all steps; zero where the engine is behind a server.

    Attributes:
        steps: Steps that computed something.
        busy_s: Seconds in steps.
        running_s, bits_s, damage_s: Sequences, mean bits and damage times seconds in steps.
        running_peak, kv_pages_peak, kv_tokens_peak: Largest of a step.
        first_bits, least_bits, last_bits: Mean width at the start, at the narrowest, at the end.
        first_preemption_s: When the first sequence gave its pages up; NaN: none did.
        bits_at_first_preemption: Mean width then; NaN: none did.
    """

    steps: int = 0
    busy_s: float = 0.0
    running_s: float = 0.0
    bits_s: float = 0.0
    damage_s: float = 0.0
    running_peak: int = 0
    kv_pages_peak: int = 0
    kv_tokens_peak: int = 0
    first_bits: float = 0.0
    least_bits: float = 0.0
    last_bits: float = 0.0
    first_preemption_s: float = float("nan")
    bits_at_first_preemption: float = float("nan")


class ReplayFates:
    """What became of each request. Seconds since the start, NaN where it did not happen.

    Attributes:
        added_s: [n] when it was handed to the engine or the server.
        admitted_s: [n] when it first joined the running ones; NaN behind a server.
        first_token_s, last_token_s: [n]; last_token_s only of complete answers.
        generated_tokens: [n] tokens that came.
        cached_tokens: [n] prompt tokens that were not computed.
        preemptions: [n] how often each started over.
        errors: [n] what went wrong; empty: nothing.
    """

    def __init__(self, count: int) -> None:
        self.added_s, self.admitted_s = np.full(count, np.nan), np.full(count, np.nan)
        self.first_token_s, self.last_token_s = np.full(count, np.nan), np.full(count, np.nan)
        self.generated_tokens = np.zeros(count, dtype=np.int64)
        self.cached_tokens = np.zeros(count, dtype=np.int64)
        self.preemptions = np.zeros(count, dtype=np.int64)
        self.errors = [""] * count

    def spoke(self, request: int, tokens: int, now: float) -> None:
        """So many tokens came."""
        if tokens and np.isnan(self.first_token_s[request]):
            self.first_token_s[request] = now
        self.generated_tokens[request] += tokens

    @property
    def num_failed(self) -> int:
        """Requests that got an error instead of an answer."""
        return sum(1 for error in self.errors if error)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReplayRun:
    """A replay that has ended, or was stopped.

    Attributes:
        arrival_s: [n] when each request fell due; NaN: never.
        fates: Of requests.
        end_s: When the last answer was complete, or the replay was stopped.
        series: Samples.
        totals: Sums.
        counters: Numbers of the engine at the end, by name; empty behind a server.
        was_stopped: Whether somebody stopped it before its end.
    """

    arrival_s: Floats
    fates: ReplayFates
    end_s: float
    series: Series
    totals: Totals
    counters: dict[str, float | dict[str, float]]
    was_stopped: bool
