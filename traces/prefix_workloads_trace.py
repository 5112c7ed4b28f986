"""Workloads for prefix stores out of traces that name their prompt blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.prefix_workloads_chains import PrefixRequest, PrefixWorkload, numbered
from traces.readers.agentic import count_sessions, start_sessions
from traces.request import Trace


def from_trace(
    trace: Trace,
    rng: np.random.Generator | None = None,
    *,
    session_gap_s: float = 60.0,
    block_tokens: int | None = None,
) -> PrefixWorkload:
    """The prompts of a trace as chains of blocks.

    Only full blocks count. Outputs are not in the chains: traces do not say which later blocks hold
    them, so what a next turn repeats of an output is a miss once, as the trace shows it.

    Args:
        trace: With block ids.
        rng: Starts the sessions of a trace without times, as a Poisson process; only needed there.
        session_gap_s: Mean seconds between two session starts, > 0.
        block_tokens: A multiple of the trace's block size, for coarser blocks; None keeps its own.

    Raises:
        TraceError: If the trace has no block ids, or no times and no sessions to start.
        ValueError: If times are needed and ``rng`` is None, or a number breaks its rule.
    """
    if trace.block_offsets is None or trace.block_ids is None or trace.block_tokens < 1:
        raise TraceError(f"{trace.source}: has no ids of prompt blocks, a prefix store needs them")
    factor = _factor(trace.block_tokens, block_tokens)
    if trace.arrival_s is None:
        trace = _started(trace, rng, session_gap_s)
    chains = _Known()
    size = trace.block_tokens * factor
    sessions = _session_numbers(trace)
    offsets, ids = trace.block_offsets, trace.block_ids
    assert offsets is not None and ids is not None and trace.arrival_s is not None
    times, prompts = trace.arrival_s.tolist(), trace.prompt_tokens.tolist()
    requests = []
    for i, (begin, tokens) in enumerate(zip(offsets[:-1].tolist(), prompts, strict=True)):
        last = begin + factor - 1
        named = ids[last : min(begin + tokens // trace.block_tokens, int(offsets[i + 1])) : factor]
        requests.append(
            PrefixRequest(times[i], 0, sessions[i], chains.blocks(named.tolist()), (), tokens)
        )
    return numbered(requests, chains.parent, size)


class _Known:
    """Blocks met so far. An id under another parent is another block: its prefix differs."""

    def __init__(self) -> None:
        self.parent: list[int] = [0]
        self._block: dict[tuple[int, int], int] = {}

    def blocks(self, ids: list[int]) -> tuple[int, ...]:
        chain: list[int] = []
        above = 0
        for name in ids:
            block = self._block.setdefault((above, name), len(self.parent))
            if block == len(self.parent):
                self.parent.append(above)
            chain.append(block)
            above = block
        return tuple(chain)


def _factor(own: int, wanted: int | None) -> int:
    if wanted is None:
        return 1
    if wanted < own or wanted % own:
        raise ValueError(f"block_tokens must be a multiple of the trace's {own}, found {wanted!r}")
    return wanted // own


def _started(trace: Trace, rng: np.random.Generator | None, session_gap_s: float) -> Trace:
    if not (np.isfinite(session_gap_s) and session_gap_s > 0):
        raise ValueError(f"session_gap_s must be > 0, found {session_gap_s!r}")
    if rng is None:
        raise ValueError(f"{trace.source}: has no times; give rng to start its sessions")
    gaps: NDArray[np.float64] = rng.exponential(session_gap_s, count_sessions(trace))
    return start_sessions(trace, np.cumsum(gaps))


def _session_numbers(trace: Trace) -> list[int]:
    if trace.session_ids is None:
        return [-1] * len(trace)
    number: dict[object, int] = {}
    return [
        -1 if name is None else number.setdefault(name, len(number)) for name in trace.session_ids
    ]
