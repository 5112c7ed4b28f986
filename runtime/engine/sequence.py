"""One answer in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.engine.frames import NewSequence, SequenceTimes, TokenLogprobs
from runtime.engine.prefix_keys import PrefixKeys
from runtime.engine.sampler import SequenceSampler


@dataclass(slots=True, eq=False)
class EngineSequence:
    """A prompt, what has been generated, and where it stands.

    Attributes:
        number: As policy and KV cache know it.
        new: As it came.
        tokens: Prompt and generated tokens.
        sampler: Chooses its tokens and knows when to end.
        arrived_s: When it came.
        keys: Of its blocks in the prefix store; None without one.
        is_looked_up: Whether the store has been asked since it last waited.
        saved_blocks: Leading blocks that the store has or is being given.
        cached_tokens: Tokens of the prompt that were loaded, at first admission.
        first_scheduled_s, first_token_s: When; None until then.
        preemptions: How often it gave its pages up.
        prompt_logprobs: Of the prompt's tokens from the second on, as far as they are known.
        is_first_output: Whether it has said nothing yet.
    """

    number: int
    new: NewSequence
    tokens: list[int]
    sampler: SequenceSampler
    arrived_s: float
    keys: PrefixKeys | None = None
    is_looked_up: bool = False
    saved_blocks: int = 0
    cached_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_first_output: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were given."""
        return len(self.new.prompt)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are asked for and not all known."""
        asked = self.new.sampling.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.prompt_tokens - 1

    def times(self, now: float) -> SequenceTimes:
        """Seconds in queue, prefill and decoding, if it ends now."""
        started = now if self.first_scheduled_s is None else self.first_scheduled_s
        spoke = now if self.first_token_s is None else self.first_token_s
        return SequenceTimes(started - self.arrived_s, spoke - started, now - spoke)
