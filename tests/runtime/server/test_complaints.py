"""What users of other servers complained about: the event, then the right behaviour."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from runtime.engine.frames import EngineStats, NewSequence
from runtime.server.app import App
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.scripted import (
    RawCall,
    ScriptedEngine,
    client_of,
    events_of,
    saying,
    text_of,
)

pytestmark = pytest.mark.anyio
Build = Callable[..., App]
Call = Callable[..., Any]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_a_client_that_closes_in_mid_stream_gets_no_further_tokens_computed(
    build: Build, engine: ScriptedEngine
) -> None:
    engine.pause_s = 0.001
    call = RawCall(
        build(), COMPLETIONS, {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
    )
    await call.until(lambda: b"text" in call.received)
    call.go_away()
    await call.ended()
    given = engine.given
    await asyncio.sleep(0.02)
    assert engine.given == given < 400 and not engine.live


async def test_middleware_does_not_hide_the_disconnect_before_the_first_token(
    build: Build, engine: ScriptedEngine
) -> None:
    engine.gate.clear()
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, HI)):
        call = RawCall(build(cors_origins=("*",), api_keys=()), path, body)
        await call.until(lambda: bool(engine.live))
        call.go_away()
        await call.ended()
        assert not engine.live and call.status == 0


@pytest.mark.parametrize("words", ["", "a", "ends with an emoji 🎉"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_no_stream_ends_without_a_finish_reason(
    call: Call, engine: ScriptedEngine, text: TextTokenizer, words: str, path: str
) -> None:
    engine.script = saying(text, words)
    body = {"prompt": "a", **(HI if path == CHAT else {}), "stream": True, "max_tokens": 100}
    *chunks, done = events_of((await call(body, path)).content)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert done == "[DONE]" and [reason for reason in reasons if reason] == ["stop"]
    assert reasons[-1] == "stop" and text_of(chunks) == words


async def test_an_answer_cut_by_length_says_length_in_both_forms(call: Call) -> None:
    body = HI | {"max_tokens": 3}
    whole = (await call(body, CHAT)).json()
    stream = events_of((await call(body | {"stream": True}, CHAT)).content)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert stream[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stutter", [1, 2, 5, 50])
@pytest.mark.parametrize("include", [False, True])
async def test_no_part_of_a_stop_string_reaches_the_client(
    call: Call, engine: ScriptedEngine, text: TextTokenizer, stutter: int, include: bool
) -> None:
    engine.script = saying(text, "one STO two STOP three")
    engine.stutter = stutter
    body = {
        "prompt": "a",
        "max_tokens": 100,
        "stop": ["STOP", "never"],
        "include_stop_str_in_output": include,
    }
    whole = (await call(body)).json()
    *chunks, _ = events_of((await call(body | {"stream": True})).content)
    expected = "one STO two STOP" if include else "one STO two "
    assert whole["choices"][0]["text"] == text_of(chunks) == expected
    assert whole["choices"][0]["stop_reason"] == "STOP"
    assert whole["usage"]["completion_tokens"] == len("one STO two STOP")
    assert len(engine.aborted) == (2 if stutter < 50 else 0)


async def test_an_answer_that_met_its_stop_string_is_dropped_while_its_neighbours_go_on(
    build: Build, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    engine.script = lambda new: (
        text.encode("a.") + [97] * 300 if len(new.prompt) == 1 else [98] * 300
    )
    engine.pause_s = 0.001
    body = {"prompt": ["x", "yy"], "max_tokens": 300, "stop": ".", "stream": True}
    call = RawCall(build(), COMPLETIONS, body)
    await call.until(lambda: b'"stop_reason":"."' in call.received)
    await call.until(lambda: len(engine.live) == 1)
    assert engine.aborted == [engine.submitted[0].sequence_id]
    assert engine.live == {engine.submitted[1].sequence_id}
    call.go_away()
    await call.ended()


async def test_text_held_back_for_a_stop_that_does_not_come_is_not_lost(
    call: Call, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    engine.script = saying(text, "the end: STO")
    body = {"prompt": "a", "max_tokens": 100, "stop": "STOP"}
    whole = (await call(body)).json()["choices"][0]
    *chunks, _ = events_of((await call(body | {"stream": True})).content)
    assert whole["text"] == text_of(chunks) == "the end: STO"
    assert whole["finish_reason"] == "stop" and whole["stop_reason"] is None
    cut = (await call(body | {"max_tokens": 11})).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("the end: ST", "length")


async def test_stop_strings_do_not_count_before_min_tokens(
    call: Call, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    engine.script = saying(text, "a.b.c.d")
    body = {"prompt": "a", "max_tokens": 100, "stop": ".", "min_tokens": 4}
    assert (await call(body)).json()["choices"][0]["text"] == "a.b.c"


@pytest.mark.parametrize("stutter", [1, 3])
async def test_characters_of_several_tokens_come_whole(
    call: Call, engine: ScriptedEngine, text: TextTokenizer, stutter: int
) -> None:
    words = "naïve 漢字 🎉👩‍👩‍👧 и ёж"
    engine.script = saying(text, words)
    engine.stutter = stutter
    body = {"prompt": "a", "max_tokens": 200, "stream": True}
    *chunks, _ = events_of((await call(body)).content)
    assert text_of(chunks) == words
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)


async def test_a_character_cut_by_length_is_one_replacement_character(
    call: Call, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    engine.script = saying(text, "ab🎉")
    assert (await call({"prompt": "a", "max_tokens": 4})).json()["choices"][0]["text"] == "ab\ufffd"


@pytest.mark.parametrize("count", [512, 513, 5000])
async def test_a_prompt_that_fills_the_context_is_400_with_its_length_and_the_limit(
    call: Call, count: int
) -> None:
    answer = await call({"prompt": [5] * count, "max_tokens": 4})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert f"{count} tokens" in message and "512" in message and "-" not in message


async def test_a_prompt_near_the_limit_is_answered_with_what_fits(
    call: Call, engine: ScriptedEngine
) -> None:
    body = {"prompt": [5] * 510, "max_tokens": 10, "ignore_eos": True}
    answer = (await call(body)).json()
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (await call(body | {"prompt": [5] * 511})).json()["usage"]["completion_tokens"] == 1


async def test_a_request_that_can_never_fit_into_the_memory_is_refused_at_once(
    build: Build, engine: ScriptedEngine
) -> None:
    engine.info = msgspec.structs.replace(engine.info, kv_capacity_tokens=100)
    async with client_of(build()) as client:
        never = await client.post(COMPLETIONS, json={"prompt": [5] * 100, "max_tokens": 1})
        cut = await client.post(COMPLETIONS, json={"prompt": [5] * 90, "max_tokens": 50})
    assert never.status_code == 400 and "memory" in never.json()["error"]["message"]
    assert "100 tokens" in never.json()["error"]["message"]
    assert cut.json()["usage"]["completion_tokens"] == 10


async def test_what_the_engine_itself_refuses_is_the_client_s_fault_not_a_hang(
    call: Call, engine: ScriptedEngine
) -> None:
    engine.fails_with = "the memory for keys and values cannot hold 90 tokens of one sequence"
    answer = await call({"prompt": "abc"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_every_salt_reaches_the_engine_as_it_is(build: Build, engine: ScriptedEngine) -> None:
    async with client_of(build()) as client:
        for salt in (None, "a", "b"):
            await client.post(COMPLETIONS, json={"prompt": "x", "cache_salt": salt})
    assert [new.salt for new in engine.submitted] == ["", "a", "b"]


async def test_the_metrics_are_what_the_clients_saw(build: Build, engine: ScriptedEngine) -> None:
    app = build()
    engine.cached_tokens = 1
    bodies: list[dict[str, Any]] = [
        {"prompt": "abc", "max_tokens": 5},
        {"prompt": ["a", "bc"], "n": 2, "max_tokens": 7},
        {"prompt": "abc", "max_tokens": 99, "stop": "wo"},
        {"prompt": "abc", "max_tokens": 0, "echo": True},
        {
            "prompt": "abc",
            "max_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ]
    seen = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    async with client_of(app) as client:
        for body in bodies:
            answer = await client.post(COMPLETIONS, json=body)
            usage = (
                events_of(answer.content)[-2]["usage"]
                if body.get("stream")
                else answer.json()["usage"]
            )
            seen["prompt_tokens"] += usage["prompt_tokens"]
            seen["completion_tokens"] += usage["completion_tokens"]
            seen["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
        scraped = numbers_of((await client.get("/metrics")).text)
    for prefix in ("serving_twin_", "vllm:"):
        assert scraped[f"{prefix}prompt_tokens_total"] == seen["prompt_tokens"]
        assert scraped[f"{prefix}generation_tokens_total"] == seen["completion_tokens"]
        assert scraped[f"{prefix}prompt_tokens_cached_total"] == seen["cached_tokens"]
        assert scraped[f"{prefix}request_success_total[length]"] == 7
        assert scraped[f"{prefix}request_success_total[stop]"] == 1
        assert scraped[f"{prefix}time_to_first_token_seconds_count"] == 8
        assert scraped[f"{prefix}e2e_request_latency_seconds_count"] == 8
        assert scraped[f"{prefix}request_generation_tokens_sum"] == seen["completion_tokens"]
        assert (
            scraped[f"{prefix}inter_token_latency_seconds_count"]
            == seen["completion_tokens"] - 7  # the first of each answer that has tokens
        )


async def test_a_counter_of_the_engine_that_goes_back_does_not_break_the_metrics(
    build: Build, engine: ScriptedEngine
) -> None:
    async with client_of(build()) as client:
        for hits in (10, 3, -1):
            engine.stats = EngineStats(prefix_hits_total=hits, kv_usage=0.5)
            answer = await client.get("/metrics")
            assert answer.status_code == 200
            found = numbers_of(answer.text)
            assert found["vllm:prefix_cache_hits_total"] == hits
            assert found["vllm:kv_cache_usage_perc"] == 0.5


def numbers_of(text: str) -> dict[str, float]:
    """Metric -> value; of labels only a reason is kept, values of others are added."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            if not labels:
                name, _, value = line.rpartition(" ")
            reason = labels.partition('reason="')[2].partition('"')[0]
            key = f"{name}[{reason}]" if reason else name
            found[key] = found.get(key, 0.0) + float(value)
    return found


