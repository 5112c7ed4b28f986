"""Bundles with arrivals on SimPy's clock: microbatches in rotation, or in flight."""

from __future__ import annotations

import math
from functools import partial

from simpy.events import Event

from twin.open_floor import OpenFloor
from twin.open_slots import OpenPool
from twin.pipeline import PingPongPipeline
from twin.stages import StageInterval


class BarrierTurns:
    """One microbatch after the other, every cycle as long as its slowest stage.

    The layers of microbatches interleave, so the step of a microbatch ends where its next turn
    begins: its tokens are there then, and new requests join.
    """

    def __init__(self, floor: OpenFloor) -> None:
        self._floor = floor
        self._turn = 0
        c = floor.times.bundle.coefficients
        self._alpha, self._beta = c.alpha_attention, c.beta_attention
        self._layers = floor.times.layers_each

    def start(self) -> None:
        """Sleep until the first request."""
        self._sleep(0.0)

    def _sleep(self, now: float) -> None:
        wake_s = self._floor.wake_s(now)
        if wake_s < math.inf:
            self._floor.call_at(wake_s, partial(self._next_turn, wake_s))

    def _next_turn(self, now: float, _event: Event) -> None:
        pools = self._floor.pools
        for _ in pools:
            microbatch = self._turn
            self._turn = (microbatch + 1) % len(pools)
            if self._floor.meet_boundary(pools[microbatch], now):
                end_s = self._cycle_end_s(pools[microbatch], microbatch, now)
                self._floor.call_at(end_s, partial(self._next_turn, end_s))
                return
        self._sleep(now)

    def _cycle_end_s(self, pool: OpenPool, microbatch: int, now: float) -> float:
        """When the cycle that begins now ends; adds it to the totals."""
        floor, layers = self._floor, self._layers
        live = pool.num_live
        round_trip_s = floor.times.round_trip_s(live, max(pool.live)) * layers
        ffn_s = floor.times.ffn_s(live) * layers
        slowest_s = (self._alpha * max(pool.loads) + self._beta) * layers
        workers = len(pool.live) - pool.live.count(0)
        sum_s = (self._alpha * sum(pool.loads) + self._beta * workers) * layers
        shared_s = round_trip_s if round_trip_s > ffn_s else ffn_s
        healthy_s = cycle_s = slowest_s if slowest_s > shared_s else shared_s
        if floor.effects is not None or floor.wants_timeline():
            spans_s = self._spans_s(pool, now)
            slowest_s, sum_s = max(spans_s), sum(spans_s)
            cycle_s = max(slowest_s, shared_s)
            if floor.wants_timeline():
                self._note_intervals([*spans_s, round_trip_s, ffn_s], microbatch, now)
        totals = floor.totals
        totals.attention_s += sum_s
        totals.ffn_s += ffn_s
        totals.link_s += round_trip_s
        totals.barrier_wait_s += slowest_s - sum_s / workers
        totals.fault_s += cycle_s - healthy_s
        return now + cycle_s

    def _spans_s(self, pool: OpenPool, now: float) -> list[float]:
        """[r] seconds each worker takes, with faults; 0 without slots."""
        spans_s = attention_s(self._floor, pool)
        effects = self._floor.effects
        if effects is not None:
            for worker in effects.stretched:
                if spans_s[worker] > 0.0:
                    spans_s[worker] = effects.finish_s(worker, now, spans_s[worker]) - now
        return spans_s

    def _note_intervals(self, spans_s: list[float], microbatch: int, now: float) -> None:
        r = len(spans_s) - 2
        lanes = [(f"attention {j}", "attention") for j in range(r)]
        lanes += [("link", "transfer"), ("ffn", "ffn")]
        for (lane, stage), span_s in zip(lanes, spans_s, strict=True):
            if span_s > 0.0:
                self._floor.timeline.append(
                    StageInterval(lane, now, now + span_s, microbatch, stage)
                )


class PingPongTurns:
    """Microbatches take turns on workers, link and FFN; two events a microbatch and layer.

    An empty microbatch takes a request the moment it asks.
    """

    def __init__(self, floor: OpenFloor) -> None:
        self._floor = floor
        m = len(floor.pools)
        r = floor.times.attention_per_ffn
        self._pipeline = PingPongPipeline(r, effects=floor.effects, timeline=floor.timeline)
        self._layer = [0] * m
        self._attention_s: list[list[float]] = [[] for _ in range(m)]
        self._shared_s = [(0.0, 0.0, 0.0)] * m
        self._wake_s = math.inf

    def start(self) -> None:
        """Sleep until the first request."""
        self._sleep(0.0)

    def _sleep(self, now: float) -> None:
        wake_s = self._floor.wake_s(now)
        if wake_s < self._wake_s:
            self._wake_s = wake_s
            self._floor.call_at(wake_s, partial(self._wake, wake_s))

    def _wake(self, now: float, _event: Event) -> None:
        self._wake_s = math.inf
        for microbatch, pool in enumerate(self._floor.pools):
            if not pool.is_running:
                self._meet_boundary(microbatch, now)

    def _meet_boundary(self, microbatch: int, now: float) -> None:
        floor, pool = self._floor, self._floor.pools[microbatch]
        if not floor.meet_boundary(pool, now):
            self._sleep(now)
            return
        if not floor.wants_timeline():
            self._pipeline.timeline = None
        times, layers = floor.times, floor.times.layers_each
        live, fullest = pool.num_live, max(pool.live)
        self._layer[microbatch] = 0
        self._attention_s[microbatch] = attention_s(floor, pool)
        self._shared_s[microbatch] = (
            times.one_way_s(live, fullest) * layers,
            times.round_trip_s(live, fullest) * layers,
            times.ffn_s(live) * layers,
        )
        self._attend(microbatch, now)

    def _attend(self, microbatch: int, arrived_s: float) -> None:
        healthy_s = self._attention_s[microbatch]
        stage = self._pipeline.attend(arrived_s, healthy_s, microbatch)
        totals = self._floor.totals
        workers = max(1, len(healthy_s) - healthy_s.count(0.0))
        totals.attention_s += stage.sum_s
        totals.barrier_wait_s += stage.longest_s - stage.sum_s / workers
        if self._floor.effects is not None:
            totals.fault_s += stage.longest_s - max(healthy_s)
        self._floor.call_at(stage.ready_s, partial(self._serve, microbatch, stage.ready_s))

    def _serve(self, microbatch: int, ready_s: float, _event: Event) -> None:
        one_way_s, round_trip_s, ffn_s = self._shared_s[microbatch]
        arrived_s = self._pipeline.serve(ready_s, one_way_s, round_trip_s, ffn_s, microbatch)
        self._floor.totals.link_s += round_trip_s
        self._floor.totals.ffn_s += ffn_s
        self._floor.call_at(arrived_s, partial(self._arrive, microbatch, arrived_s))

    def _arrive(self, microbatch: int, arrived_s: float, _event: Event) -> None:
        self._layer[microbatch] += 1
        if self._layer[microbatch] < self._floor.times.simulated_layers:
            self._attend(microbatch, arrived_s)
        else:
            self._meet_boundary(microbatch, arrived_s)


def attention_s(floor: OpenFloor, pool: OpenPool) -> list[float]:
    """[r] undisturbed attention seconds of one simulated layer; 0 for a worker without slots."""
    c, layers = floor.times.bundle.coefficients, floor.times.layers_each
    return [
        (c.alpha_attention * load + c.beta_attention) * layers if live else 0.0
        for load, live in zip(pool.loads, pool.live, strict=True)
    ]
