"""What faults do to the stages of a run: stretched attention times, absent workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from models.streams import stream
from twin.faults import Fault, JitteryWorker, LostWorker, PauseWorker, SlowWorker

_BLOCK = 1024

StretchSeconds = Callable[[float, float], float]


class FaultEffects:
    """Answers how long a stage really takes on a worker, and who is there at all.

    Effects on one worker add up: factors multiply, then pauses delay what is left.
    """

    def __init__(
        self, faults: Sequence[Fault], num_workers: int, *, seed: int, replication: int
    ) -> None:
        self._factors: dict[int, list[tuple[float, float, Iterator[float]]]] = {}
        self._pauses: dict[int, list[tuple[float, float]]] = {}
        self._losses: dict[int, list[tuple[float, float]]] = {}
        for number, fault in enumerate(faults):
            self._add(fault, number, num_workers, seed, replication)
        self._pauses = {worker: _merged(pauses) for worker, pauses in self._pauses.items()}
        self.stretched = frozenset(self._factors) | frozenset(self._pauses)
        self.has_losses = bool(self._losses)

    def _add(
        self, fault: Fault, number: int, num_workers: int, seed: int, replication: int
    ) -> None:
        match fault:
            case SlowWorker():
                entry = (fault.start_s, fault.end_s, _always(fault.factor))
                self._factors.setdefault(fault.worker, []).append(entry)
            case JitteryWorker():
                affected = range(num_workers) if fault.worker is None else (fault.worker,)
                for worker in affected:
                    rng = stream(seed, f"jitter/{number}/worker {worker}", replication)
                    noise = _gamma_noise(rng, fault.cv)
                    self._factors.setdefault(worker, []).append((fault.start_s, fault.end_s, noise))
            case PauseWorker():
                window = (fault.at_s, fault.at_s + fault.duration_s)
                self._pauses.setdefault(fault.worker, []).append(window)
            case LostWorker():
                self._losses.setdefault(fault.worker, []).append((fault.at_s, fault.back_s))

    def finish_s(self, worker: int, start_s: float, duration_s: float) -> float:
        """When a stage ends that starts at ``start_s`` and takes ``duration_s`` undisturbed."""
        for first_s, last_s, factor in self._factors.get(worker, ()):
            if first_s <= start_s < last_s:
                duration_s *= next(factor)
        finish_s = start_s + duration_s
        for pause_s, resume_s in self._pauses.get(worker, ()):
            if pause_s < finish_s and start_s < resume_s:
                finish_s += resume_s - max(pause_s, start_s)
        return finish_s

    def is_lost(self, worker: int, now: float) -> bool:
        """Whether the worker is away at that instant."""
        return any(at_s <= now < back_s for at_s, back_s in self._losses.get(worker, ()))

    def next_return_s(self, now: float) -> float:
        """The next instant after ``now`` at which a worker comes back; infinity for never."""
        returns = (
            back_s for losses in self._losses.values() for _, back_s in losses if back_s > now
        )
        return min(returns, default=math.inf)


def _merged(windows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same instants as disjoint windows in order."""
    merged: list[tuple[float, float]] = []
    for first_s, last_s in sorted(windows):
        if merged and first_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last_s))
        else:
            merged.append((first_s, last_s))
    return merged


def _always(factor: float) -> Iterator[float]:
    while True:
        yield factor


def _gamma_noise(rng: np.random.Generator, cv: float) -> Iterator[float]:
    """Independent gamma numbers of mean 1 and coefficient of variation ``cv``."""
    shape = 1.0 / (cv * cv)
    while True:
        yield from rng.gamma(shape, 1.0 / shape, _BLOCK).tolist()
