"""The one stream of requests that every system of an experiment serves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.prefix_settings import (
    DocumentsWorkload,
    GeneratedWorkload,
    PoissonRequests,
    PrefixScenario,
    TracedWorkload,
)
from models.streams import stream
from models.strict_tables import ScenarioError
from traces.errors import TraceError
from traces.prefix_workloads import PrefixRequest, from_trace, prefix_workload
from traces.request import Trace

MAX_BLOCKS = 50_000_000


@dataclass(frozen=True, slots=True)
class RequestStream:
    """Requests in order of arrival, with the chance that routing needs.

    Attributes:
        name: What it is, for reports.
        prompt_tokens: The one prompt length of a documents experiment; None: lengths vary.
        block_tokens: Tokens of a block.
        requests: In order of arrival.
        draws: [n] in 0..1, one a request: a router's chance, the same under every system.
    """

    name: str
    prompt_tokens: int | None
    block_tokens: int
    requests: tuple[PrefixRequest, ...]
    draws: tuple[float, ...]


def request_streams(
    scenario: PrefixScenario, replication: int, trace: Trace | None = None
) -> list[RequestStream]:
    """The streams of one replication: one a prompt length, or one in all.

    Args:
        scenario: The question.
        replication: Which repetition.
        trace: Of a recorded workload, already read; None for all others.

    Raises:
        ScenarioError: If the workload cannot be made.
        TraceError: If the trace has no prefix blocks.
    """
    settings, seed = scenario.workload, scenario.run.seed
    if isinstance(settings, DocumentsWorkload):
        return [
            document_requests(
                settings,
                tokens,
                block_tokens=scenario.prefix.block_tokens,
                seed=seed,
                replication=replication,
            )
            for tokens in settings.prompt_tokens
        ]
    rng = stream(seed, "prefix workload", replication)
    name: str
    if isinstance(settings, GeneratedWorkload):
        drawn, name = prefix_workload(settings.generator, rng), settings.generator
    else:
        assert trace is not None
        drawn, name = from_trace(trace, rng), trace.name
    if isinstance(settings, GeneratedWorkload) and scenario.prefix.block_tokens != (
        drawn.block_tokens
    ):
        raise ScenarioError(
            f"[prefix] block_tokens: {name} has blocks of {drawn.block_tokens} tokens, "
            f"found {scenario.prefix.block_tokens}"
        )
    kept = drawn.requests[: settings.num_requests]
    if not kept:
        raise TraceError(f"{name}: has no request")
    scaled = tuple(
        PrefixRequest(
            one.time_s / settings.rate_scale,
            one.category,
            one.session,
            one.prompt,
            one.generated,
            one.prompt_tokens,
        )
        for one in kept
    )
    return [RequestStream(name, None, drawn.block_tokens, scaled, _draws(seed, replication, kept))]


def document_requests(
    settings: DocumentsWorkload,
    prompt_tokens: int,
    *,
    block_tokens: int,
    seed: int,
    replication: int,
) -> RequestStream:
    """m questions about each of D documents, in random order.

    A prompt is ``prompt_tokens`` long; its last ``question_tokens`` belong to it alone. The order
    of documents, the arrivals and the routing draws are the same at every prompt length.
    """
    count = settings.documents * settings.questions
    shared = (prompt_tokens - settings.question_tokens) // block_tokens
    own = prompt_tokens // block_tokens - shared
    num_blocks = settings.documents * shared + count * own
    if num_blocks > MAX_BLOCKS:
        raise ScenarioError(
            f"[workload] documents: {num_blocks:,} different blocks are more than {MAX_BLOCKS:,}; "
            "ask for fewer documents or shorter prompts, or give larger blocks"
        )
    order = stream(seed, "documents", replication).permutation(
        np.repeat(np.arange(settings.documents), settings.questions)
    )
    if isinstance(settings.arrivals, PoissonRequests):
        gaps = stream(seed, "arrivals", replication).exponential(
            1.0 / settings.arrivals.rate_per_s, count
        )
    else:
        gaps = np.full(count, settings.arrivals.gap_s)
    first_own = 1 + settings.documents * shared
    requests = tuple(
        PrefixRequest(
            time_s=time_s,
            category=0,
            session=document,
            prompt=(
                *range(1 + document * shared, 1 + (document + 1) * shared),
                *range(first_own + at * own, first_own + (at + 1) * own),
            ),
            generated=(),
            prompt_tokens=prompt_tokens,
        )
        for at, (time_s, document) in enumerate(
            zip((np.cumsum(gaps) - gaps[0]).tolist(), order.tolist(), strict=True)
        )
    )
    return RequestStream(
        f"{prompt_tokens:,} tokens",
        prompt_tokens,
        block_tokens,
        requests,
        _draws(seed, replication, requests),
    )


def read_workload_trace(settings: TracedWorkload) -> Trace:
    """The trace of a recorded workload.

    Raises:
        TraceError: If it cannot be read, or has no prefix blocks.
    """
    from traces.readers import read_trace

    trace = read_trace(settings.trace, format=settings.format, skip_bad_rows=settings.skip_bad_rows)
    if trace.block_offsets is None:
        raise TraceError(
            f"{settings.trace}: has no ids of prompt blocks; Mooncake, Dynamo and agentic traces "
            "have them"
        )
    return trace


def _draws(seed: int, replication: int, requests: tuple[PrefixRequest, ...]) -> tuple[float, ...]:
    return tuple(stream(seed, "routing", replication).random(len(requests)).tolist())
