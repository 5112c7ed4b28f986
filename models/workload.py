"""From the ``[workload]`` of a scenario to lengths and arrivals that can be simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from models.streams import stream
from models.strict_tables import ScenarioError
from models.worker_load import MAX_LOAD_TOKENS
from models.workload_settings import (
    ArrivalSettings,
    FixedLengths,
    GammaArrivals,
    GeometricLengths,
    LengthSettings,
    LognormalLengths,
    OnOffArrivals,
    PoissonArrivals,
    ServegenWindow,
    SessionArrivals,
    TraceArrivals,
    Workload,
)
from traces import arrivals as arrival_processes
from traces import length_laws
from traces.errors import TraceError
from traces.lengths import LengthPairs
from traces.request import Trace
from traces.workloads import BUNDLED, bundled_arrivals, bundled_info, bundled_lengths

DEFAULT_OPEN_LOOP_REQUESTS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoopRequests:
    """Requests in order of arrival.

    Attributes:
        arrival_s: [n] float64 seconds, non-decreasing.
        prompt_tokens, output_tokens: [n] int64.
        trace: Whose rows they are, once its sessions have started; None where lengths were drawn.
        row: [n] int64, row of the trace; each round through it counts on from 0.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    trace: Trace | None = None
    row: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedWorkload:
    """A workload that is ready to be used.

    Attributes:
        name: Short name for reports and directories.
        source: Where it came from.
        format: Name of the trace format, ``bundled`` or ``length law``.
        lengths: Joint law of prompt and output lengths.
        trace: The trace that was read, or None.
        settings: The scenario's table.
        notes: Facts to be printed with every result.
        skipped: Rule -> rows left out.
    """

    name: str
    source: str
    format: str
    lengths: LengthPairs
    trace: Trace | None
    settings: Workload
    notes: tuple[str, ...] = ()
    skipped: Mapping[str, int] | None = None

    def open_loop_requests(self, rng: np.random.Generator) -> OpenLoopRequests:
        """Arrivals and lengths of an open-loop run.

        Raises:
            ScenarioError: If the workload has no arrival times and none are configured.
        """
        settings = self.settings.arrivals
        if settings is None or isinstance(settings, TraceArrivals):
            scale = 1.0 if settings is None else settings.rate_scale
            return self._as_recorded(rng, scale)
        if isinstance(settings, SessionArrivals):
            return self._started_sessions(rng, settings)
        count = self.settings.num_requests or self._default_count()
        prompts, outputs = self.lengths.sample(rng, count)
        return OpenLoopRequests(
            arrival_s=_generate(settings, rng, count), prompt_tokens=prompts, output_tokens=outputs
        )

    def _default_count(self) -> int:
        return len(self.trace) if self.trace is not None else DEFAULT_OPEN_LOOP_REQUESTS

    def _started_sessions(
        self, rng: np.random.Generator, settings: SessionArrivals
    ) -> OpenLoopRequests:
        from traces.readers import count_sessions, start_sessions

        if self.trace is None:
            raise ScenarioError(
                "[workload.arrivals] kind: 'sessions' needs a trace of sessions; "
                f"{self.name} has none"
            )
        starts = arrival_processes.poisson(
            rng, rate_per_s=settings.sessions_per_s, num_requests=count_sessions(self.trace)
        )
        started = start_sessions(self.trace, starts)
        if started.arrival_s is None:
            raise ScenarioError(f"[workload.arrivals] kind: {self.source} has no session times")
        return OpenLoopRequests(
            arrival_s=started.arrival_s,
            prompt_tokens=started.prompt_tokens,
            output_tokens=started.output_tokens,
            trace=started,
            row=np.arange(len(started)),
        )

    def _as_recorded(self, rng: np.random.Generator, scale: float) -> OpenLoopRequests:
        if self.trace is None:
            count = self.settings.num_requests or DEFAULT_OPEN_LOOP_REQUESTS
            prompts, outputs = self.lengths.sample(rng, count)
            times = bundled_arrivals(self.name, rng, num_requests=count, rate_scale=scale)
            return OpenLoopRequests(arrival_s=times, prompt_tokens=prompts, output_tokens=outputs)
        if self.trace.arrival_s is None:
            raise ScenarioError(
                f"[workload.arrivals] kind: {self.source} has no arrival times; an open-loop run "
                "needs a process, e.g. --set workload.arrivals.kind=poisson "
                "--set workload.arrivals.rate_per_s=2, or for a trace of sessions "
                "--set workload.arrivals.kind=sessions --set workload.arrivals.sessions_per_s=0.1"
            )
        count = self.settings.num_requests or len(self.trace)
        times = arrival_processes.replay(self.trace.arrival_s, rate_scale=scale, num_requests=count)
        row = np.arange(count) % len(self.trace)
        return OpenLoopRequests(
            arrival_s=times,
            prompt_tokens=self.trace.prompt_tokens[row],
            output_tokens=self.trace.output_tokens[row],
            trace=self.trace,
            row=row,
        )


