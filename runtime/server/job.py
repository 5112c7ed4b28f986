"""A request that has been checked: what the engine gets and how the answer is to look."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec

from runtime.engine.frames import NewSequence, Sampling

_SEED_BITS = 63


@dataclass(slots=True)
class Prompt:
    """One prompt.

    Attributes:
        tokens: Its ids, at least one.
        text: As it was given or decodes; only where it is echoed.
        max_tokens: Of its answers, cut to the room that the context leaves.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    text: str = ""


@dataclass(slots=True, kw_only=True)
class Job:
    """One request.

    Attributes:
        request_id: Of the whole request.
        answer_id: What the answer calls itself (``cmpl-...``).
        model: Name under which it was asked for.
        created_s: Unix time.
        prompts: At least one.
        sampling: Of every answer; ``max_tokens`` and ``seed`` are replaced one by one.
        n: Answers per prompt.
        form_field: That asked for the answers' form; empty: none did.
        stops: Strings that end an answer.
        include_stop: They stay in the text.
        skip_special_tokens: They are not part of the text.
        salt: Of the tenant.
        session: What the client calls requests that belong together; for routing alone.
        stream, include_usage, continuous_usage: How it is written.
        echo: The prompt's text comes first.
        is_scored_only: Nothing is generated; the engine's one token is dropped.
        shows_logprobs: Answers carry logprobs.
        shown_prompt_logprobs: Likeliest tokens shown beside the prompts' own (vLLM's field); None:
            the field is not there.
        returns_token_ids: Answers carry ids beside the text.
    """

    request_id: str
    answer_id: str
    model: str
    created_s: int
    prompts: list[Prompt]
    sampling: Sampling
    n: int = 1
    form_field: str = ""
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    salt: str = ""
    session: str = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    is_scored_only: bool = False
    shows_logprobs: bool = False
    shown_prompt_logprobs: int | None = None
    returns_token_ids: bool = False
    sequences: list[NewSequence] = field(default_factory=list)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that answer ``index`` belongs to."""
        return self.prompts[index // self.n]

    def make_sequences(self, prefix: str) -> list[NewSequence]:
        """One per answer, prompts in order, the answers of a prompt next to each other.

        Args:
            prefix: Makes their ids unique among all requests.
        """
        return [
            NewSequence(
                sequence_id=f"{prefix}-{index}",
                prompt=prompt.tokens,
                sampling=msgspec.structs.replace(
                    self.sampling,
                    max_tokens=prompt.max_tokens,
                    seed=choice_seed(self.sampling.seed, index % self.n),
                ),
                salt=self.salt,
                session=self.session,
            )
            for index in range(len(self.prompts) * self.n)
            for prompt in (self.prompt_of(index),)
        ]


def choice_seed(seed: int, choice: int) -> int:
    """Seed of a prompt's answer number ``choice``: the first has the request's own.

    The others are hashed from it, so that answer 1 of seed 7 is not answer 0 of seed 8.
    """
    if choice == 0:
        return seed % (1 << _SEED_BITS)
    digest = hashlib.sha256(f"{seed}:{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << _SEED_BITS)
