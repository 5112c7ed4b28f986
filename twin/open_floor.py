"""What happens at a step boundary of a bundle with arrivals, whatever the order of its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from simpy.events import Event

from policies.routing import RoutingPolicy
from twin.admission import AdmissionLine, RequestTable
from twin.clock import call_at
from twin.fault_effects import FaultEffects
from twin.open_log import GapCounter, SeriesPoint, SeriesSampler
from twin.open_slots import OpenPool
from twin.stages import StageInterval, StageTimes

_PROGRESS_STEPS = 4096


@dataclass(slots=True)
class Totals:
    """Sums over a run.

    Attributes:
        steps: Steps of microbatches that ended.
        tokens: Tokens made.
        slot_s: Seconds that slots were filled, of all slots together.
        completed: Requests that got their last token.
        attention_s: Seconds of attention, of all workers together.
        ffn_s: Seconds the FFN server worked.
        link_s: Seconds the link was taken.
        barrier_wait_s: Slowest minus mean attention worker, over all stages.
        fault_s: By how much slow, jittery and paused workers made stages (pingpong) or cycles
            (barrier) longer.
        retried_tokens: Prompt and generated tokens of requests that lost their worker.
        retry_wait_s: From losing a worker to the next token, over all retries.
    """

    steps: int = 0
    tokens: int = 0
    slot_s: float = 0.0
    completed: int = 0
    attention_s: float = 0.0
    ffn_s: float = 0.0
    link_s: float = 0.0
    barrier_wait_s: float = 0.0
    fault_s: float = 0.0
    retried_tokens: int = 0
    retry_wait_s: float = 0.0


class OpenFloor:
    """Pools, the line before them, and the clock; the order of stages is the engines' matter.

    Attributes:
        env: SimPy's clock.
        times: Stage seconds.
        pools: One per microbatch.
        effects: Faults, or None.
        totals: Sums so far.
        timeline: Stage intervals of the first ``timeline_steps`` steps.
        last_s: Latest instant anything happened.
    """

    def __init__(
        self,
        times: StageTimes,
        table: RequestTable,
        policy: RoutingPolicy,
        *,
        effects: FaultEffects | None,
        horizon_s: float,
        on_progress: Callable[[int], None] | None,
        timeline_steps: int,
    ) -> None:
        bundle, r = times.bundle, times.attention_per_ffn
        self.env = simpy.Environment()
        self.times = times
        self.table = table
        self.line = AdmissionLine(table)
        self.pools = [
            OpenPool(table, r, bundle.batch_per_worker) for _ in range(bundle.microbatches)
        ]
        self.effects = effects
        self.totals = Totals()
        self.gaps = GapCounter()
        self.series = SeriesSampler()
        self.timeline: list[StageInterval] = []
        self.last_s = 0.0
        self._policy = policy
        self._horizon_s = horizon_s
        self._on_progress = on_progress
        self._timeline_steps = timeline_steps

    def call_at(self, due_s: float, callback: Callable[[Event], Any]) -> None:
        """Go on at ``due_s``, unless the run is over by then."""
        if due_s <= self._horizon_s:
            self.last_s = due_s
            call_at(self.env, due_s, callback)

    def wake_s(self, now: float) -> float:
        """When an empty microbatch has work again; infinity for never."""
        if len(self.line) and self.effects is not None:
            return self.effects.next_return_s(now)
        return self.line.next_ready_s()

    def meet_boundary(self, pool: OpenPool, now: float) -> bool:
        """End the step under way, let requests in; whether there is anything to do."""
        ended = (now - pool.begun_s, max(pool.loads)) if pool.is_running else None
        if ended:
            self._finish_step(pool, now, ended[0])
        if self.effects is not None and self.effects.has_losses:
            self._meet_presence(pool, self.effects, now)
        waiting = self.line.open_until(now)
        if waiting:
            self._admit(pool, waiting, now)
        pool.begun_s = now
        pool.is_running = pool.num_live > 0
        if ended and self.series.is_due():
            self._sample(now, *ended)
        return pool.is_running

    def wants_timeline(self) -> bool:
        """Whether the step that begins now is to be drawn."""
        return self.totals.steps < self._timeline_steps

    def _finish_step(self, pool: OpenPool, now: float, step_s: float) -> None:
        made = pool.finish_step(now)
        totals = self.totals
        totals.steps += 1
        totals.tokens += made.tokens
        totals.slot_s += step_s * made.tokens
        totals.completed += made.completed
        if made.continuing:
            self.gaps.add(step_s, made.continuing)
        for gap_s in made.resumed_gaps_s:
            self.gaps.add(gap_s, 1)
            totals.retry_wait_s += gap_s
        if self._on_progress is not None and totals.steps % _PROGRESS_STEPS == 0:
            self._on_progress(totals.completed)

    def _sample(self, now: float, step_s: float, max_load_tokens: int) -> None:
        totals = self.totals
        point = SeriesPoint(
            time_s=now,
            queue_length=len(self.line),
            live_slots=sum(pool.num_live for pool in self.pools),
            load_tokens=sum(sum(pool.loads) for pool in self.pools),
            max_load_tokens=max_load_tokens,
            step_s=step_s,
            tokens=totals.tokens,
            slot_s=totals.slot_s,
            attention_s=totals.attention_s,
            ffn_s=totals.ffn_s,
            barrier_wait_s=totals.barrier_wait_s,
        )
        self.series.points.append(point)

    def _meet_presence(self, pool: OpenPool, effects: FaultEffects, now: float) -> None:
        for worker, here in enumerate(pool.present):
            lost = effects.is_lost(worker, now)
            if here and lost:
                for request in pool.lose(worker, now):
                    self.totals.retried_tokens += request.prompt_tokens
                    self.line.come_back(request)
            elif not here and not lost:
                pool.present[worker] = True

    def _admit(self, pool: OpenPool, waiting: int, now: float) -> None:
        free = pool.free_slots()
        count = min(waiting, sum(free))
        if count == 0:
            return
        returned, fresh = self.line.take(count)
        prompts = self.table.prompts_array[fresh.start : fresh.stop]
        if returned:
            again = [request.prompt_tokens for request in returned]
            prompts = np.concatenate((np.array(again, dtype=np.int64), prompts))
        order = self._policy.assign(
            prompts, free_slots=np.array(free), token_loads=np.array(pool.loads), now=now
        )
        pool.admit(returned, fresh, order.workers.tolist(), now)
        if min(pool.free_slots()) < 0:
            raise RuntimeError(f"{type(self._policy).__name__} uses more slots than are free")
