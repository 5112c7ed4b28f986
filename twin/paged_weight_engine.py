"""Continuous batching on simulated time, in one arena with expert weights whose widths may move.

One event is one engine step. At its boundary: widths commit and the policy speaks; every running
sequence gets pages for its next tokens, in order of admission; waiting prompts are admitted while
there is a place and prefill left in the step. Pages that cannot be had make the policy drop bits at
once, and the sequence waits a step; if every block is at its floor, the youngest sequence gives its
pages up and is computed again later. The runtime's decode loop does the same on devices.

    boundary t --- step t computes --- boundary t+1
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import Event

from policies.precision_forecast import HORIZON_STEPS, forecast_kv_pages
from policies.weight_page_history import Event as PageEvent
from traces.decisions import DecisionLog
from twin.clock import call_at, cyclic_collector_off
from twin.paged_weight_cache import KvPages
from twin.paged_weight_log import PagedWeightRun, Series, Totals
from twin.paged_weight_model import PagedWeightModel
from twin.paged_weight_weights import FixedWeights, MovingWeights, Weights
from twin.workload import OpenLoopRequests

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_SAMPLES = 1000
IDLE_TICK_S = 0.02
MAX_STALLED_BOUNDARIES = 100_000
_PROGRESS_EVERY = 256


class PagedWeightEngine:
    """One engine, its queue, and the requests of one run."""

    def __init__(
        self,
        model: PagedWeightModel,
        weights: Weights,
        requests: OpenLoopRequests,
        *,
        policy: str,
        horizon_s: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Nothing has arrived yet.

        Args:
            model: Sizes and times.
            weights: Expert weights, with the arena's ledger.
            requests: In order of arrival; a prompt of 0 tokens counts as 1.
            policy: Name for the report.
            horizon_s: No step starts after it; None: until all requests are done.
            on_progress: Told now and then how many requests are done.
        """
        self.model, self.weights, self.policy = model, weights, policy
        self._ledger = weights.ledger
        serving = model.scenario.serving
        self._max_running, self._prefill = serving.max_running, serving.prefill_tokens
        self._cache = KvPages(self._ledger, model.time.kv, page_bytes=model.page_bytes)
        self._horizon_s = math.inf if horizon_s is None else horizon_s
        self._on_progress = on_progress
        self._arrival_s = requests.arrival_s
        self._prompt = np.maximum(requests.prompt_tokens, 1)
        self._output = requests.output_tokens
        count = len(self._arrival_s)
        self._goal = self._prompt + self._output
        self._known = self._prompt.copy()  # tokens there are: prompt and generated
        self.admitted_s = np.full(count, np.nan)
        self.first_token_s = np.full(count, np.nan)
        self.last_token_s = np.full(count, np.nan)
        self.preemptions = np.zeros(count, np.int64)
        self.is_refused = np.zeros(count, np.bool_)
        self._waiting: deque[int] = deque()
        self._next_arrival = 0
        # running sequences in order of admission
        self._ids = np.zeros(0, np.int64)
        self._computed = np.zeros(0, np.int64)
        self._count = np.zeros(0, np.int64)  # tokens of each in the step under way
        self.totals = Totals()
        self.step = 0
        self.now = 0.0
        self._done = self._stalled = 0
        self._env = simpy.Environment()
        span = float(self._arrival_s[-1]) if count else 0.0
        self._series = Series(max(min(span, self._horizon_s) / NUM_SAMPLES, 1e-3))

    def run(self) -> PagedWeightRun:
        """Serve all requests, or up to the horizon."""
        self._at(0.0)
        with cyclic_collector_off():
            self._env.run()
        weights = self.weights
        moving = weights if isinstance(weights, MovingWeights) else None
        return PagedWeightRun(
            policy=self.policy,
            arrival_s=self._arrival_s,
            prompt_tokens=self._prompt,
            output_tokens=self._output,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            preemptions=self.preemptions,
            is_refused=self.is_refused,
            end_s=self.now,
            totals=self.totals,
            series=self._series.columns(),
            decisions=moving.decisions if moving else {},
            faults=moving.table.faults.counts if moving else {},
            moved_bytes=moving.moved_bytes if moving else 0,
            wasted_bytes=moving.wasted_bytes if moving else 0,
            arena_pages=self._ledger.num_pages,
            page_bytes=self.model.page_bytes,
        )

    # --- time ---

    def _at(self, due_s: float) -> None:
        self._due_s = due_s
        call_at(self._env, due_s, self._boundary)

    def _boundary(self, event: Event) -> None:
        self.now = self._due_s
        self._finish_step()
        self._arrive()
        if self.now >= self._horizon_s:
            return
        self.weights.boundary(self.step, self._forecast_pages, now=self.now)
        tokens = self._schedule()
        if self._series.is_due(self.now):
            self._sample()
        self.step += 1
        if tokens:
            self._stalled = 0
            seconds = self._step_seconds(tokens)
            self.weights.step_built(self.step - 1, tokens)
            self._count_step(tokens, seconds)
            self._at(self.now + seconds)
        else:
            self.totals.idle_boundaries += 1
            self._sleep()

    def _sleep(self) -> None:
        """Nobody can run: until the next arrival, or as long as widths may still move."""
        busy = len(self._ids) > 0 or len(self._waiting) > 0
        self._stalled = self._stalled + 1 if busy else 0
        if self._stalled > MAX_STALLED_BOUNDARIES:
            raise RuntimeError(
                f"nothing could run for {MAX_STALLED_BOUNDARIES:,} boundaries up to {self.now:g} s"
            )
        wakeup = self.weights.wakeup_s()
        arrival = math.inf
        if self._next_arrival < len(self._arrival_s):
            arrival = float(self._arrival_s[self._next_arrival])
        if busy or (wakeup is not None and arrival < math.inf):
            self._at(min(max(arrival, self.now), self.now + IDLE_TICK_S))
        elif arrival < math.inf:
            self._at(max(arrival, self.now))

    # --- requests ---

    def _arrive(self) -> None:
        end = int(np.searchsorted(self._arrival_s, self.now, side="right"))
        self._waiting.extend(range(self._next_arrival, end))
        self._next_arrival = max(self._next_arrival, end)

    def _finish_step(self) -> None:
        """Tokens of the step that ends now."""
        if not self._count.any():
            return
        self._computed += self._count
        ids = self._ids
        speaks = (self._count > 0) & (self._computed == self._known[ids])
        self._count[:] = 0
        spoke = ids[speaks]
        if not len(spoke):
            return
        self._known[spoke] += 1
        self.totals.generated_tokens += len(spoke)
        weights = self.weights
        self.totals.bits_tokens += weights.mean_bits * len(spoke)
        self.totals.damage_tokens += weights.damage * len(spoke)
        fresh = spoke[np.isnan(self.first_token_s[spoke])]
        self.first_token_s[fresh] = self.now
        done = self._known[ids] >= self._goal[ids]
        if done.any():
            finished = ids[done]
            self.last_token_s[finished] = self.now
            for sequence in finished.tolist():
                self._cache.release(sequence)
            self._keep(~done)
            before, self._done = self._done, self._done + len(finished)
            if self._on_progress and before // _PROGRESS_EVERY != self._done // _PROGRESS_EVERY:
                self._on_progress(self._done)

    def _keep(self, mask: NDArray[np.bool_]) -> None:
        self._ids, self._computed = self._ids[mask], self._computed[mask]
        self._count = self._count[mask]

    # --- who computes what in this step ---

    def _schedule(self) -> int:
        """Set the tokens of every running sequence; returns their sum."""
        budget = self._shares()
        if self._cache.reserve_all(self._ids, self._computed, self._count):
            while budget > 0 and self._admit():
                known = int(self._known[self._ids[-1]])
                share = min(known, budget)
                self._count[-1] = share
                if not self._cache.reserve(int(self._ids[-1]), 0, share):
                    self._in_order(len(self._ids) - 1)
                    break
                budget -= share if known > 1 else 0
        else:
            self._in_order(0)
        return int(self._count.sum())

    def _shares(self) -> int:
        """One token for who decodes, prompts in order of admission; returns the prefill left."""
        left = self._known[self._ids] - self._computed
        np.minimum(left, 1, out=self._count)
        budget = self._prefill
        for at in np.flatnonzero(left > 1).tolist():
            share = min(int(left[at]), budget)
            self._count[at] = share
            budget -= share
        return budget

    def _admit(self) -> bool:
        if not self._waiting or len(self._ids) >= self._max_running:
            return False
        sequence = self._waiting.popleft()
        if math.isnan(self.admitted_s[sequence]):
            self.admitted_s[sequence] = self.now
        self._ids = np.append(self._ids, sequence)
        self._computed = np.append(self._computed, 0)
        self._count = np.append(self._count, 0)
        return True

    def _in_order(self, first: int) -> None:
        """Pages one sequence after the other; short of them, bits fall or the youngest leaves.

        Nobody is admitted in such a step.
        """
        at = first
        while at < len(self._ids):
            sequence, held, added = (
                int(column[at]) for column in (self._ids, self._computed, self._count)
            )
            self._cache.leave_behind(sequence, held)
            if added == 0 or self._cache.reserve(sequence, held, added):
                at += 1
                continue
            needed = int(
                self._cache.pages_needed(self._computed[at : at + 1], self._count[at : at + 1])[0]
            )
            if self.weights.allocation_failed(
                self.step, needed, self._forecast_pages, now=self.now
            ):
                self._count[at] = 0
                self.totals.held_back += 1
                at += 1
            else:
                self._preempt()

    def _preempt(self) -> None:
        """The youngest gives its pages up and waits again; alone, it can never be served."""
        victim = int(self._ids[-1])
        self.totals.recomputed_tokens += int(self._computed[-1])
        self._cache.release(victim)
        self._ids, self._computed = self._ids[:-1], self._computed[:-1]
        self._count = self._count[:-1]
        if len(self._ids):
            self.totals.preemptions += 1
            self.preemptions[victim] += 1
            self._waiting.appendleft(victim)
        else:
            self.is_refused[victim] = True

    def _forecast_pages(self) -> int:
        known = self._known[self._ids]
        return forecast_kv_pages(
            self.model.time.kv,
            held_tokens=self._computed,
            prompt_tokens_left=known - self._computed,
            decode_tokens_left=self._goal[self._ids] - known,
            horizon_steps=HORIZON_STEPS,
            page_bytes=self.model.page_bytes,
        )

    # --- seconds ---

    def _step_seconds(self, tokens: int) -> float:
        time, slowdown = self.model.time, self.weights.slowdown
        works = self._count > 0
        held, added = self._computed[works], self._count[works]
        outputs = int((held + added == self._known[self._ids[works]]).sum())
        flops = 0.0
        for at in np.flatnonzero(added > 1).tolist():
            flops += time.attention_flops(int(held[at]), int(added[at]))
        return (
            time.fixed_seconds
            + self.weights.expert_seconds(tokens)
            + time.dense_seconds(tokens, outputs, slowdown=slowdown)
            + time.attention_seconds(time.kv_read_bytes(held, added), flops, slowdown=slowdown)
        )

    def _count_step(self, tokens: int, seconds: float) -> None:
        totals, weights = self.totals, self.weights
        totals.steps += 1
        totals.busy_s += seconds
        totals.computed_tokens += tokens
        totals.kv_tokens_peak = max(totals.kv_tokens_peak, int(self._computed.sum()) + tokens)
        totals.kv_pages_peak = max(totals.kv_pages_peak, self._ledger.held_pages("kv"))
        totals.running_peak = max(totals.running_peak, len(self._ids))
        totals.running_s += seconds * len(self._ids)
        totals.bits_s += seconds * weights.mean_bits
        totals.damage_s += seconds * weights.damage
        totals.least_bits = min(totals.least_bits, weights.mean_bits)

    def _sample(self) -> None:
        ledger, weights = self._ledger, self.weights
        self._series.add(
            (
                self.now,
                weights.mean_bits,
                weights.damage,
                ledger.held_pages("weights"),
                ledger.held_pages("kv"),
                ledger.free_pages,
                float(self._computed.sum()),
                len(self._ids),
                len(self._waiting),
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
