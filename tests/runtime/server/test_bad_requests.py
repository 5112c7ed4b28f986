"""Bad requests: the right status, type and field, and a server that is well afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from runtime.server.app import App
from tests.runtime.server.scripted import ScriptedEngine, client_of

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
BAD = "invalid_request_error"
DEEP = 100_000

# (route, fields beside a good body, status, param)
FIELDS: list[tuple[str, dict[str, Any], int, str | None]] = [
    (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": -3}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 1.5}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": "5"}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": True}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": [5]}, 400, "max_tokens"),
    (COMPLETIONS, {"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
    (COMPLETIONS, {"min_tokens": -1}, 400, "min_tokens"),
    (COMPLETIONS, {"temperature": -1}, 400, "temperature"),
    (COMPLETIONS, {"temperature": 2.01}, 400, "temperature"),
    (COMPLETIONS, {"temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {"top_p": 1.1}, 400, "top_p"),
    (COMPLETIONS, {"top_k": -2}, 400, "top_k"),
    (COMPLETIONS, {"top_k": 0.5}, 400, "top_k"),
    (COMPLETIONS, {"top_k": 10**12}, 400, "top_k"),
    (COMPLETIONS, {"min_p": -0.1}, 400, "min_p"),
    (COMPLETIONS, {"min_p": 1.5}, 400, "min_p"),
    (COMPLETIONS, {"presence_penalty": 2.5}, 400, "presence_penalty"),
    (COMPLETIONS, {"frequency_penalty": -2.5}, 400, "frequency_penalty"),
    (COMPLETIONS, {"repetition_penalty": 0}, 400, "repetition_penalty"),
    (COMPLETIONS, {"repetition_penalty": -1}, 400, "repetition_penalty"),
    (COMPLETIONS, {"n": 0}, 400, "n"),
    (COMPLETIONS, {"n": 129}, 400, "n"),
    (COMPLETIONS, {"n": 1_000_000}, 400, "n"),
    (COMPLETIONS, {"n": 128, "prompt": ["a"] * 9}, 400, "n"),
    (COMPLETIONS, {"best_of": 2}, 400, "best_of"),
    (COMPLETIONS, {"suffix": "end"}, 400, "suffix"),
    (COMPLETIONS, {"logprobs": 21}, 400, "logprobs"),
    (COMPLETIONS, {"logprobs": -1}, 400, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, 400, "logprobs"),
    (COMPLETIONS, {"prompt_logprobs": -1}, 400, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 21}, 400, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    (COMPLETIONS, {"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    (COMPLETIONS, {"stop": ["a", ""]}, 400, "stop[1]"),
    (COMPLETIONS, {"stop": ""}, 400, "stop"),
    (COMPLETIONS, {"stop": 5}, 400, "stop"),
    (COMPLETIONS, {"stop_token_ids": [300]}, 400, "stop_token_ids"),
    (COMPLETIONS, {"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    (COMPLETIONS, {"stop_token_ids": ["a"]}, 400, "stop_token_ids[0]"),
    (COMPLETIONS, {"logit_bias": {"300": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, 400, "logit_bias.x"),
    (COMPLETIONS, {"logit_bias": {"5": 101}}, 400, "logit_bias.5"),
    (COMPLETIONS, {"logit_bias": [1]}, 400, "logit_bias"),
    (COMPLETIONS, {"seed": 2**70}, 400, "seed"),
    (COMPLETIONS, {"seed": 1.5}, 400, "seed"),
    (COMPLETIONS, {"stream": "yes"}, 400, "stream"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (COMPLETIONS, {"cache_salt": ""}, 400, "cache_salt"),
    (COMPLETIONS, {"cache_salt": "x" * 513}, 400, "cache_salt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[1], []]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"prompt": 5}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, [2]]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, 2.5]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[1, True]]}, 400, "prompt[0][1]"),
    (COMPLETIONS, {"prompt": [300]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 512}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 10_000}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a" * 512}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a" * 1_000_000}, 400, "prompt"),
    (COMPLETIONS, {"model": "nope"}, 404, "model"),
    (COMPLETIONS, {"model": 5}, 400, "model"),
    (COMPLETIONS, {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    (
        COMPLETIONS,
        {"response_format": {"type": "json_schema"}},
        400,
        "response_format.json_schema.schema",
    ),
    (COMPLETIONS, {"guided_json": "{"}, 400, "guided_json"),
    (COMPLETIONS, {"guided_json": "[1]"}, 400, "guided_json"),
    (COMPLETIONS, {"guided_json": {"type": "nonsense"}}, 400, "guided_json"),
    (COMPLETIONS, {"guided_regex": "("}, 400, "guided_regex"),
    (COMPLETIONS, {"guided_regex": "a" * 70_000}, 400, "guided_regex"),
    (COMPLETIONS, {"guided_choice": ["a" * 1000] * 100}, 400, "guided_choice"),
    (COMPLETIONS, {"guided_choice": []}, 400, "guided_choice"),
    (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["b"]}, 400, "guided_choice"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": None}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "messages[0].content[0]",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, 400, "messages"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {"top_logprobs": 3}, 400, "top_logprobs"),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    (CHAT, {"logprobs": 5}, 400, "logprobs"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"continue_final_message": True}, 400, "continue_final_message"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "messages"),
    ("/tokenize", {}, 200, None),
    ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
    ("/tokenize", {"prompt": None}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model"),
    ("/detokenize", {"tokens": [1, 300]}, 400, "tokens"),
    ("/detokenize", {"tokens": None}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
]


def good_body(route: str) -> dict[str, Any]:
    if route == CHAT:
        return {"messages": HI}
    return {"tokens": [1]} if route == "/detokenize" else {"prompt": "abc"}


@pytest.mark.parametrize(("route", "fields", "status", "param"), FIELDS)
async def test_a_bad_field_is_named(
    build: Callable[..., App],
    engine: ScriptedEngine,
    route: str,
    fields: dict[str, Any],
    status: int,
    param: str | None,
) -> None:
    app = build()
    async with client_of(app) as client:
        answer = await client.post(route, json=good_body(route) | fields)
        assert answer.status_code == status, answer.text
        if status != 200:
            error = answer.json()["error"]
            assert error["param"] == param
            assert error["type"] == ("not_found_error" if status == 404 else BAD)
            assert set(error) == {"message", "type", "param", "code"} and error["message"]
            assert len(error["message"]) < 1200
        assert engine.submitted == [], "nothing of it has reached the engine"
        await is_well(client, app)


async def is_well(client: Any, app: App) -> None:
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 200
    answer = await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 5})
    assert answer.json()["choices"][0]["text"] == "hello"
    assert (app.front.admission.queued, app.front.admission.active) == (0, 0)
    assert (app.front.admission.queued_tokens, app.front.reader.held_bytes) == (0, 0)


# (body, headers, status, code)
JSON = {"content-type": "application/json"}
BODIES: list[tuple[bytes, dict[str, str], int, str]] = [
    (b"", JSON, 400, "invalid_json"),
    (b"   ", JSON, 400, "invalid_json"),
    (b"{", JSON, 400, "invalid_json"),
    (b'{"prompt": "a"}x', JSON, 400, "invalid_json"),
    (b"{'prompt': 'a'}", JSON, 400, "invalid_json"),
    (b'{"prompt": "a",}', JSON, 400, "invalid_json"),
    (b'{"prompt": NaN}', JSON, 400, "invalid_json"),
    (b'{"prompt": "a", "temperature": Infinity}', JSON, 400, "invalid_json"),
    (b'{"prompt": "a", "temperature": 1e999}', JSON, 400, "invalid_value"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", JSON, 400, "invalid_value"),
    (b'{"prompt": "a", "n": -1' + b"0" * 5000 + b"}", JSON, 400, "invalid_value"),
    (b'{"prompt": "\xff"}', JSON, 400, "invalid_utf8"),
    (b'{"prompt": "a", "x": "\xc3\x28"}', JSON, 400, "invalid_utf8"),
    (b"\xff\xfe{\x00}\x00", JSON, 400, "invalid_utf8"),
    (b'\xef\xbb\xbf{"prompt": "a"}', JSON, 400, "invalid_json"),
    (b'{"prompt": "\\ud83d"}', JSON, 400, "invalid_json"),
    (b'{"prompt": "\\udc00x"}', JSON, 400, "invalid_json"),
    (b'{"prompt": "\x01"}', JSON, 400, "invalid_json"),
    (b"null", JSON, 400, "invalid_type"),
    (b"[]", JSON, 400, "invalid_type"),
    (b'"text"', JSON, 400, "invalid_type"),
    (b"5", JSON, 400, "invalid_type"),
    (b"[" * DEEP, JSON, 400, "invalid_type"),
    (b'{"x": ' + b"[" * DEEP + b"]" * DEEP + b"}", JSON, 400, "invalid_json"),
    (b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", JSON, 400, "invalid_type"),
    (b'{"guided_json":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}", JSON, 400, "invalid_json"),
    (b"{}", JSON, 400, "missing_field"),
    (b"x" * 5000, JSON, 413, "request_too_large"),
    (b'{"prompt": "a"}', {}, 415, "unsupported_media_type"),
    (b'{"prompt": "a"}', {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    (
        b'{"prompt": "a"}',
        {"content-type": "application/x-www-form-urlencoded"},
        415,
        "unsupported_media_type",
    ),
    (b"{}", {"content-type": "multipart/form-data; boundary=x"}, 415, "unsupported_media_type"),
    (
        b'{"prompt": "a"}',
        {"content-type": "application/json; charset=utf-16"},
        415,
        "unsupported_media_type",
    ),
    (b"\x1f\x8b\x08", JSON | {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
    (b'{"prompt": "a"}', JSON | {"x-request-id": "a b"}, 400, ""),
    (b'{"prompt": "a"}', JSON | {"x-request-id": "x" * 129}, 400, ""),
    (b'{"prompt": "a"}', JSON | {"x-request-id": ""}, 400, ""),
    (b'{"prompt": "a"}', JSON | {"x-request-timeout": "soon"}, 400, ""),
    (b'{"prompt": "a"}', JSON | {"x-request-timeout": "0"}, 400, ""),
    (b'{"prompt": "a"}', JSON | {"x-request-timeout": "nan"}, 400, ""),
    (b'{"prompt": "a"}', JSON | {"x-request-timeout": "-1"}, 400, ""),
]


@pytest.mark.parametrize(("body", "headers", "status", "code"), BODIES)
async def test_a_bad_body_or_header_is_refused(
    build: Callable[..., App],
    engine: ScriptedEngine,
    body: bytes,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    app = build(max_body_bytes=4096 if status == 413 else 4 << 20)
    async with client_of(app) as client:
        answer = await client.post(COMPLETIONS, content=body, headers=headers)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["code"] == (code or "invalid_value")
        assert error["type"] == BAD
        assert answer.headers["x-request-id"].isalnum()
        assert engine.submitted == []
        await is_well(client, app)


@pytest.mark.parametrize(
    ("bias", "param", "found"),
    [
        ({"5": 1, "7": 101}, "logit_bias.7", "found 101"),
        ({"5": 1, "x": 3}, "logit_bias.x", 'found the key "x"'),
        ({"5": 1, "7": "2"}, "logit_bias.7", 'found "2"'),
    ],
)
async def test_the_entry_of_an_object_that_is_wrong_is_named(
    build: Callable[..., App], bias: dict[str, Any], param: str, found: str
) -> None:
    async with client_of(build()) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "logit_bias": bias})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(param + ": ") and found in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"guided_json": {"type": "nonsense"}}, "guided_json", "invalid_grammar"),
        ({"guided_choice": [""]}, "guided_choice", "invalid_grammar"),
        ({"prompt": ["a"] * 2000}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 200, "n": 100}, "n", "invalid_value"),
    ],
)
async def test_the_field_that_was_sent_is_the_one_that_is_named(
    build: Callable[..., App], fields: dict[str, Any], param: str, code: str
) -> None:
    async with client_of(build()) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "a"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


async def test_a_grammar_that_the_engine_refuses_is_told_in_words(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    engine.fails_with = "grammar: NoExtensionBias"
    async with client_of(build()) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "guided_json": {}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "guided_json")
    assert error["message"].startswith("guided_json: this form of the answer cannot be compiled")


async def test_two_request_ids_are_refused(build: Callable[..., App]) -> None:
    headers = [("x-request-id", "a"), ("x-request-id", "b")]
    async with client_of(build()) as client:
        answer = await client.get("/v1/models", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")


async def test_a_doubled_key_counts_once_and_harmless_types_are_taken(
    build: Callable[..., App],
) -> None:
    async with client_of(build()) as client:
        for body, kind in (
            (b'{"prompt": "a", "prompt": "b"}', "application/json; charset=UTF-8"),
            (b'{"prompt": "a\\u0000b"}', "application/vnd.api+json"),
            (json.dumps({"prompt": "a", "temperature": 1}).encode(), "Application/JSON"),
        ):
            answer = await client.post(COMPLETIONS, content=body, headers={"content-type": kind})
            assert answer.status_code == 200, answer.text


async def test_a_body_in_pieces_without_a_length_is_cut_off_at_the_limit(
    build: Callable[..., App],
) -> None:
    app = build(max_body_bytes=4096)
    taken = 0

    async def endless() -> Any:
        nonlocal taken
        while taken < 1 << 20:
            taken += 1024
            yield b" " * 1024

    async with client_of(app) as client:
        answer = await client.post(COMPLETIONS, content=endless(), headers=JSON)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        await is_well(client, app)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/%2e%2e/admin", 404, "unknown_url"),
        ("POST", "/admin/reset_prefix_cache", 404, "unknown_url"),
    ],
)
async def test_unknown_routes_and_methods_have_the_same_error_object(
    build: Callable[..., App], method: str, path: str, status: int, code: str
) -> None:
    async with client_of(build()) as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert ("allow" in answer.headers) == (status == 405)
