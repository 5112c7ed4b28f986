"""Tokens of a request as OpenAI counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.server.choice import Choice
from runtime.server.job import Job


def usage_of(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    """Prompts count once whatever ``n``; of the cache, what their first answers found there."""
    prompt = sum(len(each.tokens) for each in job.prompts)
    generated = sum(choice.state.num_tokens for choice in choices)
    cached = sum(choice.state.cached_tokens for choice in choices[:: job.n])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_so_far(job: Job, choice: Choice) -> dict[str, Any]:
    """Of one answer, for streams that tell it with every chunk."""
    prompt = len(job.prompt_of(choice.index).tokens)
    generated = choice.state.num_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": choice.state.cached_tokens},
    }
