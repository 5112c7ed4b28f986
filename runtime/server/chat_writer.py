"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from runtime.server.choice import Choice, Piece
from runtime.server.job import Job
from runtime.server.logprob_json import chat_logprobs, prompt_logprobs
from runtime.server.writer import Frame
from runtime.text.tokenizer import TextTokenizer


class ChatWriter:
    """Writes ``chat.completion`` objects and chunks.

    Args:
        job: The request.
        tokenizer: Of the model.
        top: How many of the likeliest tokens logprobs show.
    """

    def __init__(self, job: Job, tokenizer: TextTokenizer | None, top: int) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._top = top
        self._frame = Frame(job, "chat.completion.chunk")

    def begin(self, choice: Choice) -> bytes:
        """The role."""
        return self._frame.choice(choice, b'"delta":{"role":"assistant","content":""}', None)

    def chunk(self, piece: Piece, choice: Choice) -> bytes:
        """The event of a piece; the last one may have no text."""
        delta = b'"delta":{"content":' + orjson.dumps(piece.text) + b"}"
        return self._frame.choice(
            choice, delta if piece.text else b'"delta":{}', piece, self._logprobs(piece)
        )

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last event."""
        return self._frame.usage(usage)

    def whole(
        self, pieces: Sequence[Piece], choices: Sequence[Choice], usage: dict[str, Any]
    ) -> bytes:
        """The answer in one piece."""
        job = self._job
        answer: dict[str, Any] = {
            "id": job.answer_id,
            "object": "chat.completion",
            "created": job.created_s,
            "model": job.model,
            "choices": [self._choice(piece) for piece in pieces],
            "usage": usage,
        }
        if job.shown_prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, choices[0].state.prompt_logprobs, job.shown_prompt_logprobs
            )
        if job.returns_token_ids:
            answer["prompt_token_ids"] = job.prompts[0].tokens
        return orjson.dumps(answer)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._job.returns_token_ids:
            found["token_ids"] = piece.tokens
        return found

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._job.shows_logprobs:
            return None
        return chat_logprobs(self._tokenizer, piece.logprobs, self._top)
