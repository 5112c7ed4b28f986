"""The ASGI application: routes, and what surrounds them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.server import generate_routes, state_routes, text_routes
from runtime.server.engine_client import EngineClient
from runtime.server.errors import ApiError
from runtime.server.front_end import FrontEnd
from runtime.server.metrics import ServerCollector, make_registry
from runtime.server.request_scope import RequestScope
from runtime.server.settings import ServerSettings
from runtime.server.state_routes import Handler
from runtime.server.telemetry import RequestTracer, make_tracer
from runtime.text.chat_template import ChatTemplate
from runtime.text.tokenizer import TextTokenizer

_EXPOSED_HEADERS = ("X-Request-Id", "Retry-After")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A handler as an ASGI application, so that nothing stands between it and the connection."""

    front: FrontEnd
    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        call = scope["call"]
        call.path_params = scope.get("path_params", {})
        await self.handler(self.front, call, receive, send)


class App:
    """One front end as an ASGI application.

    Attributes:
        front: Its state; ``front.open(...)`` when the engine comes later.
    """

    def __init__(self, asgi: ASGIApp, front: FrontEnd) -> None:
        self._asgi = asgi
        self.front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one scope."""
        await self._asgi(scope, receive, send)


def make_app(
    settings: ServerSettings,
    engine: EngineClient | None = None,
    text: TextTokenizer | None = None,
    template: ChatTemplate | None = None,
    *,
    instances: Sequence[EngineClient] = (),
    tracer: RequestTracer | None = None,
) -> App:
    """The application.

    Args:
        settings: Of the operator.
        engine: What answers; a router of several instances is one, too. None: it is being loaded,
            and ``app.front.open`` is called later.
        text: None: prompts and answers are token ids only.
        template: None: chats are refused.
        instances: The engines behind a router, for metrics.
        tracer: Instead of the one that the settings ask for.

    Raises:
        ServerSettingsError: If spans are wanted and the library is not installed.
    """
    front = FrontEnd(settings)
    if engine is not None:
        front.open(engine, text, template, instances)
    routes = _routes(front)
    tracer = tracer or make_tracer(settings)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        front.start()
        try:
            yield
        finally:
            await front.close()
            if tracer is not None:
                tracer.close()

    # The scope's "app" makes the router raise for unknown routes and methods, not answer itself.
    router = Router(routes, redirect_slashes=False, lifespan=lifespan)

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("app", router)
        await router(scope, receive, send)

    asgi: ASGIApp = RequestScope(routed, front, routes, tracer)
    if settings.cors_origins:
        asgi = Cors(
            asgi,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    return App(asgi, front)


class Cors(CORSMiddleware):
    """Starlette's, with refusals in the shape of all other errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a browser's question whether it may ask."""
        response = super().preflight_response(request_headers)
        if response.status_code >= 400:
            error = ApiError(
                response.status_code, bytes(response.body).decode() + ".", code="cors_refused"
            )
            response.body = error.encoded()
            response.headers["content-type"] = "application/json"
            response.headers["content-length"] = str(len(response.body))
        return response


def _routes(front: FrontEnd) -> list[Route]:
    registry = make_registry(
        ServerCollector(
            front.settings.model_names[0],
            lambda: front.instances,
            front.admission,
            front.metrics,
        )
    )
    handlers: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/completions", generate_routes.completions),
        ("POST", "/v1/chat/completions", generate_routes.chat_completions),
        ("GET", "/v1/models", state_routes.models),
        ("GET", "/v1/models/{model:path}", state_routes.model),
        ("POST", "/tokenize", text_routes.tokenize),
        ("POST", "/detokenize", text_routes.detokenize),
        ("GET", "/health", state_routes.health),
        ("GET", "/ready", state_routes.ready),
        ("GET", "/ping", state_routes.ping),
        ("GET", "/version", state_routes.show_version),
        ("GET", "/metrics", state_routes.metrics_handler(registry)),
        ("GET", "/openapi.json", state_routes.openapi),
    ]
    if front.settings.admin_key:
        handlers += [
            ("POST", f"/admin/{command}", state_routes.control_handler(command))
            for command in ("reset_prefix_cache", "write_decisions")
        ]
    return [
        Route(path, Endpoint(front, handler), methods=[method], include_in_schema=False)
        for method, path, handler in handlers
    ]
