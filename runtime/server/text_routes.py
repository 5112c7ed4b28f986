"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Send

from runtime.server.bodies import DetokenizeBody, TokenizeBody
from runtime.server.body_reading import decode_body
from runtime.server.call import Call
from runtime.server.errors import invalid
from runtime.server.front_end import FrontEnd
from runtime.server.preparing import model_of
from runtime.server.prompts import Tokenizing, check_token
from runtime.server.responses import send_json
from runtime.server.settings import ServerSettings

_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """Token ids of a prompt or a chat."""
    await _in_pool(front, call, receive, send, _tokens)


async def detokenize(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """Text of token ids."""
    await _in_pool(front, call, receive, send, _text)


async def _in_pool(front: FrontEnd, call: Call, receive: Receive, send: Send, work: Any) -> None:
    """It waits in the same queue as answers do, or many large texts would fill the memory."""
    front.require_open()
    raw = await front.reader.read(call.headers, receive)
    place = front.enter()
    try:
        answer = await front.in_pool(work, raw, front.settings, front.tokenizing)
    finally:
        place.leave()
    await send_json(send, answer)


def _tokens(raw: bytes, settings: ServerSettings, tokenizing: Tokenizing) -> dict[str, Any]:
    body = decode_body(raw, _TOKENIZE)
    model_of(body.model, settings)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Exactly one of prompt and messages is needed.", "prompt")
    tokenizer = tokenizing.tokenizer
    if tokenizer is None:
        raise invalid("The model has no tokenizer.", "model")
    tokens: tuple[int, ...]
    if body.prompt is not None:
        tokens = (
            tokenizing.encode(
                body.prompt,
                add_special_tokens=body.add_special_tokens is not False,
                param="prompt",
            )
            if body.prompt
            else ()
        )
    else:
        text = tokenizing.render(
            body.messages or (),
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
        tokens = tokenizing.encode(
            text, add_special_tokens=bool(body.add_special_tokens), param="messages"
        )
    strings = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": tokenizing.limit.tokens,
        "tokens": tokens,
        "token_strs": strings,
    }


def _text(raw: bytes, settings: ServerSettings, tokenizing: Tokenizing) -> dict[str, Any]:
    body = decode_body(raw, _DETOKENIZE)
    model_of(body.model, settings)
    if tokenizing.tokenizer is None:
        raise invalid("The model has no tokenizer.", "model")
    if body.tokens:
        for token in (min(body.tokens), max(body.tokens)):
            check_token(token, tokenizing.vocabulary, "tokens")
    text = tokenizing.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return {"prompt": text}
