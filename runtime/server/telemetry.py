"""One OpenTelemetry span per request, where the library is installed and an endpoint is set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.server.call import Call
from runtime.server.settings import ServerSettings, ServerSettingsError

_ATTRIBUTES = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "finish_reason": "gen_ai.response.finish_reasons",
    "ttft_s": "gen_ai.server.time_to_first_token",
    "error": "error.type",
}


class RequestTracer:
    """Writes a span when a request has ended; prompts and answers are never in it.

    Args:
        provider: An ``opentelemetry.sdk.trace.TracerProvider``.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("serving_twin")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: Call, status: int, started_ns: int, seconds: float) -> None:
        """A span of the client's trace, if it sent ``traceparent``."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            f"{call.method} {call.route}",
            context=self._propagator.extract(_text_headers(call.headers)),
            kind=SpanKind.SERVER,
            start_time=started_ns,
            attributes={
                "http.request.method": call.method,
                "http.route": call.route,
                "http.response.status_code": status,
                "gen_ai.response.id": call.request_id,
                **{
                    attribute: call.notes[note]
                    for note, attribute in _ATTRIBUTES.items()
                    if note in call.notes
                },
            },
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=started_ns + int(seconds * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def make_tracer(settings: ServerSettings) -> RequestTracer | None:
    """The tracer that the settings ask for.

    Raises:
        ServerSettingsError: If an endpoint is set and the library is not installed.
    """
    if not settings.otlp_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ServerSettingsError(
            f"otlp_endpoint is set, but {error.name} is not installed"
            " (pip install 'serving-twin[telemetry]')"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "serving-twin"}))
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_endpoint))
    )
    return RequestTracer(provider)


def _text_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
