"""From a workload to the requests of a replay: lengths that the model can serve, who follows whom.

The same workload, seed and options give the same requests as the twin's: arrivals and lengths come
from ``models.workload``. What is cut to fit the model is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.streams import stream
from models.workload import OpenLoopRequests, ResolvedWorkload

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NOBODY = -1


class ReplayError(ValueError):
    """A replay that cannot be done as asked; names the option and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLimits:
    """What of a workload is replayed.

    Attributes:
        max_requests: Only the first so many; None: all.
        scale_tokens: Factor on all lengths, > 0, for models smaller than the source's.
        context_tokens: Most tokens of prompt and answer together; None: no limit is known.
        rate_per_s: Mean rate of the arrivals after stretching their times; None: as they are.
    """

    max_requests: int | None = None
    scale_tokens: float = 1.0
    context_tokens: int | None = None
    rate_per_s: float | None = None

    def __post_init__(self) -> None:
        for option, value in (
            ("--scale-tokens", self.scale_tokens),
            ("--rate", self.rate_per_s),
        ):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ReplayError(f"{option}: must be finite and > 0, found {value!r}")
        if self.max_requests is not None and self.max_requests < 1:
            raise ReplayError(f"--requests: must be >= 1, found {self.max_requests}")
        if self.context_tokens is not None and self.context_tokens < 2:
            raise ReplayError(f"--context: must be >= 2, found {self.context_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayRequests:
    """Requests in the order of the workload.

    Attributes:
        name: Of the workload.
        arrival_s: [n] seconds, non-decreasing.
        prompt_tokens, output_tokens: [n] as they are asked for, >= 1.
        asked_prompt_tokens, asked_output_tokens: [n] of the workload, before scaling and cutting.
        follows: [n] the earlier request whose answer this one waits for; ``NOBODY``: it comes at
            its ``arrival_s``.
        think_s: [n] seconds from that answer's end to this request; NaN where it follows nobody.
        session: [n] number of the conversation; ``NOBODY``: none.
        block_offsets, block_ids: [n + 1] into [total]; None where the workload has no blocks.
        block_tokens: Of a block, scaled; 0: there are none.
        cut_prompts, cut_outputs: Requests that were shortened to fit the model.
        cut_tokens: Tokens taken off them.
        notes: What a reader of the figures should know.
    """

    name: str
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    asked_prompt_tokens: Ints
    asked_output_tokens: Ints
    follows: Ints
    think_s: Floats
    session: Ints
    block_offsets: Ints | None = None
    block_ids: Ints | None = None
    block_tokens: int = 0
    cut_prompts: int = 0
    cut_outputs: int = 0
    cut_tokens: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)


def replay_requests(
    workload: ResolvedWorkload, *, seed: int, limits: ReplayLimits | None = None
) -> ReplayRequests:
    """The requests that the twin would serve for this workload and seed, fitted to the model.

    Raises:
        ScenarioError: If the workload has no arrival times and none are configured.
        ReplayError: If nothing is left.
    """
    limits = limits or ReplayLimits()
    given = workload.open_loop_requests(stream(seed, "arrivals"))
    count = min(len(given.arrival_s), limits.max_requests or len(given.arrival_s))
    if not count:
        raise ReplayError(f"{workload.source}: has no requests")
    arrival_s = given.arrival_s[:count].astype(np.float64)
    if limits.rate_per_s is not None:
        span = float(arrival_s[-1] - arrival_s[0])
        if span <= 0:
            raise ReplayError("--rate: all requests come at once, their times cannot be stretched")
        arrival_s = arrival_s * ((count - 1) / limits.rate_per_s / span)
    notes = list(workload.notes)
    scale, block_tokens = _scaled(given, limits, notes)
    asked = given.prompt_tokens[:count], given.output_tokens[:count]
    prompts, outputs = _times(asked[0], scale), _times(asked[1], limits.scale_tokens)
    fitted = _fit(prompts, outputs, limits.context_tokens)
    follows, think_s, session = _sessions(given, count)
    offsets, ids = _blocks(given, count)
    if given.trace is None and workload.trace is not None:
        notes.append(
            "lengths are drawn from the trace's law (workload.arrivals): its prompt blocks and "
            "sessions take no part"
        )
    if offsets is None and session.max(initial=NOBODY) > NOBODY:
        notes.append(
            "the trace names no prompt blocks: the prompts of a session are beginnings of one text"
        )
    if limits.scale_tokens != 1.0:
        notes.append(f"all lengths are {limits.scale_tokens:g} times those of the workload")
    return ReplayRequests(
        name=workload.name,
        arrival_s=arrival_s,
        prompt_tokens=fitted[0],
        output_tokens=fitted[1],
        asked_prompt_tokens=asked[0],
        asked_output_tokens=asked[1],
        follows=follows,
        think_s=think_s,
        session=session,
        block_offsets=offsets,
        block_ids=ids,
        block_tokens=block_tokens,
        cut_prompts=int((fitted[0] < prompts).sum()),
        cut_outputs=int((fitted[1] < outputs).sum()),
        cut_tokens=int((prompts - fitted[0]).sum() + (outputs - fitted[1]).sum()),
        notes=tuple(notes),
    )