def resolve_workload(settings: Workload, *, seed: int) -> ResolvedWorkload:
    """Read the trace, or build the length law, that ``settings`` names.

    Args:
        settings: The scenario's table.
        seed: Of the named random streams; only ServeGen statistics need one.

    Raises:
        TraceError: If a trace file breaks a rule, or its lengths are out of any range.
        ScenarioError: If a setting does not fit what ``trace`` is, or a law cannot be built.
    """
    workload = _resolve(settings, seed)
    lengths = workload.lengths
    reach = int((lengths.prompt_tokens + lengths.output_tokens).max())
    if reach - int(lengths.prompt_tokens.min()) > MAX_LOAD_TOKENS:
        raise TraceError(
            f"{workload.source}: a request grows to {reach:,} tokens (prompt + output); "
            f"lengths may span at most {MAX_LOAD_TOKENS:,} tokens"
        )
    return workload


def _resolve(settings: Workload, seed: int) -> ResolvedWorkload:
    """Read the trace, or build the length law, that ``settings`` names."""
    if settings.lengths is not None:
        try:
            law = _length_law(settings.lengths)
        except ValueError as error:
            raise ScenarioError(f"[workload.lengths] {error}") from error
        return ResolvedWorkload(
            name=settings.lengths.kind,
            source=f"length law {law.name or settings.lengths.kind}",
            format="length law",
            lengths=law,
            trace=None,
            settings=settings,
        )
    name = cast(str, settings.trace)
    if name in BUNDLED:
        return _bundled(name, settings)
    trace = _servegen(name, settings, seed) if Path(name).is_dir() else _read(name, settings)
    return ResolvedWorkload(
        name=trace.name,
        source=trace.source,
        format=trace.format,
        lengths=trace.lengths(),
        trace=trace,
        settings=settings,
        notes=trace.notes,
        skipped=dict(trace.skipped),
    )


def _read(name: str, settings: Workload) -> Trace:
    from traces.readers import read_trace

    if settings.servegen is not None:
        raise ScenarioError(
            f"[workload.servegen]: is about a folder of ServeGen statistics; {name} is none"
        )
    return read_trace(
        name,
        format=settings.format,
        columns=dict(settings.columns) or None,
        time_unit=settings.time_unit,
        skip_bad_rows=settings.skip_bad_rows,
    )


def _servegen(name: str, settings: Workload, seed: int) -> Trace:
    from traces.servegen import generate_servegen

    _refuse_file_settings(name, settings, "a folder")
    window = settings.servegen or ServegenWindow()
    trace = generate_servegen(
        name,
        stream(seed, "servegen"),
        start_s=window.start_s,
        duration_s=window.duration_s,
        rate_scale=window.rate_scale,
    )
    note = (
        f"drawn from ServeGen client statistics: {window.duration_s:g} s from "
        f"{window.start_s:g} s on (workload.servegen)"
    )
    return replace(trace, notes=(note, *trace.notes))


