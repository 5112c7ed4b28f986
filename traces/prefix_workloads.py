"""Workloads for prefix stores: who asks again for which beginning of a prompt, and when.

Four kinds of traffic, drawn from a source of chance that the caller gives: questions over
documents, chats, tool-using agents, and all of them mixed with one-off prompts. Real traces become
workloads by ``from_trace``.

Every generator runs for ``duration_s`` (half an hour); ``scale`` multiplies documents, sessions and
requests alike at the same rates, by stretching that time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from traces.argument_checks import require_positive
from traces.prefix_workloads_chains import Chain, Chains, Draft, PrefixRequest, PrefixWorkload
from traces.prefix_workloads_trace import from_trace

__all__ = [
    "WORKLOADS",
    "PrefixRequest",
    "PrefixWorkload",
    "agent",
    "chat",
    "docqa",
    "from_trace",
    "mixed",
    "prefix_workload",
]

BLOCK_TOKENS = 64
DURATION_S = 1800.0
NO_SESSION, ONE_OFF = -1, -2
DOCUMENT, CHAT, AGENT, ONCE = range(4)  # categories
FIRST_AGENT = 10_000  # sessions of agents count from here, those of chats from 0


def docqa(rng: np.random.Generator, *, scale: float = 1.0) -> PrefixWorkload:
    """Questions over 600 documents behind one system prompt.

    Documents are asked for by Zipf's law (0.9), have lognormal lengths of mean 3,000 tokens; every
    fourth question on a document was asked before.
    """
    draft = Draft(Chains(BLOCK_TOKENS))
    _ask_documents(rng, draft, _many(600, scale), _many(6000, scale), DURATION_S * scale)
    return draft.workload()


def chat(rng: np.random.Generator, *, scale: float = 1.0) -> PrefixWorkload:
    """900 conversations of 5 turns in the mean behind 24 system prompts, think time 60 s."""
    draft = Draft(Chains(BLOCK_TOKENS))
    _chat_sessions(rng, draft, _many(900, scale), DURATION_S * scale)
    return draft.workload()


def agent(rng: np.random.Generator, *, scale: float = 1.0) -> PrefixWorkload:
    """220 tool-using sessions behind 5 long prompts; short gaps, some branches run side by side."""
    draft = Draft(Chains(BLOCK_TOKENS))
    _agent_sessions(rng, draft, _many(220, scale), DURATION_S * scale)
    return draft.workload()


def mixed(rng: np.random.Generator, *, scale: float = 1.0) -> PrefixWorkload:
    """All three, less of each, and 700 prompts that nobody asks for again."""
    draft = Draft(Chains(BLOCK_TOKENS))
    duration_s = DURATION_S * scale
    _ask_documents(rng, draft, _many(600, scale), _many(2800, scale), duration_s)
    _chat_sessions(rng, draft, _many(600, scale), duration_s)
    _agent_sessions(rng, draft, _many(90, scale), duration_s)
    for time_s in _times(rng, _many(700, scale), duration_s):
        prompt = Chain().extended(_lognormal(rng, 900, 0.7, 64, 8192), draft.chains)
        draft.add(time_s, ONCE, ONE_OFF, prompt, _lognormal(rng, 120, 0.6, 8, 1024))
    return draft.workload()


WORKLOADS: dict[str, Callable[[np.random.Generator], PrefixWorkload]] = {
    "docqa": docqa,
    "chat": chat,
    "agent": agent,
    "mixed": mixed,
}


def prefix_workload(name: str, rng: np.random.Generator) -> PrefixWorkload:
    """The workload of that name.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, found {name!r}")
    return WORKLOADS[name](rng)