def _scaled(given: OpenLoopRequests, limits: ReplayLimits, notes: list[str]) -> tuple[float, int]:
    """Factor on prompts, and tokens of a block: blocks stay whole, so prompts follow them."""
    trace = given.trace
    if trace is None or trace.block_ids is None or not trace.block_tokens:
        return limits.scale_tokens, 0
    block_tokens = max(1, round(trace.block_tokens * limits.scale_tokens))
    scale = block_tokens / trace.block_tokens
    if not math.isclose(scale, limits.scale_tokens):
        notes.append(
            f"prompts are {scale:.4g} times those of the trace, so that its blocks of "
            f"{trace.block_tokens} tokens become {block_tokens} whole tokens"
        )
    return scale, block_tokens


def _times(tokens: Ints, scale: float) -> Ints:
    return tokens if scale == 1.0 else np.maximum(np.rint(tokens * scale), 1).astype(np.int64)


def _fit(prompts: Ints, outputs: Ints, context_tokens: int | None) -> tuple[Ints, Ints]:
    """The ends of prompts go first, then those of answers; both keep at least one token."""
    prompts = np.maximum(prompts, 1)  # a length law may have no prompt; a model needs a token
    if context_tokens is None:
        return prompts, outputs
    outputs = np.minimum(outputs, context_tokens - 1)
    return np.minimum(prompts, context_tokens - outputs), outputs


def _sessions(given: OpenLoopRequests, count: int) -> tuple[Ints, Floats, Ints]:
    """Whom each request follows, after how long, and its session."""
    follows = np.full(count, NOBODY, dtype=np.int64)
    think_s = np.full(count, np.nan)
    session = np.full(count, NOBODY, dtype=np.int64)
    trace, row = given.trace, given.row
    if trace is None or row is None or trace.session_ids is None:
        return follows, think_s, session
    rounds = np.cumsum(np.concatenate(([0], np.diff(row[:count]) < 0)))
    numbers: dict[tuple[int, object], int] = {}
    last: dict[int, int] = {}
    for i in range(count):
        name = trace.session_ids[row[i]]
        if name is None:
            continue
        session[i] = numbers.setdefault((int(rounds[i]), name), len(numbers))
        before = last.get(int(session[i]))
        last[int(session[i])] = i
        thinks = math.nan if trace.think_s is None else float(trace.think_s[row[i]])
        if before is not None and not math.isnan(thinks):
            follows[i], think_s[i] = before, thinks
    return follows, think_s, session


def _blocks(given: OpenLoopRequests, count: int) -> tuple[Ints | None, Ints | None]:
    trace, row = given.trace, given.row
    if trace is None or row is None or trace.block_offsets is None or trace.block_ids is None:
        return None, None
    begin, end = trace.block_offsets[row[:count]], trace.block_offsets[row[:count] + 1]
    offsets = np.concatenate(([0], np.cumsum(end - begin))).astype(np.int64)
    parts = [trace.block_ids[b:e] for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
    return offsets, np.concatenate(parts)
