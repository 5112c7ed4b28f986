"""What an open-loop run leaves: the fate of every request, sums, state over time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.bundle import Bundle
from twin.faults import Fault
from twin.open_floor import Totals
from twin.open_log import GapHistogram, SeriesPoint
from twin.stages import StageInterval


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenLoopRun:
    """What became of every request. Times are seconds since the start; NaN: did not happen.

    ``injected == completed + running + queued + preparing`` always holds.

    Attributes:
        bundle: What was run.
        attention_per_ffn: r.
        seed: Of the random streams.
        replication: Which independent repetition.
        routing: Name of the policy, or of its class.
        faults: What went wrong.
        simulated_layers: Layers played one by one.
        notes: What a reader should know, one sentence each.
        arrival_s: [n], as given.
        prompt_tokens: [n], as given.
        output_tokens: [n], as given.
        ready_s: [n] when the request asked for a slot: arrival plus prefill.
        admitted_s: [n] when it got its first slot.
        first_token_s: [n] end of its first decode step.
        last_token_s: [n] end of its last one.
        worker: [n] attention worker it was on last; -1: none yet.
        retries: [n] how often it lost its worker.
        injected: Requests that arrived up to the end.
        completed: Requests with all their tokens.
        running: Requests in slots at the end.
        queued: Requests that waited for a slot at the end.
        preparing: Requests in prefill at the end.
        end_s: End of the run: its horizon, or when the last request was done.
        totals: Sums of stage seconds, tokens and losses.
        series: State over time, at most 4096 points.
        gaps: All gaps between consecutive tokens of a request (ITL).
        timeline: Stage intervals of the first steps, if asked for.
    """

    bundle: Bundle
    attention_per_ffn: int
    seed: int
    replication: int
    routing: str
    faults: tuple[Fault, ...]
    simulated_layers: int
    notes: tuple[str, ...]
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    ready_s: NDArray[np.float64]
    admitted_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    last_token_s: NDArray[np.float64]
    worker: NDArray[np.int64]
    retries: NDArray[np.int64]
    injected: int
    completed: int
    running: int
    queued: int
    preparing: int
    end_s: float
    totals: Totals
    series: tuple[SeriesPoint, ...]
    gaps: GapHistogram
    timeline: tuple[StageInterval, ...]

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """[n] first token minus arrival."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> NDArray[np.float64]:
        """[n] (last minus first token) / (output tokens - 1); NaN for one token."""
        between = np.where(self.output_tokens > 1, self.output_tokens - 1.0, math.nan)
        return (self.last_token_s - self.first_token_s) / between

    @property
    def e2e_s(self) -> NDArray[np.float64]:
        """[n] last token minus arrival."""
        return self.last_token_s - self.arrival_s

    @property
    def queue_s(self) -> NDArray[np.float64]:
        """[n] wait for the first slot, prefill not counted."""
        return self.admitted_s - self.ready_s

    @property
    def attention_idle(self) -> float:
        """Share of the r workers' time without attention."""
        return 1.0 - self.totals.attention_s / (self.attention_per_ffn * self.end_s)

    @property
    def ffn_idle(self) -> float:
        """Share of the FFN server's time without work."""
        return 1.0 - self.totals.ffn_s / self.end_s

    @property
    def tokens_per_s_per_instance(self) -> float:
        """Tokens made per second and unit of price, of the whole model."""
        return self.totals.tokens / (self.bundle.price(self.attention_per_ffn) * self.end_s)
