"""What a paged-weight run keeps: sums over time, peaks, a series of samples, fates of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

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
)


@dataclass(slots=True)
class Totals:
    """Sums over all steps.

    Attributes:
        steps: Steps that computed something.
        idle_boundaries: Boundaries at which nobody ran.
        busy_s: Seconds in steps.
        computed_tokens: Prompt and generated tokens computed, again after a preemption included.
        generated_tokens: Output tokens.
        preemptions: Sequences that gave their pages up.
        recomputed_tokens: Tokens whose KV they lost.
        held_back: Times a sequence waited a step for its pages.
        kv_tokens_peak, kv_pages_peak, running_peak: Largest of a step, its own tokens included.
        running_s: Sequences running times seconds in steps.
        bits_s, damage_s: Bits and damage times seconds in steps.
        bits_tokens, damage_tokens: The same times generated tokens.
        least_bits: Smallest mean width of a step.
    """

    steps: int = 0
    idle_boundaries: int = 0
    busy_s: float = 0.0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    held_back: int = 0
    kv_tokens_peak: int = 0
    kv_pages_peak: int = 0
    running_peak: int = 0
    running_s: float = 0.0
    bits_s: float = 0.0
    damage_s: float = 0.0
    bits_tokens: float = 0.0
    damage_tokens: float = 0.0
    least_bits: float = 16.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PagedWeightRun:
    """One policy that served one replication's requests.

    Times are seconds since the start of the run, NaN where it did not happen.

    Attributes:
        policy: Name of the planner, or the fixed width.
        arrival_s, prompt_tokens, output_tokens: [n] the requests.
        admitted_s: [n] when it first joined the running ones.
        first_token_s, last_token_s: [n].
        preemptions: [n] how often each started over.
        is_refused: [n] whether it did not fit into the arena even alone.
        end_s: When the run ended.
        totals: Sums.
        series: Column -> samples, about a thousand.
        decisions: How many decisions ordered something, by reason.
        faults: Reasons of the page table -> blocks.
        moved_bytes, wasted_bytes: Bytes of copies.
        arena_pages, page_bytes: The arena.
    """

    policy: str
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    admitted_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    preemptions: Ints
    is_refused: NDArray[np.bool_]
    end_s: float
    totals: Totals
    series: Mapping[str, Floats]
    decisions: Mapping[str, int]
    faults: Mapping[str, int]
    moved_bytes: int
    wasted_bytes: int
    arena_pages: int
    page_bytes: int

    @property
    def ttft_s(self) -> Floats:
        """[n] first token minus arrival."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        """[n] last token minus arrival."""
        return self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """[n] mean gap between tokens; NaN for a single token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, 1)
        span = self.last_token_s - self.first_token_s
        tpot: Floats = np.where(self.output_tokens > 1, span / gaps, np.nan)
        return tpot


@dataclass(slots=True)
class Series:
    """Samples at least ``every_s`` apart."""

    every_s: float
    rows: list[tuple[float, ...]] = field(default_factory=list)
    _next_s: float = 0.0

    def is_due(self, now: float) -> bool:
        """Whether a sample should be taken."""
        return now >= self._next_s

    def add(self, row: tuple[float, ...]) -> None:
        """Keep a sample: values in the order of SERIES."""
        self.rows.append(row)
        self._next_s = row[0] + self.every_s

    def columns(self) -> dict[str, Floats]:
        """Column -> values."""
        table = np.array(self.rows, dtype=np.float64).reshape(-1, len(SERIES))
        return {name: table[:, at].copy() for at, name in enumerate(SERIES)}
