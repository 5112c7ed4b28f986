"""What can go wrong with an attention worker, as a scenario says it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    """Attention stages that start on the worker in [start_s, end_s) last ``factor`` times as long.

    Attributes:
        worker: Attention worker, 0..r-1.
        factor: > 0; 1.2 is 20 % slower.
        start_s: Seconds since the start of the run, >= 0.
        end_s: Later than ``start_s``; infinity: until the end of the run.
    """

    worker: int
    factor: float
    start_s: float = 0.0
    end_s: float = math.inf

    def __post_init__(self) -> None:
        _require_worker(self, self.worker)
        _require_window(self, self.start_s, self.end_s)
        if not (math.isfinite(self.factor) and self.factor > 0.0):
            raise ValueError(f"SlowWorker.factor must be finite and > 0, found {self.factor!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JitteryWorker:
    """Attention stages that start in [start_s, end_s) are multiplied by gamma noise of mean 1.

    Attributes:
        worker: Attention worker, 0..r-1; None: every worker, independently.
        cv: Coefficient of variation of the noise, > 0; independent from stage to stage.
        start_s: Seconds since the start of the run, >= 0.
        end_s: Later than ``start_s``; infinity: until the end of the run.
    """

    worker: int | None = None
    cv: float
    start_s: float = 0.0
    end_s: float = math.inf

    def __post_init__(self) -> None:
        if self.worker is not None:
            _require_worker(self, self.worker)
        _require_window(self, self.start_s, self.end_s)
        if not (math.isfinite(self.cv) and self.cv > 0.0):
            raise ValueError(f"JitteryWorker.cv must be finite and > 0, found {self.cv!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseWorker:
    """The worker computes nothing in [at_s, at_s + duration_s); what it was doing goes on after.

    Attributes:
        worker: Attention worker, 0..r-1.
        at_s: Seconds since the start of the run, >= 0.
        duration_s: > 0.
    """

    worker: int
    at_s: float
    duration_s: float

    def __post_init__(self) -> None:
        _require_worker(self, self.worker)
        _require_instant(self, self.at_s)
        if not (math.isfinite(self.duration_s) and self.duration_s > 0.0):
            raise ValueError(
                f"PauseWorker.duration_s must be finite and > 0, found {self.duration_s!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """The worker and all KV it holds are gone from ``at_s`` on, perhaps for good.

    The bundle notices at the next step boundary of each microbatch and goes on with the others.
    Requests of the lost worker queue again in front of the line, with prompt and generated tokens
    as the new prompt. A worker that comes back starts with empty slots.

    Attributes:
        worker: Attention worker, 0..r-1.
        at_s: Seconds since the start of the run, >= 0.
        back_after_s: Seconds until it is back, > 0; None: never.
    """

    worker: int
    at_s: float
    back_after_s: float | None = None

    def __post_init__(self) -> None:
        _require_worker(self, self.worker)
        _require_instant(self, self.at_s)
        if self.back_after_s is not None and not (
            math.isfinite(self.back_after_s) and self.back_after_s > 0.0
        ):
            raise ValueError(
                f"LostWorker.back_after_s must be finite and > 0, found {self.back_after_s!r}"
            )

    @property
    def back_s(self) -> float:
        """When the worker is back; infinity for never."""
        return math.inf if self.back_after_s is None else self.at_s + self.back_after_s


Fault = SlowWorker | JitteryWorker | PauseWorker | LostWorker


def require_fits(faults: Iterable[Fault], attention_per_ffn: int) -> None:
    """An error if a fault names a worker the bundle lacks, or nobody is left to work.

    Raises:
        ValueError: As above, or if a worker is lost again before it is back.
    """
    lost: dict[int, list[LostWorker]] = {}
    for fault in faults:
        if fault.worker is not None and fault.worker >= attention_per_ffn:
            raise ValueError(
                f"{type(fault).__name__}.worker must be one of 0..{attention_per_ffn - 1}, "
                f"found {fault.worker}"
            )
        if isinstance(fault, LostWorker):
            lost.setdefault(fault.worker, []).append(fault)
    for worker, losses in lost.items():
        losses.sort(key=lambda loss: loss.at_s)
        for earlier, later in pairwise(losses):
            if later.at_s < earlier.back_s:
                raise ValueError(
                    f"LostWorker.at_s = {later.at_s!r}: worker {worker} is already lost "
                    f"from {earlier.at_s!r} until {earlier.back_s!r}"
                )
    gone_for_good = sum(losses[-1].back_after_s is None for losses in lost.values())
    if gone_for_good == attention_per_ffn:
        raise ValueError("LostWorker: every attention worker is lost and none comes back")


def _require_worker(fault: object, worker: int) -> None:
    if worker < 0:
        raise ValueError(f"{type(fault).__name__}.worker must be >= 0, found {worker!r}")


def _require_instant(fault: object, at_s: float) -> None:
    if not (math.isfinite(at_s) and at_s >= 0.0):
        raise ValueError(f"{type(fault).__name__}.at_s must be finite and >= 0, found {at_s!r}")


def _require_window(fault: object, start_s: float, end_s: float) -> None:
    name = type(fault).__name__
    if not (math.isfinite(start_s) and start_s >= 0.0):
        raise ValueError(f"{name}.start_s must be finite and >= 0, found {start_s!r}")
    if math.isnan(end_s) or end_s <= start_s:
        raise ValueError(f"{name}.end_s must be later than start_s = {start_s!r}, found {end_s!r}")
