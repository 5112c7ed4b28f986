"""What ``/v1/chat/completions`` answers, and streams of both routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runtime.server.app import App
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.scripted import ScriptedEngine, client_of, events_of, saying, text_of

pytestmark = pytest.mark.anyio
Call = Callable[..., Any]
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]}
ANSWER = "hello world, this is a scripted answer"


async def test_messages_go_through_the_template_and_the_answer_fills_the_context(
    call: Call, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    answer = (await call(ASK, CHAT)).json()
    new = engine.submitted[0]
    assert text.decode(new.prompt) == "<|system|>be\n<|user|>hi\n<|assistant|>"
    assert new.sampling.max_tokens == 512 - len(new.prompt)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")


async def test_parts_of_text_are_one_message(
    call: Call, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False}
    assert (await call(body, CHAT)).status_code == 200
    assert text.decode(engine.submitted[0].prompt) == "<|user|>one\ntwo\n"


async def test_max_completion_tokens_comes_before_max_tokens(
    call: Call, engine: ScriptedEngine
) -> None:
    await call(ASK | {"max_tokens": 9, "max_completion_tokens": 4}, CHAT)
    assert engine.submitted[0].sampling.max_tokens == 4


async def test_logprobs_have_token_bytes_and_the_likeliest(call: Call, text: TextTokenizer) -> None:
    body = ASK | {"max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    (entry,) = (await call(body, CHAT)).json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("h", [104])
    assert entry["logprob"] == pytest.approx(-text.encode("h")[0] / 100)
    assert [top["logprob"] for top in entry["top_logprobs"]] == [0, pytest.approx(-0.01)]
    none = (await call(ASK | {"max_tokens": 1, "logprobs": True}, CHAT)).json()
    assert none["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_has_a_role_the_text_one_reason_each_and_done(call: Call, n: int) -> None:
    answer = await call(ASK | {"stream": True, "n": n}, CHAT)
    events = events_of(answer.content)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(n):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"
        assert text_of(chunks, index) == ANSWER
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_last_without_choices_when_asked_for(call: Call) -> None:
    body = ASK | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5}
    *chunks, usage, done = events_of((await call(body, CHAT)).content)
    assert done == "[DONE]"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


async def test_continuous_usage_counts_what_was_sent(call: Call) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, usage, _ = events_of((await call(body)).content)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert usage["usage"]["total_tokens"] == 6


async def test_no_chunk_is_empty_while_a_character_is_incomplete(
    call: Call, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    engine.script = saying(text, "aé漢🎉!")
    body = {"prompt": "abc", "stream": True, "max_tokens": 100}
    *chunks, _ = events_of((await call(body)).content)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "é", "漢", "🎉", "!"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_several_tokens_of_one_output_are_one_chunk(
    call: Call, engine: ScriptedEngine
) -> None:
    engine.stutter = 10
    body = {"prompt": "abc", "stream": True, "max_tokens": 20}
    *chunks, _ = events_of((await call(body)).content)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [ANSWER[:10], ANSWER[10:20]]


async def test_a_stream_of_several_prompts_keeps_them_apart(
    call: Call, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    engine.script = lambda new: [*reversed(new.prompt)]
    body = {"prompt": ["abc", "xyz"], "n": 2, "stream": True, "echo": True}
    *chunks, _ = events_of((await call(body)).content)
    found = [text_of(chunks, index) for index in range(4)]
    assert found == ["abccba", "abccba", "xyzzyx", "xyzzyx"]


async def test_skipped_special_tokens_come_when_they_are_wanted(
    call: Call, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    engine.script = lambda _: [*text.encode("a"), 256, *text.encode("b")]
    body = {"prompt": "abc"}
    assert (await call(body)).json()["choices"][0]["text"] == "ab"
    kept = await call(body | {"skip_special_tokens": False})
    assert kept.json()["choices"][0]["text"] == "a<|end|>b"


async def test_chat_template_variables_reach_the_template(
    build: Callable[..., App], engine: ScriptedEngine, text: TextTokenizer
) -> None:
    from runtime.server.app import make_app
    from runtime.server.settings import ServerSettings
    from runtime.text.chat_template import ChatTemplate

    template = ChatTemplate({"default": "{{ mood }}:{{ messages[0].content }}"}, {})
    async with client_of(make_app(ServerSettings(), engine, text, template)) as client:
        body = ASK | {"chat_template_kwargs": {"mood": "kind"}}
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert text.decode(engine.submitted[0].prompt) == "kind:be"
