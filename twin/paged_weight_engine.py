"""Continuous batching on simulated time, in one arena with expert weights whose widths may move.

One event is one engine step. At its boundary widths commit and the policy speaks, then the running
sequences get their tokens and pages (``paged_weight_batch``). The runtime's engine does the same
on devices.

    boundary t --- step t computes --- boundary t+1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import simpy
from simpy.events import Event

from models.workload import OpenLoopRequests
from policies.weight_page_history import Event as PageEvent
from traces.decisions import DecisionLog
from twin.clock import call_at, cyclic_collector_off
from twin.paged_weight_batch import RunningBatch
from twin.paged_weight_log import PagedWeightRun, Series, Totals
from twin.paged_weight_model import PagedWeightModel
from twin.paged_weight_moving import MovingWeights
from twin.paged_weight_weights import FixedWeights, Weights

NUM_SAMPLES = 1000
IDLE_TICK_S = 0.02
MAX_STALLED_BOUNDARIES = 100_000
_PROGRESS_EVERY = 256


class PagedWeightEngine:
    """One engine, its queue, and the requests of one run.

    Attributes:
        weights: Expert weights, with the arena's ledger.
        batch: Running and waiting sequences.
        totals: Sums so far.
    """

    def __init__(
        self,
        model: PagedWeightModel,
        weights: Weights,
        requests: OpenLoopRequests,
        *,
        policy: str,
        horizon_s: float | None = None,
        on_progress: Callable[[int], None] | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        """Nothing has arrived yet.

        Args:
            model: Sizes and times.
            weights: Expert weights, with the arena's ledger.
            requests: In order of arrival; a prompt of 0 tokens counts as 1.
            policy: Name for the report.
            horizon_s: No step starts after it; None: until all requests are done.
            on_progress: Told now and then how many requests are done.
            log: Of the batching policy's decisions.
        """
        self.weights, self.totals = weights, Totals()
        self._model, self._policy, self._time = model, policy, model.time
        self._arrival_s, self._output = requests.arrival_s, requests.output_tokens
        self._prompt = np.maximum(requests.prompt_tokens, 1)
        self._horizon_s = math.inf if horizon_s is None else horizon_s
        self._on_progress = on_progress
        self.batch = RunningBatch(
            self._prompt,
            self._output,
            ledger=weights.ledger,
            kv=model.time.kv,
            page_bytes=model.page_bytes,
            max_running=model.scenario.serving.max_running,
            prefill_tokens=model.scenario.serving.prefill_tokens,
            totals=self.totals,
            log=log,
        )
        count = len(self._arrival_s)
        self._admitted_s = np.full(count, np.nan)
        self._first_token_s = np.full(count, np.nan)
        self._last_token_s = np.full(count, np.nan)
        self._next_arrival = self._done = self._stalled = self._step = 0
        self._now = self._due_s = 0.0
        self._env = simpy.Environment()
        span = float(self._arrival_s[-1]) if count else 0.0
        self._series = Series(max(min(span, self._horizon_s) / NUM_SAMPLES, 1e-3))

    def run(self) -> PagedWeightRun:
        """Serve all requests, or up to the horizon.

        Raises:
            RuntimeError: If sequences wait for ever.
        """
        self._at(0.0)
        with cyclic_collector_off():
            self._env.run()
        moving = self.weights if isinstance(self.weights, MovingWeights) else None
        return PagedWeightRun(
            policy=self._policy,
            arrival_s=self._arrival_s,
            prompt_tokens=self._prompt,
            output_tokens=self._output,
            admitted_s=self._admitted_s,
            first_token_s=self._first_token_s,
            last_token_s=self._last_token_s,
            preemptions=self.batch.preemptions,
            is_refused=self.batch.is_refused,
            end_s=self._now,
            totals=self.totals,
            series=self._series.columns(),
            decisions=moving.decisions if moving else {},
            faults=moving.table.faults.counts if moving else {},
            moved_bytes=moving.moved_bytes if moving else 0,
            wasted_bytes=moving.wasted_bytes if moving else 0,
            arena_pages=self.weights.ledger.num_pages,
            page_bytes=self._model.page_bytes,
        )

    # --- time ---

    def _at(self, due_s: float) -> None:
        self._due_s = due_s
        call_at(self._env, due_s, self._boundary)

    def _boundary(self, event: Event) -> None:
        now = self._now = self._due_s
        self._finish_step()
        self._arrive()
        if now >= self._horizon_s:
            return
        batch, weights, step = self.batch, self.weights, self._step
        weights.boundary(step, batch.forecast_pages, now=now)
        tokens = batch.schedule(self._make_room, now=now)
        for sequence in batch.admitted:
            if math.isnan(self._admitted_s[sequence]):
                self._admitted_s[sequence] = now
        if self._series.is_due(now):
            self._sample()
        self._step += 1
        if tokens == 0:
            self._sleep()
            return
        self._stalled = 0
        seconds = self._step_seconds(tokens)
        weights.step_built(step, tokens)
        self._count_step(tokens, seconds)
        self._at(now + seconds)

    def _sleep(self) -> None:
        """Nobody can run: until the next arrival, or as long as widths may still move."""
        self.totals.idle_boundaries += 1
        is_stuck = not self.batch.is_empty
        self._stalled = self._stalled + 1 if is_stuck else 0
        if self._stalled > MAX_STALLED_BOUNDARIES:
            raise RuntimeError(
                f"nothing could run for {MAX_STALLED_BOUNDARIES:,} boundaries up to {self._now:g} s"
            )
        arrival = math.inf
        if self._next_arrival < len(self._arrival_s):
            arrival = float(self._arrival_s[self._next_arrival])
        if is_stuck or (self.weights.wakeup_s() is not None and arrival < math.inf):
            self._at(min(max(arrival, self._now), self._now + IDLE_TICK_S))
        elif arrival < math.inf:
            self._at(max(arrival, self._now))

    def _make_room(self, pages_needed: int, is_alone: bool) -> bool:
        """Drops; for a sequence that would end otherwise those of hot experts as well."""
        ask = partial(
            self.weights.allocation_failed,
            self._step,
            pages_needed,
            self.batch.forecast_pages,
            now=self._now,
        )
        return ask() or (is_alone and ask(keeps_hot=False))

    # --- requests ---

    def _arrive(self) -> None:
        arrivals, at = self._arrival_s, self._next_arrival
        while at < len(arrivals) and arrivals[at] <= self._now:
            self.batch.arrive(at, now=self._now)
            at += 1
        self._next_arrival = at

    def _finish_step(self) -> None:
        """Tokens of the step that ends now."""
        if not len(self.batch.ids):
            return
        spoke, finished = self.batch.finish(now=self._now)
        if not len(spoke):
            return
        weights = self.weights
        self.totals.generated_tokens += len(spoke)
        self.totals.bits_tokens += weights.mean_bits * len(spoke)
        self.totals.damage_tokens += weights.damage * len(spoke)
        fresh = spoke[np.isnan(self._first_token_s[spoke])]
        self._first_token_s[fresh] = self._now
        if len(finished):
            self._last_token_s[finished] = self._now
            before, self._done = self._done, self._done + len(finished)
            if self._on_progress and before // _PROGRESS_EVERY != self._done // _PROGRESS_EVERY:
                self._on_progress(self._done)

    # --- seconds and sums ---

    def _step_seconds(self, tokens: int) -> float:
        time, slowdown, batch = self._time, self.weights.slowdown, self.batch
        works = batch.count > 0
        held, added = batch.computed[works], batch.count[works]
        outputs = int((held + added == batch.known[works]).sum())
        flops = 0.0
        if tokens > len(added):  # decoding alone is bound by bytes
            for at in np.flatnonzero(added > 1).tolist():
                flops += time.attention_flops(int(held[at]), int(added[at]))
        return (
            time.fixed_seconds
            + self.weights.expert_seconds(tokens)
            + time.dense_seconds(tokens, outputs, slowdown=slowdown)
            + time.attention_seconds(time.kv_read_bytes(held, added), flops, slowdown=slowdown)
        )

    def _count_step(self, tokens: int, seconds: float) -> None:
        totals, weights, batch = self.totals, self.weights, self.batch
        bits = weights.mean_bits
        totals.steps += 1
        totals.busy_s += seconds
        totals.computed_tokens += tokens
        totals.kv_tokens_peak = max(totals.kv_tokens_peak, int(batch.computed.sum()) + tokens)
        totals.kv_pages_peak = max(totals.kv_pages_peak, weights.ledger.held_pages("kv"))
        totals.running_peak = max(totals.running_peak, len(batch.ids))
        totals.running_s += seconds * len(batch.ids)
        totals.bits_s += seconds * bits
        totals.damage_s += seconds * weights.damage
        totals.least_bits = min(totals.least_bits, bits)

    def _sample(self) -> None:
        ledger, weights, batch = self.weights.ledger, self.weights, self.batch
        self._series.add(
            (
                self._now,
                weights.mean_bits,
                weights.damage,
                ledger.held_pages("weights"),
                ledger.held_pages("kv"),
                ledger.free_pages,
                float(batch.computed.sum()),
                len(batch.ids),
                batch.num_waiting,
                float(weights.slowdown > 1.0),
            )
        )


def weights_of(
    model: PagedWeightModel,
    policy: str | int,
    replication: int,
    *,
    history: Callable[[PageEvent], None] | None = None,
    log: DecisionLog | None = None,
) -> FixedWeights | MovingWeights:
    """Weights under a planner's name, or of a fixed width.

    Args:
        model: Of the scenario.
        policy: A planner, or 2..8 or 16.
        replication: Which independent repetition.
        history: Told every event of the pages.
        log: Of the policy's decisions; a fixed width decides nothing.

    Raises:
        DoesNotFitError: If the weights are larger than the arena.
    """
    if isinstance(policy, int):
        return FixedWeights(model, policy, replication, history=history)
    return MovingWeights(model, policy, replication, history=history, log=log)
