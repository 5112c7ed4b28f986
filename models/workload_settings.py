"""The ``[workload]`` tables of a scenario: a trace or a length law, and an arrival process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from models.strict_tables import (
    ScenarioError,
    require_at_least_one,
    require_at_most,
    require_not_negative,
    require_positive,
    require_rates,
    require_within,
)

MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLengths:
    """Every request has the same lengths."""

    kind: Literal["fixed"] = "fixed"
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        require_not_negative("workload.lengths", prompt_tokens=self.prompt_tokens)
        require_at_least_one("workload.lengths", output_tokens=self.output_tokens)
        require_at_most(
            "workload.lengths",
            MAX_TOKENS,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricLengths:
    """Fixed prompts, outputs geometric on 1, 2, ... (the paper's base case)."""

    kind: Literal["geometric"] = "geometric"
    prompt_tokens: int
    mean_output_tokens: float

    def __post_init__(self) -> None:
        require_not_negative("workload.lengths", prompt_tokens=self.prompt_tokens)
        require_at_most("workload.lengths", MAX_TOKENS, prompt_tokens=self.prompt_tokens)
        if not (math.isfinite(self.mean_output_tokens) and self.mean_output_tokens >= 1):
            raise ScenarioError(
                "[workload.lengths] mean_output_tokens: must be finite and >= 1, "
                f"found {self.mean_output_tokens!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths:
    """Both lengths lognormal, their logarithms correlated."""

    kind: Literal["lognormal"] = "lognormal"
    mean_prompt_tokens: float
    mean_output_tokens: float
    sigma_prompt: float = 1.0
    sigma_output: float = 1.0
    correlation: float = 0.0

    def __post_init__(self) -> None:
        require_positive(
            "workload.lengths",
            mean_prompt_tokens=self.mean_prompt_tokens,
            mean_output_tokens=self.mean_output_tokens,
        )
        require_not_negative(
            "workload.lengths", sigma_prompt=self.sigma_prompt, sigma_output=self.sigma_output
        )
        if not -1.0 < self.correlation < 1.0:
            raise ScenarioError(
                f"[workload.lengths] correlation: must lie in (-1, 1), found {self.correlation!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoLengths:
    """Fixed prompts, outputs with a power tail, cut at ``cap_tokens``."""

    kind: Literal["pareto"] = "pareto"
    prompt_tokens: int
    minimum_output_tokens: int
    tail_index: float
    cap_tokens: int = 200_000

    def __post_init__(self) -> None:
        require_not_negative("workload.lengths", prompt_tokens=self.prompt_tokens)
        require_at_least_one(
            "workload.lengths",
            minimum_output_tokens=self.minimum_output_tokens,
            cap_tokens=self.cap_tokens,
        )
        require_at_most(
            "workload.lengths",
            MAX_TOKENS,
            prompt_tokens=self.prompt_tokens,
            minimum_output_tokens=self.minimum_output_tokens,
            cap_tokens=self.cap_tokens,
        )
        require_positive("workload.lengths", tail_index=self.tail_index)
        if self.cap_tokens < self.minimum_output_tokens:
            raise ScenarioError(
                "[workload.lengths] cap_tokens: must be >= minimum_output_tokens "
                f"({self.minimum_output_tokens}), found {self.cap_tokens}"
            )


LengthSettings = FixedLengths | GeometricLengths | LognormalLengths | ParetoLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceArrivals:
    """The trace's own times; repeated with its own period when more requests are wanted."""

    kind: Literal["trace"] = "trace"
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        require_rates("workload.arrivals", rate_scale=self.rate_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonArrivals:
    """Independent exponential gaps."""

    kind: Literal["poisson"] = "poisson"
    rate_per_s: float

    def __post_init__(self) -> None:
        require_rates("workload.arrivals", rate_per_s=self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals:
    """Independent gamma gaps with a given coefficient of variation."""

    kind: Literal["gamma"] = "gamma"
    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        require_rates("workload.arrivals", rate_per_s=self.rate_per_s)
        require_within("workload.arrivals", 0.0, 1000.0, cv=self.cv)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOffArrivals:
    """Poisson arrivals whose rate switches between two levels."""

    kind: Literal["on_off"] = "on_off"
    on_rate_per_s: float
    off_rate_per_s: float = 0.0
    mean_on_s: float
    mean_off_s: float

    def __post_init__(self) -> None:
        require_rates("workload.arrivals", on_rate_per_s=self.on_rate_per_s)
        require_within("workload.arrivals", 0.0, 1e12, off_rate_per_s=self.off_rate_per_s)
        require_within(
            "workload.arrivals", 1e-6, 1e9, mean_on_s=self.mean_on_s, mean_off_s=self.mean_off_s
        )
        a_stay = self.on_rate_per_s * self.mean_on_s + self.off_rate_per_s * self.mean_off_s
        if a_stay < 1e-3:
            raise ScenarioError(
                "[workload.arrivals] mean_on_s: on and off together must bring at least 0.001 "
                f"requests on average, found {a_stay:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionArrivals:
    """Sessions of a trace start as a Poisson process; their calls keep their recorded distances."""

    kind: Literal["sessions"] = "sessions"
    sessions_per_s: float

    def __post_init__(self) -> None:
        require_rates("workload.arrivals", sessions_per_s=self.sessions_per_s)


ArrivalSettings = TraceArrivals | PoissonArrivals | GammaArrivals | OnOffArrivals | SessionArrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class ServegenWindow:
    """Which span of ServeGen client statistics becomes requests.

    Attributes:
        start_s: Begin of the span, on the clock of the files.
        duration_s: Its length.
        rate_scale: Factor on every client's rate.
    """

    start_s: float = 0.0
    duration_s: float = 60.0
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        require_not_negative("workload.servegen", start_s=self.start_s)
        require_positive(
            "workload.servegen", duration_s=self.duration_s, rate_scale=self.rate_scale
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Where requests come from.

    Attributes:
        trace: A bundled workload's name, a file's path, or a folder of ServeGen client
            statistics; None when ``lengths`` is given.
        format: Format of the file, or ``auto``.
        columns: For generic files: ``arrival``, ``prompt``, ``output`` -> column name.
        time_unit: Unit of arrival times where the file does not say.
        skip_bad_rows: Leave rows out that break a rule (and report them) instead of stopping.
        servegen: Span to draw, where ``trace`` is a folder of ServeGen client statistics.
        lengths: A length law, instead of a trace.
        arrivals: Arrival process of an open-loop run; None: the trace's own times.
        num_requests: How many requests an open-loop run serves; None: as many as the trace has.
    """

    trace: str | None = None
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    skip_bad_rows: bool = False
    servegen: ServegenWindow | None = None
    lengths: LengthSettings | None = None
    arrivals: ArrivalSettings | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        if self.trace is not None and not self.trace.strip():
            raise ScenarioError("[workload] trace: is empty; give a bundled name or a path")
        if (self.trace is None) == (self.lengths is None):
            raise ScenarioError(
                "[workload] trace: give either a trace (bundled name or file) or a table "
                "[workload.lengths], " + ("found neither" if self.trace is None else "found both")
            )
        if self.lengths is not None and (
            self.format != "auto"
            or self.columns
            or self.time_unit
            or self.skip_bad_rows
            or self.servegen
        ):
            raise ScenarioError(
                "[workload] format, columns, time_unit, skip_bad_rows and servegen are about a "
                "trace; remove them or give [workload] trace"
            )
        if self.lengths is not None and isinstance(self.arrivals, TraceArrivals | SessionArrivals):
            raise ScenarioError(
                f"[workload.arrivals] kind: '{self.arrivals.kind}' needs [workload] trace; "
                "with a length law choose poisson, gamma or on_off"
            )
        if isinstance(self.arrivals, SessionArrivals) and self.num_requests is not None:
            raise ScenarioError(
                "[workload] num_requests: kind = 'sessions' serves every call of every session; "
                "remove it (run.horizon_s ends a run early)"
            )
        require_at_least_one("workload", num_requests=self.num_requests)
        require_at_most("workload", 100_000_000, num_requests=self.num_requests)
