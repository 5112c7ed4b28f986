"""Always-full slots on SimPy's clock, microbatches in flight: the engine faster ones must equal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import simpy
from simpy.events import Event

from twin.clock import call_at
from twin.cycle_log import FaultyCycle
from twin.pipeline import Attention, PingPongPipeline
from twin.saturated_plan import SaturatedPlan, meet_presence

FILLING = -1


class PingPongCycles:
    """Microbatches take turns on workers, link and FFN; two events a microbatch and layer.

    A step that is not noted comes first, on the loads of the first one: it fills the pipeline, so
    that every noted step lasts from one pass of its microbatch to the next. The last round is
    played to its end, although only ``num_cycles`` are noted: a microbatch that runs alone is
    faster than one among others.
    """

    def __init__(self, env: simpy.Environment, plan: SaturatedPlan) -> None:
        self._env = env
        self._plan = plan
        num_workers, m = len(plan.pools[0].live), len(plan.pools)
        self._pipeline = PingPongPipeline(num_workers, effects=plan.effects)
        self._layers = plan.times.layers_each
        self._step = [FILLING] * m
        self._layer = [0] * m
        self._attention_s: list[list[float]] = [[] for _ in range(m)]
        self._shared_s = [(0.0, 0.0, 0.0)] * m
        self._step_end_s = [0.0] * m
        self._undisturbed = _Undisturbed(num_workers, m) if plan.effects is not None else None

    def start(self) -> None:
        """All microbatches are at the workers at instant 0, in order of their number."""
        for microbatch in range(len(self._plan.pools)):
            self._begin_step(microbatch, 0.0)

    def _begin_step(self, microbatch: int, now: float, _event: Event | None = None) -> None:
        """Fix the stage times of the step: loads do not change within it."""
        plan, pool = self._plan, self._plan.pools[microbatch]
        if self._step[microbatch] * len(plan.pools) >= plan.log.num_cycles:
            return
        if plan.effects is not None and not meet_presence(pool, plan.effects, now):
            back_s = plan.effects.next_return_s(now)
            call_at(self._env, back_s, partial(self._begin_step, microbatch, back_s))
            return
        times, layers, live, fullest = plan.times, self._layers, sum(pool.live), max(pool.live)
        self._attention_s[microbatch] = [s * layers for s in plan.attention_s(pool)]
        self._shared_s[microbatch] = (
            times.one_way_s(live, fullest) * layers,
            times.round_trip_s(live, fullest) * layers,
            times.ffn_s(live) * layers,
        )
        self._attend(microbatch, now)

    def _attend(self, microbatch: int, arrived_s: float) -> None:
        attention_s = self._attention_s[microbatch]
        self._show(microbatch)
        attention = self._pipeline.attend(arrived_s, attention_s, microbatch)
        if self._undisturbed is not None:
            self._undisturbed.follow(microbatch, attention_s, self._shared_s[microbatch], attention)
        call_at(self._env, attention.ready_s, partial(self._serve, microbatch, attention.ready_s))

    def _serve(self, microbatch: int, ready_s: float, _event: Event) -> None:
        self._show(microbatch)
        arrived_s = self._pipeline.serve(ready_s, *self._shared_s[microbatch], microbatch)
        call_at(self._env, arrived_s, partial(self._arrive, microbatch, arrived_s))

    def _cycle(self, microbatch: int) -> int:
        return self._step[microbatch] * len(self._plan.pools) + microbatch

    def _show(self, microbatch: int) -> None:
        """Let the pipeline note the next stage where it belongs to the first cycles."""
        plan = self._plan
        if plan.timeline_cycles:
            is_shown = 0 <= self._cycle(microbatch) < plan.timeline_cycles
            self._pipeline.timeline = plan.timeline if is_shown else None

    def _arrive(self, microbatch: int, arrived_s: float, _event: Event) -> None:
        self._layer[microbatch] += 1
        if self._layer[microbatch] < self._plan.times.simulated_layers:
            self._attend(microbatch, arrived_s)
        else:
            self._finish_step(microbatch, arrived_s)
            self._begin_step(microbatch, arrived_s)

    def _finish_step(self, microbatch: int, now: float) -> None:
        plan, pool = self._plan, self._plan.pools[microbatch]
        cycle, is_filling = self._cycle(microbatch), self._step[microbatch] == FILLING
        layers = len(plan.pools) * plan.times.bundle.num_layers
        faulty = None
        if self._undisturbed is not None:
            faulty = self._undisturbed.finish_step(microbatch, pool.live, layers)
        if not is_filling and cycle < plan.log.num_cycles:
            cycle_s = (now - self._step_end_s[microbatch]) / layers
            loads = pool.loads
            plan.log.note(cycle, now, cycle_s, loads, pool.finish_step(now), faulty)
        self._step_end_s[microbatch] = now
        self._step[microbatch] += 1
        self._layer[microbatch] = 0


class _Undisturbed:
    """The same stages through a second pipeline without faults, and what faults made of them."""

    def __init__(self, num_workers: int, microbatches: int) -> None:
        self._pipeline = PingPongPipeline(num_workers)
        self._arrived_s = [0.0] * microbatches
        self._step_end_s = [0.0] * microbatches
        self._longest_s = [0.0] * microbatches
        self._sum_s = [0.0] * microbatches

    def follow(
        self,
        microbatch: int,
        attention_s: Sequence[float],
        shared_s: tuple[float, float, float],
        with_faults: Attention,
    ) -> None:
        """One layer of a microbatch."""
        u = microbatch
        attention = self._pipeline.attend(self._arrived_s[u], attention_s, u)
        self._arrived_s[u] = self._pipeline.serve(attention.ready_s, *shared_s, u)
        self._longest_s[u] += with_faults.longest_s
        self._sum_s[u] += with_faults.sum_s

    def finish_step(self, microbatch: int, live: Sequence[int], layers: int) -> FaultyCycle:
        """The step's row; ``layers``: microbatches times layers of the model."""
        u, present = microbatch, sum(map(bool, live))
        per_step = layers // len(self._arrived_s)
        row = FaultyCycle(
            attention_max_s=self._longest_s[u] / per_step,
            attention_mean_s=self._sum_s[u] / (per_step * present),
            healthy_cycle_s=(self._arrived_s[u] - self._step_end_s[u]) / layers,
            live_slots=sum(live),
            workers_present=present,
        )
        self._step_end_s[u] = self._arrived_s[u]
        self._longest_s[u] = self._sum_s[u] = 0.0
        return row