def _ask_documents(
    rng: np.random.Generator, draft: Draft, num_documents: int, num_requests: int, duration_s: float
) -> None:
    system = Chain().extended(4 * BLOCK_TOKENS, draft.chains)
    documents: dict[int, Chain] = {}
    questions: dict[int, list[Chain]] = {}
    popularity = _zipf(num_documents, 0.9)
    for time_s in _times(rng, num_requests, duration_s):
        k = int(np.searchsorted(popularity, rng.random()))
        if k not in documents:
            # A lognormal with this sigma has the mean 1.2 times its median.
            tokens = _lognormal(rng, 2500, 0.6, 256, 8192)
            documents[k] = system.extended(tokens, draft.chains)
        asked = questions.setdefault(k, [])
        if asked and rng.random() < 0.25:
            prompt = asked[int(rng.integers(len(asked)))]
        else:
            prompt = documents[k].extended(int(rng.integers(12, 65)), draft.chains)
            asked.append(prompt)
        draft.add(time_s, DOCUMENT, NO_SESSION, prompt, int(rng.integers(32, 129)))


def _chat_sessions(
    rng: np.random.Generator, draft: Draft, num_sessions: int, duration_s: float
) -> None:
    systems = [
        Chain().extended(_lognormal(rng, 500, 0.9, 64, 3000), draft.chains) for _ in range(24)
    ]
    popularity = _zipf(len(systems), 1.0)
    for session, start_s in enumerate(_times(rng, num_sessions, duration_s)):
        chain = systems[int(np.searchsorted(popularity, rng.random()))]
        time_s = start_s
        for _ in range(min(int(rng.geometric(1 / 5.5)), 20)):
            chain = chain.extended(_lognormal(rng, 60, 0.8, 4, 2000), draft.chains)
            output_tokens = _lognormal(rng, 150, 0.85, 8, 1024)
            chain = draft.add(time_s, CHAT, session, chain, output_tokens)
            # Time to read what was written out, then to think.
            time_s += 1.0 + 0.02 * output_tokens + float(rng.exponential(60.0))


def _agent_sessions(
    rng: np.random.Generator, draft: Draft, num_sessions: int, duration_s: float
) -> None:
    systems = [Chain().extended(int(rng.integers(2800, 5600)), draft.chains) for _ in range(5)]
    for session, start_s in enumerate(_times(rng, num_sessions, duration_s), FIRST_AGENT):
        chain = systems[int(rng.integers(len(systems)))]
        chain = chain.extended(_lognormal(rng, 1200, 1.0, 64, 5000), draft.chains)
        branches = [(start_s, chain, _lognormal(rng, 9, 0.5, 3, 40))]
        while branches:
            time_s, chain, turns = branches.pop()
            for turn in range(turns):
                if turn:
                    chain = chain.extended(_lognormal(rng, 170, 1.1, 16, 4096), draft.chains)
                chain = draft.add(time_s, AGENT, session, chain, int(rng.integers(40, 161)))
                time_s += max(0.5, float(rng.exponential(6.0)))
                if rng.random() < 0.04:  # a second attempt from here runs beside the first
                    beside = chain.extended(_lognormal(rng, 170, 1.1, 16, 4096), draft.chains)
                    branches.append((time_s, beside, int(rng.geometric(1 / 6))))


def _many(number: int, scale: float) -> int:
    return max(1, round(number * require_positive("scale", scale)))


def _times(rng: np.random.Generator, number: int, duration_s: float) -> list[float]:
    """A Poisson process that is known to have had ``number`` arrivals: uniform, sorted."""
    times: list[float] = np.sort(rng.uniform(0.0, duration_s, number)).tolist()
    return times


def _zipf(number: int, exponent: float) -> NDArray[np.float64]:
    """[number] cumulated probabilities of the ranks 1.., the last 1."""
    weights = np.arange(1, number + 1, dtype=np.float64) ** -exponent
    total = np.cumsum(weights)
    cumulated: NDArray[np.float64] = total / total[-1]
    return cumulated


def _lognormal(rng: np.random.Generator, median: float, sigma: float, low: int, high: int) -> int:
    return int(min(max(rng.lognormal(np.log(median), sigma), low), high))
