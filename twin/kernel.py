"""Saturated runs through the compiled inner loops, where numba is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from policies.routing import RoutingPolicy
from twin.cycle_log import PROGRESS_CYCLES, RawCycles, period_series, sample_stride
from twin.request_stream import BLOCK_REQUESTS, RequestLaw
from twin.saturated_case import SaturatedCase
from twin.slots import InService

_CODES = ("random", "round_robin", "least_token_load", "power_of_two")


@cache
def missing_because() -> str | None:
    """Why there are no compiled loops here, or None where there are. Tried once."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    try:
        importlib.import_module("numba")
    except Exception as error:  # whatever a broken or mismatched installation raises
        return f"numba cannot be imported ({' '.join(str(error).split())[:120]})"
    return None


def is_available() -> bool:
    """Whether numba is installed and can be imported."""
    return missing_because() is None


def knows_routing(routing: str | RoutingPolicy) -> bool:
    """Whether the compiled loops have that policy."""
    return isinstance(routing, str) and routing in _CODES


def run_compiled(
    case: SaturatedCase, on_progress: Callable[[int], None] | None = None
) -> RawCycles:
    """The same series as on SimPy's clock. Faults are not for this engine.

    Raises:
        ImportError: If numba is not installed.
    """
    from twin import compiled_steps

    run = _CompiledRun(case, compiled_steps)
    per_call = PROGRESS_CYCLES - PROGRESS_CYCLES % case.times.bundle.microbatches
    done = 0
    while done < case.num_cycles:
        done = min(done + max(per_call, case.times.bundle.microbatches), case.num_cycles)
        run.play_until(done)
        if on_progress is not None:
            on_progress(done)
    return run.columns()


