"""What a saturated run notes down, one row a cycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_LOAD_SAMPLES = 2048
PROGRESS_CYCLES = 16_384


def sample_stride(num_cycles: int) -> int:
    """Every how many cycles the loads of all workers are kept."""
    return -(-num_cycles // MAX_LOAD_SAMPLES)


class FaultyCycle(NamedTuple):
    """What cannot be derived from loads when workers are slow or lost; seconds of one layer.

    Attributes:
        attention_max_s: Slowest worker.
        attention_mean_s: Mean of the workers present.
        healthy_cycle_s: The cycle on the same loads without slow, jittery or paused workers.
        live_slots: Filled slots.
        workers_present: Workers that are not lost.
    """

    attention_max_s: float
    attention_mean_s: float
    healthy_cycle_s: float
    live_slots: int
    workers_present: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyCycles:
    """Columns of ``FaultyCycle``, [n] each."""

    attention_max_s: NDArray[np.float64]
    attention_mean_s: NDArray[np.float64]
    healthy_cycle_s: NDArray[np.float64]
    live_slots: NDArray[np.int64]
    workers_present: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCycles:
    """Series of a saturated run as its engine leaves them.

    Attributes:
        end_s: [n] instant at which the cycle ended.
        cycle_s: [n] seconds per layer and microbatch period.
        max_load_tokens: [n] load of the fullest worker.
        sum_load_tokens: [n] load of all workers.
        completed: [n] requests that got their last token.
        load_samples: [k, r] loads of all workers, every ``sample_stride(n)`` cycles from the first.
        in_flight: Requests in slots at the end.
        faulty: Set when there were faults.
        num_retries: How often a request came back from a lost worker.
        num_waiting: Requests that came back and had no slot at the end.
    """

    end_s: NDArray[np.float64]
    cycle_s: NDArray[np.float64]
    max_load_tokens: NDArray[np.int64]
    sum_load_tokens: NDArray[np.int64]
    completed: NDArray[np.int64]
    load_samples: NDArray[np.int64]
    in_flight: int
    faulty: FaultyCycles | None = None
    num_retries: int = 0
    num_waiting: int = 0


class CycleLog:
    """Rows of a run in the making; every cycle is noted once."""

    def __init__(self, num_cycles: int, on_progress: Callable[[int], None] | None) -> None:
        self.num_cycles = num_cycles
        self._on_progress = on_progress
        self._stride = sample_stride(num_cycles)
        self._noted = 0
        self._end_s = [0.0] * num_cycles
        self._cycle_s = [0.0] * num_cycles
        self._max_load = [0] * num_cycles
        self._sum_load = [0] * num_cycles
        self._completed = [0] * num_cycles
        self._samples: list[list[int]] = [[] for _ in range(0, num_cycles, self._stride)]
        self._faulty: dict[int, FaultyCycle] = {}

    def note(
        self,
        cycle: int,
        end_s: float,
        cycle_s: float,
        loads: list[int],
        completed: int,
        faulty: FaultyCycle | None = None,
    ) -> None:
        """Cycle number ``cycle`` ended; ``loads`` are those it read."""
        self._end_s[cycle] = end_s
        self._cycle_s[cycle] = cycle_s
        self._max_load[cycle] = max(loads)
        self._sum_load[cycle] = sum(loads)
        self._completed[cycle] = completed
        if cycle % self._stride == 0:
            self._samples[cycle // self._stride] = loads
        if faulty is not None:
            self._faulty[cycle] = faulty
        self._noted += 1
        if self._on_progress is not None and (
            self._noted % PROGRESS_CYCLES == 0 or self._noted == self.num_cycles
        ):
            self._on_progress(self._noted)

    def columns(self, *, in_flight: int, num_retries: int, num_waiting: int) -> RawCycles:
        """All rows, once the run is over."""
        return RawCycles(
            end_s=np.array(self._end_s),
            cycle_s=np.array(self._cycle_s),
            max_load_tokens=np.array(self._max_load),
            sum_load_tokens=np.array(self._sum_load),
            completed=np.array(self._completed),
            load_samples=np.array(self._samples),
            in_flight=in_flight,
            faulty=self._faulty_columns() if self._faulty else None,
            num_retries=num_retries,
            num_waiting=num_waiting,
        )

    def _faulty_columns(self) -> FaultyCycles:
        rows = [self._faulty[cycle] for cycle in range(self.num_cycles)]
        return FaultyCycles(
            attention_max_s=np.array([row.attention_max_s for row in rows]),
            attention_mean_s=np.array([row.attention_mean_s for row in rows]),
            healthy_cycle_s=np.array([row.healthy_cycle_s for row in rows]),
            live_slots=np.array([row.live_slots for row in rows]),
            workers_present=np.array([row.workers_present for row in rows]),
        )


def period_series(
    end_s: NDArray[np.float64], filled_s: NDArray[np.float64], num_layers: int
) -> NDArray[np.float64]:
    """Seconds per layer and microbatch period from the ends of steps taken in turn.

    A microbatch's step lasts from its own previous end to this one and spans as many periods of
    ``num_layers`` layers as there are microbatches.

    Args:
        end_s: [n] when each step ended.
        filled_s: [m] when the step before the first one ended, for each microbatch.
        num_layers: L.
    """
    previous = np.concatenate((filled_s, end_s))[: len(end_s)]
    return (end_s - previous) / (len(filled_s) * num_layers)
