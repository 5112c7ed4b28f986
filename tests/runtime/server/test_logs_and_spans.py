"""What is written about requests, and what is not."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runtime.server.app import App, make_app
from runtime.server.logs import log_as_json
from runtime.server.settings import ServerSettings, ServerSettingsError
from runtime.server.telemetry import RequestTracer, make_tracer
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.scripted import ScriptedEngine, client_of

pytestmark = pytest.mark.anyio
SECRET = "my secret question"


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_a_request_is_one_json_line_with_its_counts_and_without_its_text(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    stream = io.StringIO()
    log_as_json(stream=stream)
    engine.cached_tokens = 3
    async with client_of(build(), **{"X-Request-Id": "r1"}) as client:
        await client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 5})
        await client.post("/v1/completions", json={"prompt": SECRET, "stream": True, "stop": "w"})
        await client.post("/v1/completions", json={"prompt": SECRET, "temperature": SECRET})
        await client.get("/health")
    first, second, third = lines_of(stream)
    expected = {
        "event": "request",
        "request_id": "r1",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "model": "tiny",
        "prompt_tokens": len(SECRET),
        "completion_tokens": 5,
        "cached_tokens": 3,
        "finish_reason": "length",
        "level": "info",
    }
    assert {name: first[name] for name in expected} == expected
    assert first["seconds"] >= first["ttft_s"] > 0
    assert second["finish_reason"] == "stop" and second["completion_tokens"] == 7
    assert (third["status"], third["error"]) == (400, "invalid_type")
    assert SECRET not in stream.getvalue() and "hello" not in stream.getvalue()


async def test_probes_are_no_lines_but_their_changes_are(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    stream = io.StringIO()
    log_as_json(stream=stream)
    async with client_of(build()) as client:
        await client.get("/ready")
        engine.is_alive = False
        for _ in range(3):
            assert (await client.get("/ready")).status_code == 503
        engine.is_alive = True
        await client.get("/ready")
    found = [(line["event"], line["level"], line["now"]) for line in lines_of(stream)]
    expected = [("probe_changed", "warning", now) for now in ("engine_gone", "ok")]
    assert found == expected


async def test_texts_are_logged_only_when_asked_for(build: Callable[..., App]) -> None:
    for is_stream in (False, True):
        stream = io.StringIO()
        log_as_json(stream=stream)
        async with client_of(build(log_prompts=True)) as client:
            body = {"prompt": SECRET, "max_tokens": 5, "stream": is_stream}
            await client.post("/v1/completions", json=body)
        (line,) = lines_of(stream)
        assert line["prompt"] == [SECRET] and line["answer"] == ["hello"]


async def test_a_span_follows_the_client_s_trace(
    engine: ScriptedEngine, text: TextTokenizer
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = make_app(ServerSettings(), engine, text, tracer=RequestTracer(provider))
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    async with client_of(app, **headers) as client:
        await client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 5})
        engine.fails_with = "broken"
        await client.post("/v1/completions", json={"prompt": SECRET})
    good, bad = exporter.get_finished_spans()
    assert f"{good.context.trace_id:032x}" == trace and good.name == "POST /v1/completions"
    attributes = dict(good.attributes or {})
    assert attributes["gen_ai.usage.input_tokens"] == len(SECRET)
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert good.end_time is not None and good.start_time is not None
    assert good.end_time > good.start_time
    assert not bad.status.is_ok
    assert SECRET not in good.to_json() + bad.to_json()


def test_spans_without_the_library_are_refused_when_the_server_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    assert make_tracer(ServerSettings()) is None
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ServerSettingsError, match="not installed"):
        make_tracer(ServerSettings(otlp_endpoint="http://127.0.0.1:4318/v1/traces"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_names": ()}, "model_names"),
        ({"model_names": ("",)}, "model_names"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"max_queued_requests": -1}, "max_queued_requests is -1"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s"),
        ({"stuck_after_s": 0}, "stuck_after_s"),
        ({"drain_timeout_s": -1}, "drain_timeout_s"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"api_keys": ("schlüssel",)}, "ASCII"),
        ({"api_keys": ("a",), "admin_key": "a"}, "admin_key"),
        ({"context_tokens": 1}, "context_tokens is 1"),
        ({"root_path": "llm"}, "root_path"),
    ],
)
def test_a_setting_out_of_its_range_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ServerSettingsError, match=words):
        ServerSettings(**settings)
