"""Answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from runtime.server.choice import Choice, Piece
from runtime.server.job import Job
from runtime.server.logprob_json import CompletionLogprobs, joined, prompt_logprobs
from runtime.server.writer import Frame
from runtime.text.tokenizer import TextTokenizer


class CompletionWriter:
    """Writes ``text_completion`` objects."""

    def __init__(self, job: Job, tokenizer: TextTokenizer | None) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._frame = Frame(job, "text_completion")
        self._logprobs = [
            CompletionLogprobs(
                tokenizer, job.sampling.logprobs or 0, skip_special_tokens=job.skip_special_tokens
            )
            for _ in range(len(job.prompts) * job.n if job.shows_logprobs else 0)
        ]

    def begin(self, choice: Choice) -> bytes:
        """The echoed prompt."""
        if not self._job.echo:
            return b""
        text = self._job.prompt_of(choice.index).text
        return self._frame.choice(
            choice, b'"text":' + orjson.dumps(text), None, self._echoed_logprobs(choice)
        )

    def chunk(self, piece: Piece, choice: Choice) -> bytes:
        """The event of a piece."""
        logprobs = self._logprobs[choice.index].answer(piece.logprobs) if self._logprobs else None
        return self._frame.choice(choice, b'"text":' + orjson.dumps(piece.text), piece, logprobs)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last event."""
        return self._frame.usage(usage)

    def whole(
        self, pieces: Sequence[Piece], choices: Sequence[Choice], usage: dict[str, Any]
    ) -> bytes:
        """The answer in one piece."""
        job = self._job
        return orjson.dumps(
            {
                "id": job.answer_id,
                "object": "text_completion",
                "created": job.created_s,
                "model": job.model,
                "choices": [
                    self._choice(piece, choice)
                    for piece, choice in zip(pieces, choices, strict=True)
                ],
                "usage": usage,
            }
        )

    def _choice(self, piece: Piece, choice: Choice) -> dict[str, Any]:
        job = self._job
        prompt = job.prompt_of(choice.index)
        logprobs = None
        if self._logprobs:
            echoed = self._echoed_logprobs(choice) if job.echo else None
            logprobs = self._logprobs[choice.index].answer(piece.logprobs)
            logprobs = joined(echoed, logprobs) if echoed else logprobs
        found: dict[str, Any] = {
            "index": choice.index,
            "text": prompt.text + piece.text if job.echo else piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if job.shown_prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, choice.state.prompt_logprobs, job.shown_prompt_logprobs
            )
        if job.returns_token_ids:
            found["token_ids"] = piece.tokens
            found["prompt_token_ids"] = prompt.tokens
        return found

    def _echoed_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        prompt = self._job.prompt_of(choice.index)
        return self._logprobs[choice.index].prompt(
            prompt.tokens, choice.state.prompt_logprobs, len(prompt.text)
        )