class _CompiledRun:
    """The arrays of a run, as ``twin.compiled_steps`` describes them."""

    def __init__(self, case: SaturatedCase, steps: ModuleType) -> None:
        times, n = case.times, case.num_cycles
        r, b, m = times.attention_per_ffn, times.bundle.batch_per_worker, times.bundle.microbatches
        self._case, self._steps = case, steps
        self._law, self._chance = RequestLaw(case.lengths), case.routing_chance()
        self._line_chance = case.request_chance()
        self._routing = _CODES.index(str(case.routing))
        pools = case.in_service()
        num_buckets = int(case.lengths.output_tokens.max()) + 1
        held = [(p.prompt_tokens + p.age_steps).reshape(r, b).sum(axis=1) for p in pools]
        self._loads = np.stack(held)
        self._full_load = np.stack([p.prompt_tokens + p.output_tokens for p in pools])
        calendars = [_calendar(pool, num_buckets) for pool in pools]
        self._head, self._behind = (np.stack(arrays) for arrays in zip(*calendars, strict=True))
        self._line_of = np.tile(np.repeat(np.arange(r, dtype=np.int32), b), (m, 1))
        self._at_least = max(BLOCK_REQUESTS, m * b)
        self._prompts, self._outputs = np.empty((2, r, self._at_least + BLOCK_REQUESTS), dtype=int)
        self._used, self._have, self._needed = np.zeros((3, r), dtype=np.int64)
        self._draws = np.empty(0)
        self._cursor = np.zeros(3, dtype=np.int64)
        self._batch = np.empty((3, r * b), dtype=np.int64)
        self._done, self._pick = np.empty((2, r * b), dtype=np.int64)
        self._scratch = np.empty((4, r * b + 2 * r), dtype=np.int64)
        self._worker_free, self._shared_free, self._arrived = np.zeros(r), np.zeros(2), np.zeros(m)
        self._filled_s: NDArray[np.float64] | None = None
        self._stride = sample_stride(n)
        self._end_s, self._cycle_s = np.empty((2, n))
        self._max_load, self._sum_load, self._completed = np.empty((3, n), dtype=np.int64)
        self._samples = np.empty((-(-n // self._stride), r), dtype=np.int64)

    def play_until(self, cycle: int) -> None:
        """Go on until that many cycles are done, fetching requests as they run out."""
        barrier = self._case.times.bundle.semantics == "barrier"
        while True:
            if barrier:
                self._play_barrier(cycle)
            else:
                self._play_pingpong(cycle)
            if self._cursor[0] >= cycle:
                return
            self._fetch_requests()

    def columns(self) -> RawCycles:
        """All series."""
        bundle = self._case.times.bundle
        if self._filled_s is not None:
            self._cycle_s = period_series(self._end_s, self._filled_s, bundle.num_layers)
        return RawCycles(
            end_s=self._end_s,
            cycle_s=self._cycle_s,
            max_load_tokens=self._max_load,
            sum_load_tokens=self._sum_load,
            completed=self._completed,
            load_samples=self._samples,
            in_flight=self._full_load.size,
        )

    def _play_barrier(self, until: int) -> None:
        times = self._case.times
        c, b = times.bundle.coefficients, times.bundle.batch_per_worker
        live = times.attention_per_ffn * b
        floor_s = max(times.round_trip_s(live, b), times.ffn_s(live))
        stage = np.array([c.alpha_attention, c.beta_attention, floor_s, times.layers_each])
        self._steps.barrier_cycles(
            until, b, self._routing, stage, self._shared_free,
            self._loads, self._full_load, self._line_of, self._head, self._behind,
            self._prompts, self._outputs, self._used, self._have, self._draws, self._cursor,
            self._done, self._pick, self._batch, self._needed, self._scratch, self._stride,
            self._end_s, self._cycle_s, self._max_load, self._sum_load, self._completed,
            self._samples,
        )  # fmt: skip

    def _play_pingpong(self, until: int) -> None:
        times = self._case.times
        c, b, layers = times.bundle.coefficients, times.bundle.batch_per_worker, times.layers_each
        live = times.attention_per_ffn * b
        shared_s = (times.one_way_s(live, b), times.round_trip_s(live, b), times.ffn_s(live))
        stage = np.array(
            [c.alpha_attention, c.beta_attention, layers, *(s * layers for s in shared_s)]
        )
        if self._filled_s is None:
            self._steps.pass_layers(
                times.simulated_layers, stage, self._worker_free, self._shared_free, self._arrived,
                self._loads,
            )  # fmt: skip
            self._filled_s = self._arrived.copy()
        self._steps.pingpong_cycles(
            until, times.simulated_layers, b, self._routing, stage,
            self._worker_free, self._shared_free, self._arrived,
            self._loads, self._full_load, self._line_of, self._head, self._behind,
            self._prompts, self._outputs, self._used, self._have, self._draws, self._cursor,
            self._done, self._pick, self._batch, self._needed, self._scratch, self._stride,
            self._end_s, self._max_load, self._sum_load, self._completed, self._samples,
        )  # fmt: skip

    def _fetch_requests(self) -> None:
        """More requests for every line, enough for any step; and two routing draws for each."""
        for line, rng in enumerate(self._line_chance):
            left = slice(self._used[line], self._have[line])
            rest = self._have[line] - self._used[line]
            for columns in (self._prompts, self._outputs):
                columns[line, :rest] = columns[line, left].copy()
            while rest < self._at_least:
                more = slice(rest, rest + BLOCK_REQUESTS)
                self._prompts[line, more], self._outputs[line, more] = self._law.draw(
                    rng, BLOCK_REQUESTS
                )
                rest += BLOCK_REQUESTS
            self._used[line], self._have[line] = 0, rest
        if self._routing == self._steps.POWER_OF_TWO:
            unused = self._draws[self._cursor[1] :]
            more_draws = self._chance.random(max(0, 2 * int(self._have.sum()) - len(unused)))
            self._draws = np.concatenate((unused, more_draws))
            self._cursor[1] = 0


def _calendar(pool: InService, num_buckets: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """``head`` and ``behind`` of one microbatch at instant 0."""
    last_step = pool.output_tokens - pool.age_steps - 1
    order = np.argsort(last_step, kind="stable").astype(np.int32)
    steps = last_step[order]
    starts = np.concatenate(([True], steps[1:] != steps[:-1]))
    head = np.full(num_buckets, -1, dtype=np.int32)
    head[steps[starts]] = order[starts]
    behind = np.full(len(order), -1, dtype=np.int32)
    chained = ~starts[1:]
    behind[order[:-1][chained]] = order[1:][chained]
    return head, behind
