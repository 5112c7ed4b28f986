"""``POST /v1/completions`` and ``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Send

from runtime.server.answering import Answering
from runtime.server.call import Call
from runtime.server.errors import ApiError
from runtime.server.front_end import FrontEnd
from runtime.server.job import Job
from runtime.server.preparing import prepare_chat, prepare_completion
from runtime.server.prompts import Tokenizing
from runtime.server.settings import ServerSettings
from runtime.server.writer import Writer

_INLINE_BYTES = 2048
"""Bodies up to this size cost less to tokenize than the way to a thread and back."""
_SLOW_FIELDS = (b"guided_", b"structured_outputs", b"response_format")
"""A grammar is compiled to see whether it can be; that may take a second."""

Prepare = Callable[[bytes, str, ServerSettings, Tokenizing], tuple[Job, Writer]]


async def completions(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """Continue prompts."""
    await _generate(front, call, receive, send, prepare_completion, inline_bytes=_INLINE_BYTES)


async def chat_completions(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """Answer a chat; its template is a program, so it always runs in a thread."""
    await _generate(front, call, receive, send, prepare_chat, inline_bytes=0)


async def _generate(
    front: FrontEnd,
    call: Call,
    receive: Receive,
    send: Send,
    prepare: Prepare,
    *,
    inline_bytes: int,
) -> None:
    front.require_open()
    raw = await front.reader.read(call.headers, receive)
    place = front.enter()
    try:
        arguments = (raw, call.request_id, front.settings, front.tokenizing)
        if len(raw) <= inline_bytes and not any(name in raw for name in _SLOW_FIELDS):
            job, writer = prepare(*arguments)
        else:
            job, writer = await _before_deadline(front, call, prepare, arguments)
        call.notes["model"] = job.model
        tokens = sum(len(prompt.tokens) for prompt in job.prompts) * job.n
        front.admission.grow(place, len(job.prompts) * job.n, tokens)
        await Answering(front, call, job, writer, place).run(receive, send)
    finally:
        place.leave()


async def _before_deadline(
    front: FrontEnd,
    call: Call,
    prepare: Prepare,
    arguments: tuple[bytes, str, ServerSettings, Tokenizing],
) -> tuple[Job, Writer]:
    try:
        async with asyncio.timeout(call.left_s()):
            return await front.in_pool(prepare, *arguments)
    except TimeoutError:
        raise ApiError(
            504,
            f"The prompt was not tokenized within {call.timeout_s:g} s.",
            code="request_timeout",
        ) from None