async def test_health_does_not_say_well_while_the_engine_hangs(
    build: Build, engine: ScriptedEngine
) -> None:
    async with client_of(build(stuck_after_s=30, unready_after_s=5)) as client:
        expected = [(0.0, 200, 200), (6.0, 200, 503), (31.0, 503, 503), (0.1, 200, 200)]
        for silent_s, health, ready in expected:
            engine.silent_s = silent_s
            assert (await client.get("/health")).status_code == health
            assert (await client.get("/ping")).status_code == health
            assert (await client.get("/ready")).status_code == ready
        engine.silent_s = 31.0
        refused = await client.post(COMPLETIONS, json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_stuck"


async def test_a_prompt_of_megabytes_does_not_hold_the_event_loop_up(
    build: Build, engine: ScriptedEngine, text: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing blocks in its thread until other requests have been answered."""
    engine.info = msgspec.structs.replace(engine.info, context_tokens=1 << 23)
    engine.info = msgspec.structs.replace(engine.info, kv_capacity_tokens=1 << 23)
    engine.script = lambda _: [97]
    encode = TextTokenizer.encode
    is_released = False

    def slow(self: TextTokenizer, words: str, **settings: Any) -> list[int]:
        while len(words) > 1 << 20 and not is_released:
            time.sleep(0.001)
        return encode(self, words, **settings)

    monkeypatch.setattr(TextTokenizer, "encode", slow)
    async with client_of(build()) as client:
        large = asyncio.ensure_future(
            client.post(COMPLETIONS, json={"prompt": "word " * 250_000, "max_tokens": 1})
        )
        for _ in range(5):
            assert (await client.get("/health")).status_code == 200
            small = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
            assert small.status_code == 200
        assert not large.done()
        is_released = True
        assert (await large).json()["usage"]["prompt_tokens"] == 1_250_000


async def test_a_prompt_that_cannot_fit_is_refused_without_being_tokenized(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenized")

    async with client_of(build()) as client:
        monkeypatch.setattr(TextTokenizer, "encode", never)
        answer = await client.post(COMPLETIONS, json={"prompt": "word " * 250_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_the_queue_is_bounded_and_a_place_is_taken_before_the_prompt_is_tokenized(
    build: Build, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = build(max_queued_requests=3)
    encode = TextTokenizer.encode
    is_released = False
    tokenized = 0

    def slow(self: TextTokenizer, words: str, **settings: Any) -> list[int]:
        nonlocal tokenized
        tokenized += 1
        while not is_released:
            time.sleep(0.001)
        return encode(self, words, **settings)

    async with client_of(app) as client:
        monkeypatch.setattr(TextTokenizer, "encode", slow)
        waiting = [asyncio.ensure_future(client.post(CHAT, json=HI)) for _ in range(3)]
        while app.front.admission.queued < 3:
            await asyncio.sleep(0)
        statuses = [(await client.post(CHAT, json=HI)).status_code for _ in range(5)]
        assert statuses == [429] * 5
        assert tokenized <= 3
        is_released = True
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3


@pytest.mark.parametrize("bad", [float("-inf"), float("nan"), -1e300])
async def test_a_logprob_that_json_cannot_write_is_a_large_negative_number(
    call: Call, engine: ScriptedEngine, bad: float
) -> None:
    engine.logprob = lambda _: bad
    body = {"prompt": "ab", "max_tokens": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1}
    whole = await call(body)
    choice = whole.json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0, -9999.0, -9999.0]
    assert choice["prompt_logprobs"][1]["0"]["logprob"] == -9999.0
    chat = await call(HI | {"max_tokens": 1, "logprobs": True, "top_logprobs": 1}, CHAT)
    assert chat.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_prompt_logprobs_of_the_whole_vocabulary_cannot_be_asked_for(call: Call) -> None:
    for value in (-1, 21, 10**9):
        for field in ("prompt_logprobs", "logprobs"):
            assert (await call({"prompt": "a", field: value})).status_code == 400


async def test_a_request_of_50_kb_is_answered(build: Build, engine: ScriptedEngine) -> None:
    engine.info = msgspec.structs.replace(engine.info, context_tokens=1 << 17)
    async with client_of(build()) as client:
        for words in ("x" * 50_000, "🎉" * 12_500, "\n" * 50_000, '\\"' * 12_500):
            answer = await client.post(COMPLETIONS, json={"prompt": words, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens"] == len(words.encode())


async def test_no_usage_chunk_comes_unasked_and_every_chunk_has_choices(call: Call) -> None:
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
        body = HI | {"stream": True, "max_tokens": 3, "stream_options": options}
        *chunks, _ = events_of((await call(body, CHAT)).content)
        assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


async def test_an_error_in_mid_stream_is_an_event_like_any_other(
    call: Call, engine: ScriptedEngine
) -> None:
    engine.dies_after = 3
    answer = await call({"prompt": "a", "stream": True})
    assert answer.content.endswith(b"\n\ndata: [DONE]\n\n")
    *chunks, error, _ = events_of(answer.content)
    assert len(chunks) == 3
    assert set(error) == {"error"} and error["error"]["type"] == "service_unavailable_error"


PRIVATE = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("POST", "/invocations"),
    ("GET", "/no/such/route"),
    ("GET", "//health"),
    ("GET", "/health/"),
    ("GET", "/v1/../health"),
    ("POST", "/admin/reset_prefix_cache"),
]


@pytest.mark.parametrize(("method", "path"), PRIVATE)
async def test_the_key_guards_every_route_but_those_of_health(
    build: Build, engine: ScriptedEngine, method: str, path: str
) -> None:
    app = build(api_keys=("one", "two"), admin_key="root")
    for value in (None, "Bearer", "Bearer ", "Bearer three", "Basic one", "one", "bearer onetwo"):
        call = RawCall(
            app,
            path,
            b"{}",
            method=method,
            headers=[(b"authorization", value.encode())] if value else [],
        )
        await call.ended()
        assert call.status == 401, value
        assert json.loads(call.received)["error"]["code"] == "invalid_api_key"
        assert call.headers["www-authenticate"] == "Bearer"
    assert engine.controls == []


async def test_public_routes_need_no_key_and_every_key_opens_the_rest(build: Build) -> None:
    app = build(api_keys=("one", "two"), admin_key="root")
    async with client_of(app) as client:
        for path in ("/health", "/ready", "/ping"):
            assert (await client.get(path)).status_code == 200
        for key in ("one", "two"):
            headers = {"authorization": f"bearer  {key}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
            admin = await client.post("/admin/reset_prefix_cache", headers=headers)
            assert admin.status_code == 401, "an API key is no admin key"
        root = {"authorization": "Bearer root"}
        assert (await client.get("/v1/models", headers=root)).status_code == 401


async def test_memory_does_not_grow_with_the_requests_answered(
    build: Build, engine: ScriptedEngine
) -> None:
    app = build()
    async with client_of(app) as client:

        async def some(count: int) -> None:
            for number in range(count):
                body = {"prompt": f"{number}", "max_tokens": 4, "stream": number % 2 == 0}
                assert (await client.post(COMPLETIONS, json=body)).status_code == 200
            engine.submitted.clear()
            engine.aborted.clear()

        await some(50)
        tracemalloc.start()
        await some(20)
        before = tracemalloc.get_traced_memory()[0]
        await some(200)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert grown < 200_000, "less than a kilobyte per request"


async def test_a_list_of_prompts_is_answered_one_by_one(
    call: Call, engine: ScriptedEngine, text: TextTokenizer
) -> None:
    def shouting(new: NewSequence) -> list[int]:
        return text.encode(text.decode(new.prompt).upper())

    engine.script = shouting
    answer = (await call({"prompt": ["one", "two", "three"]})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ONE", "TWO", "THREE"]
    assert answer["usage"]["prompt_tokens"] == 11
