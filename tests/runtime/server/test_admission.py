"""The queue: who is let in, who is told to come again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.server.admission import Admission, Place
from runtime.server.app import App
from runtime.server.errors import ApiError
from runtime.server.settings import ServerSettings
from tests.runtime.server.scripted import RawCall, ScriptedEngine, client_of

ASK = {"prompt": "abc", "max_tokens": 30}


@pytest.mark.anyio
async def test_more_waiting_requests_than_allowed_are_429_with_retry_after(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build(max_queued_requests=2, retry_after_s=7)
    engine.gate.clear()
    calls = [RawCall(app, "/v1/completions", ASK) for _ in range(2)]
    await calls[0].until(lambda: len(engine.live) == 2)
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=ASK)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        engine.gate.set()
        for call in calls:
            await call.ended()
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
        scraped = (await client.get("/metrics")).text
    assert app.front.admission.rejected == {"queued_requests": 1}
    for name in ("serving_twin_", "vllm:"):
        labels = 'engine="0",model_name="tiny",reason="queued_requests"'
        assert f"{name}admission_rejections_total{{{labels}}} 1.0" in scraped


@pytest.mark.anyio
async def test_a_place_is_free_again_with_the_first_token(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build(max_queued_requests=1)
    engine.pause_s = 0.002
    calls = []
    for number in range(4):
        call = RawCall(app, "/v1/completions", ASK | {"stream": True})
        await call.until(lambda n=number: len(engine.submitted) == n + 1)
        await call.until(lambda: app.front.admission.queued == 0)
        calls.append(call)
    assert len(engine.live) > 1, "several are answering at once"
    for call in calls:
        await call.ended()
        assert call.status == 200


@pytest.mark.anyio
async def test_prompt_tokens_that_wait_are_limited_but_one_prompt_alone_is_let_in(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build(max_queued_tokens=100)
    engine.gate.clear()
    large = {"prompt": "a" * 300, "max_tokens": 1}
    first = RawCall(app, "/v1/completions", large)
    await first.until(lambda: len(engine.live) == 1)
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=ASK)
        assert answer.status_code == 429
        assert "tokens" in answer.json()["error"]["message"]
        engine.gate.set()
        await first.ended()
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    assert app.front.admission.rejected == {"queued_tokens": 1}


@pytest.mark.anyio
async def test_a_flood_is_answered_at_once_and_everything_is_well_after_it(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build(max_queued_requests=8)
    engine.gate.clear()
    async with client_of(app) as client:
        running = [
            asyncio.ensure_future(client.post("/v1/completions", json=ASK)) for _ in range(200)
        ]
        while sum(task.done() for task in running) < 192 or len(engine.submitted) < 8:
            await asyncio.sleep(0)
        assert len(engine.submitted) == 8, "memory is bounded by the queue"
        engine.gate.set()
        answers = await asyncio.gather(*running)
        statuses = [answer.status_code for answer in answers]
        assert (statuses.count(200), statuses.count(429)) == (8, 192)
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200


@pytest.mark.anyio
async def test_bodies_under_way_are_limited_in_sum(build: Callable[..., App]) -> None:
    app = build(max_body_bytes=1000, max_bodies_bytes=1500)
    headers = {"content-type": "application/json"}
    messages: asyncio.Queue[Any] = asyncio.Queue()
    await messages.put({"type": "http.request", "body": b" " * 900, "more_body": True})

    async def drop(_: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
    }
    first = asyncio.ensure_future(app(scope, messages.get, drop))
    while app.front.reader.held_bytes < 900:
        await asyncio.sleep(0)
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", content=b" " * 900, headers=headers)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "bodies_full"
        assert answer.headers["retry-after"] == "1"
    await messages.put({"type": "http.disconnect"})
    await first
    assert app.front.reader.held_bytes == 0


@pytest.mark.anyio
async def test_retry_after_can_be_left_out(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    app = build(return_retry_after=False)
    engine.is_alive = False
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=ASK)
    assert answer.status_code == 503 and "retry-after" not in answer.headers


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "grow", "started", "leave"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_the_counts_add_up_whatever_happens(steps: list[tuple[str, int]]) -> None:
    admission = Admission(ServerSettings(max_queued_requests=5, max_queued_tokens=20))
    places: list[Place] = []
    for step, number in steps:
        try:
            if step == "enter":
                places.append(admission.enter())
            elif places:
                place = places[number % len(places)]
                if step == "grow" and place.waiting:
                    admission.grow(place, number % 4 + 1, number * 2)
                elif step == "started":
                    place.started(number)
                elif step == "leave":
                    place.leave()
                    places.remove(place)
        except ApiError as error:
            assert error.status == 429
        assert admission.queued == sum(place.waiting for place in places) <= 5
        assert admission.queued_tokens == sum(place.waiting_tokens for place in places)
        assert admission.active == len(places)
        assert min(admission.queued, admission.queued_tokens, admission.active) >= 0
    for place in places:
        place.leave()
        place.leave()
    assert (admission.queued, admission.queued_tokens, admission.active) == (0, 0, 0)
