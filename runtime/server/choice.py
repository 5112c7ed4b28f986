"""One answer growing: tokens to text, stop strings, logprobs, the reason it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.engine.frames import SequenceOutput, TokenLogprobs
from runtime.server.job import Job
from runtime.text.detokenizer import Detokenizer
from runtime.text.stops import StopFinder, StopStrings
from runtime.text.tokenizer import TextTokenizer


@dataclass(slots=True)
class Piece:
    """What has become certain about an answer since the piece before.

    Attributes:
        index: Of the answer in the request.
        text: To be added.
        tokens: Behind the text; not yet shown before.
        logprobs: One per token, where asked for.
        finish_reason: On the last piece: ``stop`` or ``length``.
        stop_reason: The stop string or token that ended it.
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def joined(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one answer, in order, as one."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return Piece(
        last.index,
        "".join([piece.text for piece in pieces]),
        [token for piece in pieces for token in piece.tokens],
        [entry for piece in pieces for entry in piece.logprobs],
        last.finish_reason,
        last.stop_reason,
    )


@dataclass(slots=True)
class ChoiceState:
    """Counts of one answer.

    Attributes:
        num_tokens: Generated so far; the end token does not count, nor what follows a stop.
        cached_tokens: Of its prompt, not computed.
        prompt_logprobs: Of the prompt from its second token on.
        finish_reason: Once it has ended.
    """

    num_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    has_begun: bool = False
    stop_reason: str | int | None = None
    held_tokens: list[int] = field(default_factory=list)
    held_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Choice:
    """Turns one sequence's outputs into pieces of its answer.

    Args:
        index: Of the answer in the request.
        job: The request.
        stops: Automaton of the request's stop strings, shared by its answers.
        tokenizer: None: answers are token ids without text.
    """

    def __init__(
        self, index: int, job: Job, stops: StopStrings, tokenizer: TextTokenizer | None
    ) -> None:
        self.index = index
        self.state = ChoiceState()
        self._job = job
        self._tokenizer = tokenizer
        self._finder = StopFinder(stops, include_stop=job.include_stop)
        self._looks_for_stops = bool(job.stops)
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=job.skip_special_tokens)
            if tokenizer is not None
            else None
        )

    def push(self, output: SequenceOutput) -> Piece | None:
        """What this output makes certain; None if that is nothing.

        The reasons ``abort`` and ``error`` are the caller's to handle.
        """
        state = self.state
        if state.finish_reason is not None:
            return None
        if not state.has_begun:
            state.has_begun = True
            state.cached_tokens = output.cached_tokens
            state.prompt_logprobs = output.prompt_logprobs
        text = ""
        if not self._job.is_scored_only:
            for place, token in enumerate(output.tokens):
                state.num_tokens += 1
                state.held_tokens.append(token)
                if output.logprobs:
                    state.held_logprobs.append(output.logprobs[place])
                text += self._advance(token)
                if state.finish_reason is not None:
                    return self._piece(text)
        if output.finish_reason is not None:
            text += self._finish(output)
        if not text and state.finish_reason is None and self._detokenizer is not None:
            return None
        return self._piece(text)

    def _advance(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        fresh = self._detokenizer.push((token,))
        if not self._looks_for_stops:
            return fresh
        if self.state.num_tokens <= self._job.sampling.min_tokens:
            return self._finder.pass_over(fresh)
        text, found = self._finder.push(fresh)
        if found is None and (rest := self._detokenizer.peek()) and self._finder.would_stop(rest):
            more, found = self._finder.push(rest)
            text += more
        if found is not None:
            self.state.finish_reason = "stop"
            self.state.stop_reason = found
        return text

    def _finish(self, output: SequenceOutput) -> str:
        state = self.state
        text = ""
        token = output.stop_token
        if self._detokenizer is not None:
            asked_for = token is not None and token in self._job.sampling.stop_token_ids
            if asked_for and token is not None and self._job.include_stop:
                text = self._finder.pass_over(self._detokenizer.push((token,)))
            rest = self._detokenizer.finish()
            more, found = self._finder.push(rest)
            text += more + self._finder.finish()
            if found is not None:
                state.finish_reason, state.stop_reason = "stop", found
                return text
        state.finish_reason = "length" if self._job.is_scored_only else output.finish_reason
        if token is not None and token in self._job.sampling.stop_token_ids:
            state.stop_reason = token
        return text

    def _piece(self, text: str) -> Piece:
        state = self.state
        piece = Piece(
            self.index,
            text,
            state.held_tokens,
            state.held_logprobs,
            state.finish_reason,
            state.stop_reason,
        )
        state.held_tokens, state.held_logprobs = [], []
        return piece
