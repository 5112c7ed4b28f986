"""Always-full slots on SimPy's clock under the barrier: the engine faster ones must equal."""

from __future__ import annotations

from collections.abc import Sequence

import simpy
from simpy.events import Event

from twin.clock import call_at
from twin.cycle_log import FaultyCycle
from twin.fault_effects import FaultEffects
from twin.saturated_plan import SaturatedPlan, meet_presence
from twin.stages import StageInterval


class BarrierCycles:
    """Microbatches in rotation, every cycle as long as its slowest stage; one event a cycle."""

    def __init__(self, env: simpy.Environment, plan: SaturatedPlan) -> None:
        self._env = env
        self._plan = plan
        self._alpha = plan.times.bundle.coefficients.alpha_attention
        self._beta = plan.times.bundle.coefficients.beta_attention
        self._layers = plan.times.layers_each
        full = sum(plan.pools[0].live)
        self._floor_s = self._longest_shared_stage_s(full, plan.pools[0].live[0])
        self._cycle = 0
        self._pool = plan.pools[0]
        self._cycle_s = 0.0
        self._previous_end_s = 0.0
        self._end_s = 0.0
        self._faulty: FaultyCycle | None = None

    def start(self) -> None:
        """Begin the first cycle at instant 0."""
        self._begin()

    def _begin(self, _event: Event | None = None) -> None:
        plan = self._plan
        if self._cycle == plan.log.num_cycles:
            return
        self._pool = plan.pools[self._cycle % len(plan.pools)]
        if plan.effects is not None:
            if not self._begin_with_faults(plan.effects):
                return
        else:
            slowest_s = self._alpha * max(self._pool.loads) + self._beta
            self._cycle_s = slowest_s if slowest_s > self._floor_s else self._floor_s
            if self._cycle < plan.timeline_cycles:
                spans_s = [s * self._layers for s in plan.attention_s(self._pool)]
                self._note_intervals(spans_s, self._end_s)
            self._end_s += self._cycle_s * self._layers
        call_at(self._env, self._end_s, self._finish)

    def _finish(self, _event: Event) -> None:
        loads = self._pool.loads
        completed = self._pool.finish_step(self._end_s)
        self._plan.log.note(self._cycle, self._end_s, self._cycle_s, loads, completed, self._faulty)
        self._cycle += 1
        self._previous_end_s = self._end_s
        self._begin()

    def _begin_with_faults(self, effects: FaultEffects) -> bool:
        """Work out the cycle's end; False if nobody is there, and the cycle begins later."""
        pool, begin_s, layers = self._pool, self._end_s, self._layers
        if not meet_presence(pool, effects, begin_s):
            self._end_s = effects.next_return_s(begin_s)
            call_at(self._env, self._end_s, self._begin)
            return False
        healthy_s = self._plan.attention_s(pool)
        spans_s = [s * layers for s in healthy_s]
        for worker in effects.stretched:
            if spans_s[worker] > 0.0:
                spans_s[worker] = effects.finish_s(worker, begin_s, spans_s[worker]) - begin_s
        live, present = sum(pool.live), sum(map(bool, pool.live))
        floor_s = self._longest_shared_stage_s(live, max(pool.live))
        if self._cycle < self._plan.timeline_cycles:
            self._note_intervals(spans_s, begin_s)
        self._end_s = begin_s + max(max(spans_s), floor_s * layers)
        self._cycle_s = (self._end_s - self._previous_end_s) / layers
        self._faulty = FaultyCycle(
            attention_max_s=max(spans_s) / layers,
            attention_mean_s=sum(spans_s) / (present * layers),
            healthy_cycle_s=max(max(healthy_s), floor_s),
            live_slots=live,
            workers_present=present,
        )
        return True

    def _longest_shared_stage_s(self, live_slots: int, fullest_worker: int) -> float:
        times = self._plan.times
        return max(times.round_trip_s(live_slots, fullest_worker), times.ffn_s(live_slots))

    def _note_intervals(self, spans_s: Sequence[float], begin_s: float) -> None:
        times, live = self._plan.times, self._pool.live
        microbatch = self._cycle % len(self._plan.pools)
        shared = (
            ("link", "transfer", times.round_trip_s(sum(live), max(live)) * self._layers),
            ("ffn", "ffn", times.ffn_s(sum(live)) * self._layers),
        )
        attention = [(f"attention {j}", "attention", span_s) for j, span_s in enumerate(spans_s)]
        for lane, stage, span_s in (*attention, *shared):
            if span_s > 0.0:
                self._plan.timeline.append(
                    StageInterval(lane, begin_s, begin_s + span_s, microbatch, stage)
                )
