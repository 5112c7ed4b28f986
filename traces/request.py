"""One request, and a whole trace of them as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from traces.lengths import LengthPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one user asked of the model.

    Attributes:
        request_id: Name within its trace.
        arrival_s: Seconds since the trace began, >= 0; None where the source has no times.
        prompt_tokens: Tokens of the prompt, >= 1.
        output_tokens: Tokens the model has to generate, >= 1.
        prefix_block_ids: One id per block of the prompt; equal ids mean equal prompts up to the
            end of that block. Empty where the source has none.
        session_id: Conversation the request belongs to, or None.
        think_s: Seconds between the end of the previous turn and this request, or None.
    """

    request_id: str
    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    prefix_block_ids: tuple[int, ...] = ()
    session_id: str | None = None
    think_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All requests of one source, struct of arrays, in order of arrival.

    Attributes:
        name: Short name for reports (file name without endings, or a generator's name).
        source: Where it came from: a path, or a generator's description.
        format: Name of the format that was read, e.g. ``azure-csv``.
        arrival_s: [n] float64, seconds since the first arrival, never decreasing; None where the
            source has no times (lengths alone, or sessions that need a start process).
        prompt_tokens: [n] int64, >= 1.
        output_tokens: [n] int64, >= 1.
        request_ids: [n] names, or None: then the row number is the name.
        session_ids: [n] names, None where a request belongs to none; or None.
        think_s: [n] float64, NaN where unknown; or None.
        block_offsets: [n + 1] int64 into ``block_ids``; None where the source has no blocks.
        block_ids: [total] int64, dense ids of prompt blocks.
        block_tokens: Tokens per block, > 0; 0 where there are no blocks.
        measured: Name -> [n] float64 of times measured at the source (``ttft_s``, ``tpot_s``,
            ``queue_s``, ``e2e_s``), NaN where unknown.
        skipped: Rule -> how many rows were left out because they broke it.
        notes: Facts a user should know, one sentence each (ticks, unsorted input, ...).
    """

    name: str
    source: str
    format: str
    arrival_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    request_ids: NDArray[np.object_] | None = None
    session_ids: NDArray[np.object_] | None = None
    think_s: NDArray[np.float64] | None = None
    block_offsets: NDArray[np.int64] | None = None
    block_ids: NDArray[np.int64] | None = None
    block_tokens: int = 0
    measured: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the last arrival; 0.0 without times."""
        if self.arrival_s is None or len(self) == 0:
            return 0.0
        return float(self.arrival_s[-1] - self.arrival_s[0])

    def lengths(self) -> LengthPairs:
        """The joint law of (prompt, output) tokens of these requests, equal weights."""
        return LengthPairs.from_requests(self.prompt_tokens, self.output_tokens)

    def requests(self) -> Iterator[Request]:
        """One ``Request`` after the other, in order of arrival."""
        for i in range(len(self)):
            blocks: tuple[int, ...] = ()
            if self.block_offsets is not None and self.block_ids is not None:
                lo, hi = int(self.block_offsets[i]), int(self.block_offsets[i + 1])
                blocks = tuple(int(b) for b in self.block_ids[lo:hi])
            session = None if self.session_ids is None else self.session_ids[i]
            think = None if self.think_s is None else float(self.think_s[i])
            yield Request(
                request_id=str(i) if self.request_ids is None else str(self.request_ids[i]),
                arrival_s=None if self.arrival_s is None else float(self.arrival_s[i]),
                prompt_tokens=int(self.prompt_tokens[i]),
                output_tokens=int(self.output_tokens[i]),
                prefix_block_ids=blocks,
                session_id=None if session is None else str(session),
                think_s=None if think is None or np.isnan(think) else think,
            )
