"""What a trace looks like: lengths, slot load, arrivals, shared prefixes, sessions, latencies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.prefix_sharing import PrefixStatistics, prefix_statistics
from traces.request import Trace
from traces.spread import Spread, pearson, spearman, spread

DISPERSION_WINDOWS_S = (1.0, 10.0, 60.0, 300.0)
RATE_WINDOW_S = 300.0
SESSION_TIME = "session_time_s"  # seconds since the session began, not a latency
_MIN_WINDOWS = 4  # fewer counts say nothing about their variance


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStatistics:
    """Prompt and output lengths, and the slot load that follows from them.

    Attributes:
        prompt_tokens: Spread of P.
        output_tokens: Spread of D.
        pearson: Correlation of P and D; None where one of them does not vary.
        spearman: Rank correlation; None where one of them does not vary.
        theta_tokens: Tokens a slot holds at a random decode step, E[D P + D (D - 1) / 2] / E[D].
        theta_se: Standard error of that ratio estimate, in tokens.
        theta_prompt_tokens: The prompt's part of theta, E[D P] / E[D].
        theta_from_means_tokens: mean P + (mean D - 1) / 2: what theta would be if P and D were
            independent and D did not vary.

    Source:
        Renewal-reward, arXiv 2601.21351; standard error of a ratio, Cochran, Sampling Techniques.
    """

    prompt_tokens: Spread
    output_tokens: Spread
    pearson: float | None
    spearman: float | None
    theta_tokens: float
    theta_se: float
    theta_prompt_tokens: float
    theta_from_means_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalStatistics:
    """How requests come.

    Attributes:
        rate_per_s: (n - 1) / duration: gaps per second.
        duration_s: First to last arrival.
        distinct_times: How many different instants; far fewer than requests means coarse stamps.
        gap_cv: Standard deviation / mean of the gaps; 1 for a Poisson process.
        longest_gap_s: The longest gap.
        dispersion_by_window_s: Variance / mean of the counts in windows of that many seconds; 1 for
            a Poisson process. Only windows that fit in at least four times.
        peak_window_s: Window over which ``peak_to_mean_rate`` is taken; None if none fits.
        peak_to_mean_rate: Busiest window's rate over the mean of all windows.
        rate_window_s: Window of ``rate_by_window_per_s``.
        rate_by_window_per_s: Requests per second in whole windows, one after the other.
    """

    rate_per_s: float
    duration_s: float
    distinct_times: int
    gap_cv: float
    longest_gap_s: float
    dispersion_by_window_s: Mapping[float, float]
    peak_window_s: float | None
    peak_to_mean_rate: float | None
    rate_window_s: float
    rate_by_window_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    """Conversations.

    Attributes:
        num_sessions: Distinct session names.
        turns: Spread of requests per session.
        think_s: Spread of the pauses before a turn, where known.
        length_s: Spread of the time from a session's first to its last request, where known.
    """

    num_sessions: int
    turns: Spread
    think_s: Spread | None
    length_s: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Everything ``trace_statistics`` finds; parts the trace has no data for are None or empty.

    Attributes:
        name: The trace's name.
        source: Where it came from.
        format: Its format.
        num_requests: Requests used.
        lengths: Lengths and slot load.
        arrivals: None without times, or with fewer than two requests.
        prefixes: None without prompt blocks.
        sessions: None without session names.
        measured: Spread of each latency measured at the source, by name, in s.
        skipped: Rule -> rows left out.
        notes: Facts a user should know.
    """

    name: str
    source: str
    format: str
    num_requests: int
    lengths: LengthStatistics
    arrivals: ArrivalStatistics | None
    prefixes: PrefixStatistics | None
    sessions: SessionStatistics | None
    measured: Mapping[str, Spread]
    skipped: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def theta_tokens(self) -> float:
        """Tokens a slot holds at a random decode step."""
        return self.lengths.theta_tokens

    @property
    def theta_se(self) -> float:
        """Standard error of ``theta_tokens``."""
        return self.lengths.theta_se

    def as_dict(self) -> dict[str, object]:
        """All of it as JSON-ready values: keys are strings, no NaN (None instead)."""
        plain = _json_ready(dataclasses.asdict(self))
        if not isinstance(plain, dict):
            raise TypeError("dataclass did not become a mapping")
        return {**plain, "theta_tokens": self.theta_tokens, "theta_se": self.theta_se}


