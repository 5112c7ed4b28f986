"""Models, version, admin, CORS, tokens: the small routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runtime.server.app import App, make_app
from runtime.server.settings import ServerSettings
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.scripted import VOCABULARY, RawCall, ScriptedEngine, client_of

pytestmark = pytest.mark.anyio
Build = Callable[..., App]


async def test_every_name_of_the_model_is_listed_and_found(build: Build) -> None:
    async with client_of(build()) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["tiny", "other/name"]
        for model in listed["data"]:
            found = (await client.get(f"/v1/models/{model['id']}")).json()
            assert found == model and found["max_model_len"] == 512
            assert found["vocab_size"] == VOCABULARY
        answer = await client.post("/v1/completions", json={"model": "other/name", "prompt": "a"})
        assert answer.json()["model"] == "other/name"
        assert "version" in (await client.get("/version")).json()
        assert (await client.head("/health")).status_code == 200


async def test_the_operator_s_context_limit_counts(build: Build) -> None:
    async with client_of(build(context_tokens=100)) as client:
        answer = await client.post("/v1/completions", json={"prompt": [1] * 100})
        assert answer.status_code == 400 and "100" in answer.json()["error"]["message"]
        assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 100


async def test_tokens_and_texts_go_both_ways(build: Build, text: TextTokenizer) -> None:
    async with client_of(build()) as client:
        body = {"prompt": "hé!", "return_token_strs": True}
        tokens = (await client.post("/tokenize", json=body)).json()
        assert tokens["tokens"] == text.encode("hé!")
        assert (tokens["count"], tokens["max_model_len"]) == (4, 512)
        assert len(tokens["token_strs"]) == 4
        back = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert back.json() == {"prompt": "hé!"}
        chat = {"messages": [{"role": "user", "content": "a"}]}
        rendered = (await client.post("/tokenize", json=chat)).json()["tokens"]
        assert text.decode(rendered) == "<|user|>a\n<|assistant|>"
        empty = (await client.post("/tokenize", json={"prompt": ""})).json()
        assert (empty["count"], empty["tokens"]) == (0, [])


async def test_the_admin_key_opens_the_operator_s_orders(
    build: Build, engine: ScriptedEngine
) -> None:
    async with client_of(build(admin_key="root"), authorization="Bearer root") as client:
        for command in ("reset_prefix_cache", "write_decisions"):
            assert (await client.post(f"/admin/{command}")).json() == {"status": "done"}
        assert engine.controls == ["reset_prefix_cache", "write_decisions"]
        assert (await client.post("/admin/shutdown")).status_code == 404
        engine.fails_with = "disk full"
        failed = await client.post("/admin/write_decisions")
        assert failed.status_code == 500 and "disk full" in failed.json()["error"]["message"]
        engine.is_alive = False
        assert (await client.post("/admin/write_decisions")).status_code == 503


async def test_browsers_of_other_origins_are_answered_as_the_operator_says(build: Build) -> None:
    app = build(cors_origins=("https://good.example",), api_keys=("key",))
    asking: dict[str, str] = {"access-control-request-method": "POST"}
    async with client_of(app) as client:
        good: dict[str, Any] = {"origin": "https://good.example"}
        allowed = await client.options("/v1/completions", headers=good | asking)
        assert allowed.status_code == 200, "a preflight has no key"
        assert allowed.headers["access-control-allow-origin"] == "https://good.example"
        refused = await client.options(
            "/v1/completions", headers=asking | {"origin": "https://bad.example"}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "cors_refused"
        error = await client.post("/v1/completions", headers=good)
        assert error.status_code == 401
        assert error.headers["access-control-allow-origin"] == "https://good.example"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/llm/health", 200),
        ("/llm/v1/models", 401),
        ("/llm/llm/health", 401),
        ("/llmhealth", 401),
        ("/llm", 401),
    ],
)
async def test_routes_behind_a_proxy_are_found_and_guarded(
    build: Build, path: str, status: int
) -> None:
    app = build(root_path="/llm", api_keys=("key",))
    call = RawCall(app, path, b"", method="GET", root_path="/llm")
    await call.ended()
    assert call.status == status


async def test_metrics_are_open_when_the_operator_says_so(build: Build) -> None:
    async with client_of(build(api_keys=("key",), metrics_open=True)) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


async def test_an_engine_that_comes_later_is_served_then(
    engine: ScriptedEngine, text: TextTokenizer
) -> None:
    app = make_app(ServerSettings())
    async with client_of(app) as client:
        assert (await client.get("/ready")).json()["error"]["code"] == "loading"
        app.front.open(engine, text, None)
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        chat = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}
        )
        assert "template" in chat.json()["error"]["message"]


async def test_an_engine_that_cannot_be_opened_is_unhealthy() -> None:
    app = make_app(ServerSettings())
    app.front.failure = "no room"
    async with client_of(app) as client:
        for path in ("/health", "/ready"):
            assert "no room" in (await client.get(path)).json()["error"]["message"]
