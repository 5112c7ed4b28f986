"""The fields that say how tokens are chosen; types and ranges were checked while decoding."""

from __future__ import annotations

import secrets

from runtime.engine.frames import Grammar, Sampling
from runtime.server.bodies import MAX_BIASES, GenerationBody
from runtime.server.errors import invalid
from runtime.server.prompts import check_token


def sampling_of(
    body: GenerationBody,
    *,
    vocabulary: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> Sampling:
    """Sampling of every answer of the request.

    Args:
        body: The request.
        vocabulary: Size.
        max_tokens: As asked for; None: the room of the context.
        logprobs, prompt_logprobs: Likeliest tokens to report.
        grammar: Of the answer.

    Raises:
        ApiError: 400, if fields contradict each other or name unknown tokens.
    """
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max(max_tokens, 1):
        raise invalid(
            f"min_tokens: {min_tokens} is more than max_tokens, {max_tokens}.", "min_tokens"
        )
    stop_token_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
    for token in stop_token_ids:
        check_token(token, vocabulary, "stop_token_ids")
    return Sampling(
        max_tokens=max(max_tokens or 1, 1),
        min_tokens=min_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body, vocabulary),
        seed=secrets.randbits(63) if body.seed is None else body.seed % (1 << 63),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def stops_of(body: GenerationBody) -> tuple[str, ...]:
    """Stop strings, as a tuple."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(dict.fromkeys(body.stop))


def _logit_bias(body: GenerationBody, vocabulary: int) -> dict[int, float]:
    bias = body.logit_bias or {}
    if len(bias) > MAX_BIASES:
        raise invalid(f"logit_bias: at most {MAX_BIASES} tokens, found {len(bias)}.", "logit_bias")
    for token in bias:
        check_token(token, vocabulary, "logit_bias")
    return bias


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