def trace_statistics(trace: Trace) -> TraceStatistics:
    """Describe a trace.

    Args:
        trace: At least one request.

    Returns:
        The statistics; costs O(n log n) in requests and prompt blocks.

    Raises:
        ValueError: If the trace is empty.
    """
    if len(trace) == 0:
        raise ValueError(f"trace {trace.name!r} holds no requests, so it has no statistics")
    measured = {
        name: spread(values) for name, values in trace.measured.items() if name != SESSION_TIME
    }
    return TraceStatistics(
        name=trace.name,
        source=trace.source,
        format=trace.format,
        num_requests=len(trace),
        lengths=length_statistics(trace.prompt_tokens, trace.output_tokens),
        arrivals=None if trace.arrival_s is None else arrival_statistics(trace.arrival_s),
        prefixes=prefix_statistics(trace),
        sessions=session_statistics(trace),
        measured={name: values for name, values in measured.items() if values is not None},
        skipped=dict(trace.skipped),
        notes=trace.notes,
    )


def length_statistics(
    prompt_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64]
) -> LengthStatistics:
    """Lengths and slot load of requests given as columns [n], n >= 1."""
    p, d = prompt_tokens.astype(np.float64), output_tokens.astype(np.float64)
    total = float(d.sum())
    held = d * p + d * (d - 1.0) / 2.0
    theta = float(held.sum()) / total
    prompts, outputs = spread(p), spread(d)
    if prompts is None or outputs is None:
        raise ValueError("prompt_tokens and output_tokens must hold at least one request")
    return LengthStatistics(
        prompt_tokens=prompts,
        output_tokens=outputs,
        pearson=pearson(p, d),
        spearman=spearman(p, d),
        theta_tokens=theta,
        theta_se=math.sqrt(float(np.square(held - theta * d).sum())) / total,
        theta_prompt_tokens=float(d @ p) / total,
        theta_from_means_tokens=prompts.mean + (outputs.mean - 1.0) / 2.0,
    )


def arrival_statistics(arrival_s: NDArray[np.float64]) -> ArrivalStatistics | None:
    """How requests come; None for fewer than two, or when all come at one instant."""
    duration_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    if duration_s <= 0.0:
        return None
    gaps = np.diff(arrival_s)
    counts = {w: _counts(arrival_s, w) for w in DISPERSION_WINDOWS_S if w <= duration_s}
    dispersion = {w: float(c.var() / c.mean()) for w, c in counts.items() if len(c) >= _MIN_WINDOWS}
    peak_window_s = max((w for w in dispersion if w <= 60.0), default=None)
    peak = None
    if peak_window_s is not None:
        peak = float(counts[peak_window_s].max() / counts[peak_window_s].mean())
    return ArrivalStatistics(
        rate_per_s=len(gaps) / duration_s,
        duration_s=duration_s,
        distinct_times=1 + int(np.count_nonzero(gaps)),
        gap_cv=float(gaps.std() / gaps.mean()),
        longest_gap_s=float(gaps.max()),
        dispersion_by_window_s=dispersion,
        peak_window_s=peak_window_s,
        peak_to_mean_rate=peak,
        rate_window_s=RATE_WINDOW_S,
        rate_by_window_per_s=tuple(
            float(c) / RATE_WINDOW_S for c in _counts(arrival_s, RATE_WINDOW_S)
        ),
    )


def session_statistics(trace: Trace) -> SessionStatistics | None:
    """Turns and think times; None where the trace has no session names."""
    if trace.session_ids is None:
        return None
    _, session, turns = np.unique(
        trace.session_ids.astype(str), return_inverse=True, return_counts=True
    )
    turns_spread = spread(turns.astype(np.float64))
    if turns_spread is None:
        return None
    return SessionStatistics(
        num_sessions=len(turns),
        turns=turns_spread,
        think_s=None if trace.think_s is None else spread(trace.think_s),
        length_s=_session_lengths(trace, session, len(turns)),
    )


def _session_lengths(trace: Trace, session: NDArray[np.int64], num_sessions: int) -> Spread | None:
    time_s = trace.measured.get(SESSION_TIME, trace.arrival_s)
    if time_s is None:
        return None
    first, last = np.full(num_sessions, np.inf), np.full(num_sessions, -np.inf)
    np.fmin.at(first, session, time_s)
    np.fmax.at(last, session, time_s)
    return spread(last - first)


def _counts(arrival_s: NDArray[np.float64], window_s: float) -> NDArray[np.int64]:
    """Arrivals in each whole window since the first arrival: [floor(duration / window)]."""
    relative = arrival_s - arrival_s[0]
    num_windows = int(relative[-1] / window_s)
    index = (relative / window_s).astype(np.int64)
    return np.bincount(index, minlength=num_windows)[:num_windows]


def _json_ready(value: object) -> object:
    if isinstance(value, Mapping):
        return {_key(k): _json_ready(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_json_ready(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _key(key: object) -> str:
    return f"{key:g}" if isinstance(key, float) else str(key)
