"""How answers are written; what completions and chats have in common.

A chunk is a preformatted head, the answer's part, a preformatted tail: one small ``orjson`` call a
chunk for the text, none where there is nothing to escape around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from runtime.server.choice import Choice, Piece
from runtime.server.errors import ApiError
from runtime.server.job import Job
from runtime.server.usage import usage_so_far

DONE = b"data: [DONE]\n\n"


class Writer(Protocol):
    """Writes one request's answer, as a stream of events or in one piece."""

    def begin(self, choice: Choice) -> bytes:
        """Events before an answer's first text; may be empty."""

    def chunk(self, piece: Piece, choice: Choice) -> bytes:
        """The event of a piece."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event behind the last piece, without choices."""

    def whole(
        self, pieces: Sequence[Piece], choices: Sequence[Choice], usage: dict[str, Any]
    ) -> bytes:
        """The answer in one piece."""


def error_event(error: ApiError) -> bytes:
    """An error in mid-stream; the stream ends after it."""
    return b"data: " + error.encoded() + b"\n\n"


class Frame:
    """Heads and tails of a request's chunks.

    Args:
        job: The request.
        kind: ``object`` of a chunk.
    """

    def __init__(self, job: Job, kind: str) -> None:
        self._job = job
        fields = {"id": job.answer_id, "object": kind, "created": job.created_s, "model": job.model}
        self._head = b"data: " + orjson.dumps(fields)[:-1]
        self._choice_head = self._head + b',"choices":[{"index":'
        self._tail = b',"usage":null}\n\n' if job.include_usage else b"}\n\n"

    def choice(
        self, choice: Choice, content: bytes, piece: Piece | None, logprobs: Any = None
    ) -> bytes:
        """One chunk.

        Args:
            choice: The answer it belongs to.
            content: ``"text":...`` or ``"delta":...``.
            piece: None for what comes before the first.
            logprobs: Of the piece.
        """
        parts = [self._choice_head, b"%d," % choice.index, content, b',"logprobs":']
        parts.append(b"null" if logprobs is None else orjson.dumps(logprobs))
        if piece is None or piece.finish_reason is None:
            parts.append(b',"finish_reason":null')
        else:
            parts.append(b',"finish_reason":' + orjson.dumps(piece.finish_reason))
            parts.append(b',"stop_reason":' + orjson.dumps(piece.stop_reason))
        if piece is not None and self._job.returns_token_ids:
            parts.append(b',"token_ids":' + orjson.dumps(piece.tokens))
        parts.append(b"}]")
        if self._job.continuous_usage:
            parts.append(b',"usage":' + orjson.dumps(usage_so_far(self._job, choice)) + b"}\n\n")
        else:
            parts.append(self._tail)
        return b"".join(parts)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices."""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"