def _bundled(name: str, settings: Workload) -> ResolvedWorkload:
    info = bundled_info(name)
    _refuse_file_settings(name, settings, "a bundled workload")
    if settings.servegen is not None:
        raise ScenarioError(
            f"[workload.servegen]: is about a folder of ServeGen statistics; {name} is bundled"
        )
    return ResolvedWorkload(
        name=name,
        source=f"bundled workload, fitted on {info.get('title', name)}",
        format="bundled",
        lengths=bundled_lengths(name),
        trace=None,
        settings=settings,
    )


def _refuse_file_settings(name: str, settings: Workload, what: str) -> None:
    for field, given in (
        ("format", settings.format != "auto"),
        ("columns", bool(settings.columns)),
        ("time_unit", settings.time_unit is not None),
        ("skip_bad_rows", settings.skip_bad_rows),
    ):
        if given:
            raise ScenarioError(f"[workload] {field}: is about a trace file; {name} is {what}")


def _length_law(settings: LengthSettings) -> LengthPairs:
    if isinstance(settings, FixedLengths):
        return length_laws.fixed(settings.prompt_tokens, settings.output_tokens)
    if isinstance(settings, GeometricLengths):
        return length_laws.geometric(settings.prompt_tokens, settings.mean_output_tokens)
    if isinstance(settings, LognormalLengths):
        return length_laws.lognormal(
            settings.mean_prompt_tokens,
            settings.mean_output_tokens,
            settings.sigma_prompt,
            settings.sigma_output,
            settings.correlation,
        )
    return length_laws.pareto(
        settings.prompt_tokens,
        settings.minimum_output_tokens,
        settings.tail_index,
        settings.cap_tokens,
    )


def _generate(
    settings: ArrivalSettings, rng: np.random.Generator, count: int
) -> NDArray[np.float64]:
    if isinstance(settings, PoissonArrivals):
        return arrival_processes.poisson(rng, rate_per_s=settings.rate_per_s, num_requests=count)
    if isinstance(settings, GammaArrivals):
        return arrival_processes.gamma(
            rng, rate_per_s=settings.rate_per_s, cv=settings.cv, num_requests=count
        )
    if isinstance(settings, OnOffArrivals):
        return arrival_processes.on_off(
            rng,
            on_rate_per_s=settings.on_rate_per_s,
            off_rate_per_s=settings.off_rate_per_s,
            mean_on_s=settings.mean_on_s,
            mean_off_s=settings.mean_off_s,
            num_requests=count,
        )
    raise TypeError(f"no generator for {type(settings).__name__}")


def workload_summary(workload: ResolvedWorkload) -> dict[str, Any]:
    """JSON-ready facts about the workload for reports."""
    lengths = workload.lengths
    summary: dict[str, Any] = {
        "name": workload.name,
        "source": workload.source,
        "format": workload.format,
        "num_requests": lengths.num_requests,
        "prompt_tokens": _column(lengths.prompt_tokens, lengths.weight),
        "output_tokens": _column(lengths.output_tokens, lengths.weight),
        "notes": list(workload.notes),
        "skipped": dict(workload.skipped or {}),
    }
    if workload.trace is not None and workload.trace.arrival_s is not None:
        duration = workload.trace.duration_s
        summary["duration_s"] = duration
        summary["rate_per_s"] = (len(workload.trace) - 1) / duration if duration > 0 else None
    return summary


Statistic = Literal["mean", "p50", "p90", "p99", "max"]


def _column(values: NDArray[np.int64], weight: NDArray[np.float64]) -> dict[Statistic, float]:
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weight[order])

    def quantile(level: float) -> float:
        at = int(np.searchsorted(cumulative, level * cumulative[-1]))
        return float(values[order[min(at, len(order) - 1)]])

    return {
        "mean": float(np.dot(values, weight)),
        "p50": quantile(0.5),
        "p90": quantile(0.9),
        "p99": quantile(0.99),
        "max": float(values.max()),
    }
