"""Drives an engine in this process with the requests of a replay.

One thread: between two steps, what has fallen due is handed over; with nothing to compute it sleeps
no longer than until the next request, or until copies of weights want a boundary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runtime.clock import RunClock
from runtime.engine.core import EngineCore
from runtime.engine.frames import NewSequence, Sampling, SequenceOutput
from runtime.engine.parts import EngineParts
from runtime.replay_arrivals import ReplayArrivals
from runtime.replay_prompts import ReplayPrompts
from runtime.replay_requests import NOBODY, ReplayRequests
from runtime.replay_run import ReplayFates, ReplayRun, Series, Totals

STARVED_WAIT_S: Final = 0.001
MOVING_TICK_S: Final = 0.02
IDLE_TICK_S: Final = 0.25
MAX_FAILED_STEPS: Final = 20  # in a row
Show = Callable[[float, float], None]


class EngineReplay:
    """One replay on one engine, which must not have computed anything yet.

    Attributes:
        fates, series, totals: See ``ReplayRun``.
        core: The engine.
        narrowest_bits: [blocks] widths when their mean was smallest; empty if they never shrank.
    """

    def __init__(
        self,
        parts: EngineParts,
        requests: ReplayRequests,
        prompts: ReplayPrompts,
        arrivals: ReplayArrivals,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        settle_s: float = 0.0,
    ) -> None:
        """Take the engine over.

        Args:
            parts: Of the engine.
            requests, prompts, arrivals: What is asked, and when.
            temperature: Of sampling; 0: the likeliest token.
            seed: Of sampling.
            settle_s: Seconds at the end in which boundaries go on, at most: widths come back.
        """
        self._parts, self._requests, self._prompts = parts, requests, prompts
        self._arrivals, self._temperature, self._seed = arrivals, temperature, seed
        self._settle_s = settle_s
        self.fates = ReplayFates(len(requests))
        self.series, self.totals = Series(), Totals()
        self._clock = RunClock()
        parts.clock = self._clock  # times of the decision log are those of the requests
        self.core = EngineCore(parts)
        self._seen_bits: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._quality = (0.0, 0.0)
        self.narrowest_bits: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._failed_in_a_row = 0

    def run(
        self,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
        show: Show = lambda done, total: None,
    ) -> ReplayRun:
        """Serve everything, or until ``is_stopped`` says so between two steps."""
        core, arrivals, total = self.core, self._arrivals, len(self._requests)
        self.totals.first_bits = self.totals.least_bits = self._look()[0]
        left = total
        while left and not is_stopped():
            now = self._clock()
            for request in arrivals.take(now):
                self._add(request)
            if core.has_work:
                ended = self._step()
                left -= ended
                if ended:
                    show(total - left, total)
            else:
                core.idle()
                self._sample(self._clock())
                self._sleep(now)
        end_s = self._clock()
        self._sample(end_s, is_last=True)
        self._settle(is_stopped)
        self.totals.last_bits = self._look()[0]
        return ReplayRun(
            arrival_s=arrivals.due_s,
            fates=self.fates,
            end_s=end_s,
            series=self.series,
            totals=self.totals,
            counters=self._counters(),
            was_stopped=left > 0,
        )

    # --- requests ----------------------------------------------------------------------------

    def _add(self, request: int) -> None:
        session = int(self._requests.session[request])
        self.fates.added_s[request] = self._clock()
        self.core.add(
            NewSequence(
                sequence_id=str(request),
                prompt=self._prompts.of(request),
                sampling=Sampling(
                    max_tokens=int(self._requests.output_tokens[request]),
                    temperature=self._temperature,
                    seed=self._seed + request,
                    ignore_eos=True,
                ),
                session="" if session == NOBODY else str(session),
            )
        )

    def _step(self) -> int:
        """One step; how many requests ended with it."""
        core, totals = self.core, self.totals
        began_s, failed = self._clock(), core.counts.failed_steps
        preempted = core.counts.preemptions
        outputs = core.step()
        now = self._clock()
        if core.counts.preemptions > preempted and math.isnan(totals.first_preemption_s):
            totals.first_preemption_s = began_s
            totals.bits_at_first_preemption = self._look()[0]
        is_failing = core.counts.failed_steps > failed
        self._failed_in_a_row = self._failed_in_a_row + 1 if is_failing else 0
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            message = f"the engine ends after {MAX_FAILED_STEPS} failed steps in a row"
            outputs += core.fail_all(message)
        ended = [int(output.sequence_id) for output in outputs if self._hear(output, now)]
        self._account(now, now - began_s, ended)
        if core.is_starved:
            time.sleep(STARVED_WAIT_S)
        return len(ended)

    def _hear(self, output: SequenceOutput, now: float) -> bool:
        """Note what came; whether the request has ended."""
        request, fates = int(output.sequence_id), self.fates
        fates.spoke(request, len(output.tokens), now)
        if output.cached_tokens:
            fates.cached_tokens[request] = output.cached_tokens
        if output.finish_reason is None:
            return False
        fates.preemptions[request] = output.preemptions
        if output.finish_reason == "error":
            fates.errors[request] = output.error or "error"
        else:
            fates.last_token_s[request] = now
        if output.times is not None:
            fates.admitted_s[request] = fates.added_s[request] + output.times.queue_s
        self._arrivals.ended(request, now)
        return True

    # --- time --------------------------------------------------------------------------------

    def _sleep(self, now: float) -> None:
        """Until the next request or boundary."""
        mover, next_s = self._parts.mover, self._arrivals.next_s
        wait_s = IDLE_TICK_S if mover is None or mover.at_rest else MOVING_TICK_S
        if next_s is not None:
            wait_s = min(wait_s, max(0.0, next_s - now))
        if wait_s > 0.0:
            time.sleep(wait_s)

    def _settle(self, is_stopped: Callable[[], bool]) -> None:
        """Boundaries without steps, until widths are back or the time for it is over."""
        control, mover = self._parts.control, self._parts.mover
        until_s = self._clock() + self._settle_s
        if control is None or mover is None:
            return
        while self._clock() < until_s and not is_stopped():
            self.core.idle()
            self._sample(self._clock())
            if mover.at_rest and self._look()[0] >= self.totals.first_bits:
                return
            time.sleep(STARVED_WAIT_S)

    # --- numbers -----------------------------------------------------------------------------

    def _look(self) -> tuple[float, float]:
        """Mean bits and damage; computed only when a width has changed."""
        mover = self._parts.mover
        if mover is None:
            return 0.0, 0.0
        bits = mover.tables.bits
        if not np.array_equal(bits, self._seen_bits):
            self._seen_bits = bits.copy()
            self._quality = self._parts.quality()
        return self._quality

    def _account(self, now: float, took_s: float, ended: list[int]) -> None:
        """Sums of a step; those that ended with it ran in it, and held their tokens."""
        totals, accounts = self.totals, self._parts.accounts
        bits, damage = self._look()
        running = len(accounts.ids) + len(ended)
        kv_tokens = int(accounts.computed.sum()) + self._held_by(ended)
        kv_pages = self._parts.arena.ledger.held_pages("kv")
        totals.steps += not self.core.is_starved
        totals.busy_s += took_s
        totals.running_s += took_s * running
        totals.bits_s += took_s * bits
        totals.damage_s += took_s * damage
        totals.running_peak = max(totals.running_peak, running)
        totals.kv_pages_peak = max(totals.kv_pages_peak, kv_pages)
        totals.kv_tokens_peak = max(totals.kv_tokens_peak, kv_tokens)
        if bits < totals.least_bits:
            totals.least_bits = bits
            self.narrowest_bits = self._seen_bits  # replaced, never written
        self._sample(now)

    def _held_by(self, ended: list[int]) -> int:
        """Tokens that whole answers held at their end: all but the last, which none follows."""
        whole = [request for request in ended if not self.fates.errors[request]]
        prompts, generated = self._requests.prompt_tokens, self.fates.generated_tokens
        return int((prompts[whole] + generated[whole] - 1).sum())

    def _sample(self, now: float, *, is_last: bool = False) -> None:
        if not is_last and not self.series.is_due(now):
            return
        parts, counts = self._parts, self.core.counts
        accounts, use = parts.accounts, parts.arena.use()
        bits, damage = self._look()
        loading = int((accounts.loading > 0).sum())
        self.series.add(
            (
                now,
                bits,
                damage,
                use.weight_pages,
                use.kv_pages,
                use.free_pages,
                int(accounts.computed.sum()),
                len(accounts.ids) - loading,
                accounts.num_waiting,
                float(parts.mover is not None and not parts.mover.at_rest),
                loading,
                counts.steps,
                counts.generated_tokens,
                counts.cached_tokens,
                counts.preemptions,
            )
        )

    def _counters(self) -> dict[str, float | dict[str, float]]:
        stats = self.core.stats()
        found: dict[str, float | dict[str, float]] = {
            name: getattr(stats, name)
            for name in stats.__struct_fields__
            if isinstance(getattr(stats, name), int | float)
        }
        found["planner_moves"] = {k: float(v) for k, v in stats.planner_moves_total.items()}
        found["store"] = dict(stats.store)
        found["held_back"] = self.core.counts.held_back
        return found
