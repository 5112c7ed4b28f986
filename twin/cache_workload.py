"""Where the requests of a cache simulation come from: a generator's name, or a trace file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from models.streams import stream
from traces.errors import TraceError
from traces.prefix_workloads import WORKLOADS, from_trace, prefix_workload
from traces.request import Trace
from twin.cache_requests import CacheRequests, pack_requests

SESSION_GAP_S = 60.0
FORMATS_WITH_BLOCKS = "mooncake-jsonl, qwen-jsonl, agentic-jsonl, dynamo-jsonl, vllm-jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWorkload:
    """Requests and where they come from.

    Attributes:
        name: Short name for reports.
        source: A path, or a generator with its seed.
        format: Of the file, or ``generated``.
        requests: In order of time, with at least one block.
        notes: Facts a user should know, one sentence each.
    """

    name: str
    source: str
    format: str
    requests: CacheRequests
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Name, source and format, JSON-ready."""
        return {"name": self.name, "source": self.source, "format": self.format}


def is_generator(name: str) -> bool:
    """Whether that is a generator's name and no file of it lies here (``./NAME`` is a file)."""
    return name in WORKLOADS and not Path(name).exists()


def generated_workload(
    name: str, *, seed: int = 1, num_requests: int | None = None, tells_category: bool = False
) -> CacheWorkload:
    """The requests of a generator of ``traces.prefix_workloads``.

    Args:
        name: A name of ``WORKLOADS``.
        seed: Of its source of chance, >= 0.
        num_requests: Keep the first so many; None for all.
        tells_category: Policies are told which kind of traffic a request belongs to.

    Raises:
        TraceError: If no request has a block.
        ValueError: If there is no generator of that name.
    """
    drawn = prefix_workload(name, stream(seed, f"prefix-workload-{name}"))
    requests = pack_requests(
        drawn.requests[:num_requests],
        block_tokens=drawn.block_tokens,
        keeps_category=tells_category,
    )
    _require_blocks(requests, name)
    return CacheWorkload(
        name=name, source=f"generator {name}, seed {seed}", format="generated", requests=requests
    )


def traced_workload(
    trace: Trace,
    *,
    seed: int = 1,
    num_requests: int | None = None,
    counts_partial: bool = False,
) -> CacheWorkload:
    """The requests of a trace that names its prompt blocks.

    Args:
        trace: With block ids; sessions without times are started by a Poisson process.
        seed: Of that process, >= 0.
        num_requests: Keep the first so many; None for all.
        counts_partial: A prompt's part-full last block counts as a block that can be stored and
            hit. Stores and engines keep full blocks only.

    Raises:
        TraceError: If the trace has no blocks, or none that counts.
    """
    if trace.block_offsets is None or trace.block_ids is None or len(trace.block_ids) == 0:
        raise TraceError(
            f"{trace.source}: format {trace.format} names no prompt blocks here, and hits are "
            f"blocks; formats that can: {FORMATS_WITH_BLOCKS}, or JSON Lines with a key hash_ids "
            "and --block-tokens; or a generator: " + ", ".join(WORKLOADS)
        )
    timed, notes = _timed(trace, seed)
    if num_requests is not None:
        timed = _first(timed, num_requests)
    whole = replace(timed, prompt_tokens=_block_tokens(timed)) if counts_partial else timed
    requests = pack_requests(
        from_trace(whole).requests, block_tokens=trace.block_tokens, keeps_category=False
    )
    requests = replace(requests, prompt_tokens=timed.prompt_tokens)
    _require_blocks(requests, trace.source)
    return CacheWorkload(
        name=trace.name,
        source=trace.source,
        format=trace.format,
        requests=requests,
        notes=tuple(dict.fromkeys((*trace.notes, *notes))),
    )


def _timed(trace: Trace, seed: int) -> tuple[Trace, tuple[str, ...]]:
    """The trace with arrival times: its own, of started sessions, or one second apart."""
    from traces.readers.agentic import count_sessions, start_sessions

    if trace.arrival_s is not None:
        return trace, ()
    if "session_time_s" not in trace.measured:
        return replace(trace, arrival_s=np.arange(len(trace), dtype=np.float64)), (
            "the trace has no arrival times: its requests are taken one second apart",
        )
    gaps_s = stream(seed, "session-starts").exponential(SESSION_GAP_S, count_sessions(trace))
    return start_sessions(trace, np.cumsum(gaps_s)), (
        f"sessions start by a Poisson process, {SESSION_GAP_S:g} s apart in the mean (seed {seed})",
    )


def _first(trace: Trace, num_requests: int) -> Trace:
    """Its first requests, as far as blocks and times go."""
    assert trace.block_offsets is not None and trace.block_ids is not None
    offsets = trace.block_offsets[: num_requests + 1]
    return Trace(
        name=trace.name,
        source=trace.source,
        format=trace.format,
        arrival_s=None if trace.arrival_s is None else trace.arrival_s[:num_requests],
        prompt_tokens=trace.prompt_tokens[:num_requests],
        output_tokens=trace.output_tokens[:num_requests],
        block_offsets=offsets,
        block_ids=trace.block_ids[: int(offsets[-1])],
        block_tokens=trace.block_tokens,
    )


def _block_tokens(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[n] tokens of each prompt's blocks, were its last one full."""
    assert trace.block_offsets is not None
    return np.diff(trace.block_offsets).astype(np.int64) * trace.block_tokens


def _require_blocks(requests: CacheRequests, source: str) -> None:
    if not requests.num_references:
        raise TraceError(
            f"{source}: no prompt fills a block of {requests.block_tokens} tokens, so there is "
            "nothing to keep"
        )
