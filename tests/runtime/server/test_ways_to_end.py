"""Clients that vanish, deadlines, engines that end, shutdowns: nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from runtime.server.app import App
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.scripted import RawCall, ScriptedEngine, client_of, events_of

pytestmark = pytest.mark.anyio
ASK = {"prompt": "abc", "max_tokens": 30}


def is_free(app: App, engine: ScriptedEngine) -> bool:
    admission = app.front.admission
    return not engine.live and (admission.queued, admission.active) == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("given", [0, 3])
async def test_a_client_that_goes_away_frees_its_sequences_at_once(
    build: Callable[..., App], engine: ScriptedEngine, stream: bool, given: int
) -> None:
    app = build()
    engine.pause_s = 0.001
    if not given:
        engine.gate.clear()
    call = RawCall(app, "/v1/completions", ASK | {"stream": stream, "n": 2})
    await call.until(lambda: len(engine.live) == 2 and engine.given >= given)
    call.go_away()
    await call.ended()
    assert is_free(app, engine)
    assert sorted(engine.aborted) == sorted(new.sequence_id for new in engine.submitted)
    assert engine.given < 60
    assert app.front.metrics.finished == {"abort": 2}


async def test_a_client_that_goes_while_its_body_is_read_leaves_nothing(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build()
    scope_messages = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> Any:
        return next(scope_messages, {"type": "http.disconnect"})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app(
        {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
        },
        receive,
        send,
    )
    assert sent == [] and is_free(app, engine) and app.front.reader.held_bytes == 0
    assert app.front.metrics.http == {("/v1/completions", 499): 1}


async def test_a_deadline_before_the_first_token_is_504(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build()
    engine.gate.clear()
    async with client_of(app, **{"X-Request-Timeout": "0.05"}) as client:
        for stream in (False, True):
            answer = await client.post("/v1/completions", json=ASK | {"stream": stream})
            assert answer.status_code == 504
            assert answer.json()["error"]["type"] == "timeout_error"
        assert is_free(app, engine)


async def test_a_deadline_in_mid_stream_is_an_event_and_the_end(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build(request_timeout_s=0.1)
    engine.pause_s = 0.02
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=ASK | {"stream": True})
    *chunks, error, done = events_of(answer.content)
    assert answer.status_code == 200 and chunks and done == "[DONE]"
    assert error["error"]["code"] == "request_timeout"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert is_free(app, engine)


async def test_a_client_that_stops_reading_holds_no_pages_after_its_deadline(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build(request_timeout_s=0.1)
    engine.pause_s = 0.02
    call = RawCall(app, "/v1/completions", ASK | {"stream": True})
    call.reads.clear()
    await call.until(lambda: bool(engine.live))
    await call.until(lambda: not engine.live)
    assert engine.given < 30
    call.reads.set()
    await call.ended()
    assert is_free(app, engine)


async def test_the_operator_s_timeout_bounds_the_client_s(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    engine.gate.clear()
    async with client_of(build(request_timeout_s=0.05), **{"X-Request-Timeout": "60"}) as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 504


@pytest.mark.parametrize("dies_after", [0, 4])
async def test_an_engine_that_dies_is_503_and_mid_stream_an_event(
    build: Callable[..., App], engine: ScriptedEngine, dies_after: int
) -> None:
    app = build()
    engine.dies_after = dies_after
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=ASK | {"stream": True})
        if dies_after:
            *chunks, error, done = events_of(answer.content)
            assert answer.status_code == 200 and len(chunks) == 4 and done == "[DONE]"
        else:
            error = answer.json()
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert error["error"]["code"] == "engine_gone"
        whole = await client.post("/v1/completions", json=ASK)
        assert whole.status_code == 503
        health = await client.get("/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "engine_gone"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
    assert is_free(app, engine)


async def test_an_engine_that_gives_no_reason_is_an_error_not_a_short_answer(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    engine.ends_silently = True
    async with client_of(build()) as client:
        whole = await client.post("/v1/completions", json=ASK)
        stream = await client.post("/v1/completions", json=ASK | {"stream": True})
    assert whole.status_code == 503
    assert "error" in events_of(stream.content)[-2]


async def test_an_error_of_the_engine_is_500_in_its_words(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    engine.fails_with = "not finite"
    app = build()
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=ASK | {"stream": True})
    assert answer.status_code == 500
    assert "not finite" in answer.json()["error"]["message"]
    assert app.front.metrics.finished == {"error": 1}


async def test_one_failing_answer_of_several_ends_the_others(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build()
    engine.pause_s = 0.005
    engine.dies_after = 10
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=ASK | {"n": 4})
    assert answer.status_code == 503
    assert is_free(app, engine)


async def test_a_fault_of_the_program_is_500_without_its_words(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    def fail(_: Any) -> Any:
        raise ZeroDivisionError("secret")

    engine.script = fail
    app = build()
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=ASK)
        engine.script = lambda _: [1]
        again = await client.post("/v1/completions", json=ASK)
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"
    assert again.status_code == 200 and is_free(app, engine)


async def test_a_fault_of_the_program_in_mid_stream_is_an_event_too(
    build: Callable[..., App], engine: ScriptedEngine, text: TextTokenizer
) -> None:
    engine.script = lambda _: [*text.encode("ab"), -1]  # no tokenizer has such a token
    app = build()
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=ASK | {"stream": True})
        whole = await client.post("/v1/completions", json=ASK)
    *chunks, error, done = events_of(answer.content)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
    assert error["error"]["code"] == "internal_error" and done == "[DONE]"
    assert whole.status_code == 500 and is_free(app, engine)


async def test_a_slow_body_is_408(build: Callable[..., App], engine: ScriptedEngine) -> None:
    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    app = build(body_timeout_s=0.05)
    async with client_of(app) as client:
        answer = await client.post(
            "/v1/completions", content=slow(), headers={"content-type": "application/json"}
        )
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "body_timeout"
    assert app.front.reader.held_bytes == 0


async def test_a_drain_lets_running_answers_end_and_refuses_new_ones(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build()
    engine.gate.clear()
    call = RawCall(app, "/v1/completions", ASK | {"stream": True})
    await call.until(lambda: bool(engine.live))
    drain = asyncio.ensure_future(app.front.drain(10))
    await asyncio.sleep(0)
    async with client_of(app) as client:
        ready = await client.get("/ready")
        assert ready.status_code == 503 and ready.json()["error"]["code"] == "draining"
        assert (await client.get("/health")).status_code == 200
        refused = await client.post("/v1/completions", json=ASK)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        engine.gate.set()
        await call.ended()
        assert await drain
    assert events_of(call.received)[-2]["choices"][0]["finish_reason"] == "length"
    assert app.front.admission.rejected == {"draining": 1}


async def test_a_drain_ends_what_takes_too_long(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build()
    engine.pause_s = 0.02
    stream = RawCall(app, "/v1/completions", ASK | {"stream": True})
    whole = RawCall(app, "/v1/completions", ASK)
    await stream.until(lambda: b"text" in stream.received and len(engine.live) == 2)
    assert not await app.front.drain(0.01)
    await stream.ended()
    await whole.ended()
    *_, error, done = events_of(stream.received)
    assert error["error"]["code"] == "server_shutdown" and done == "[DONE]"
    assert whole.status == 503
    assert is_free(app, engine)
