"""What surrounds every request: its id, its key, its errors, its log line, its count.

Pure ASGI: whatever wraps ``receive`` here would hide from the routes that a client has gone.
"""

from __future__ import annotations

import hmac
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.body_reading import ClientGoneError
from runtime.server.call import Call, request_id_of, timeout_of
from runtime.server.errors import ApiError, invalid
from runtime.server.front_end import FrontEnd
from runtime.server.logs import log
from runtime.server.responses import send_error
from runtime.server.telemetry import RequestTracer

PUBLIC_ROUTES = frozenset({"/health", "/ready", "/ping"})
ADMIN_PREFIX = "/admin/"
_CLIENT_GONE_STATUS = 499
_QUIET_ROUTES = PUBLIC_ROUTES | {"/metrics"}


class RequestScope:
    """The outermost application but for CORS.

    Args:
        app: The routes.
        front: The front end.
        routes: For their names.
        tracer: Where spans go; None: nowhere.
    """

    def __init__(
        self, app: ASGIApp, front: FrontEnd, routes: Sequence[Route], tracer: RequestTracer | None
    ) -> None:
        self._app = app
        self._front = front
        self._routes = routes
        self._tracer = tracer
        self._probes: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.time_ns()
        headers = dict(scope["headers"])
        settings = self._front.settings
        call = Call(
            uuid.uuid4().hex,
            self._route_of(scope),
            scope["method"],
            headers,
            time.monotonic(),
            settings.request_timeout_s,
        )
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                marked = [*message["headers"], (b"x-request-id", call.request_id.encode())]
                message = {**message, "headers": marked}
            await send(message)

        scope["call"] = call
        error: ApiError | None = None
        try:
            _refuse_two_ids(scope)
            call.request_id = request_id_of(headers)
            call.timeout_s = timeout_of(headers, settings.request_timeout_s)
            self._check_key(scope, call)
            await self._app(scope, receive, send_marked)
        except ApiError as found:
            error = found
        except HTTPException as found:
            error = _route_error(found, scope)
        except ClientGoneError:
            status = _CLIENT_GONE_STATUS
        except Exception as found:
            log().error("request_failed", request_id=call.request_id, exc_info=found)
            error = ApiError(500, "The request failed inside the server.", code="internal_error")
        finally:
            if error is not None and status == 0:
                call.notes.setdefault("error", error.code or error.message[:200])
                await send_error(send_marked, error)
            self._record(call, status, started_ns)

    def _check_key(self, scope: Scope, call: Call) -> None:
        """Every route but the public ones; unknown ones, too.

        Raises:
            ApiError: 401.
        """
        settings = self._front.settings
        path = _path_of(scope)
        if path in PUBLIC_ROUTES or (path == "/metrics" and settings.metrics_open):
            return
        if path.startswith(ADMIN_PREFIX):
            if settings.admin_key and not _is_one_of(call, (settings.admin_key,)):
                raise _unauthorized("The admin key is missing or wrong.")
            return
        if settings.api_keys and not _is_one_of(call, settings.api_keys):
            raise _unauthorized("The API key is missing or wrong.")

    def _route_of(self, scope: Scope) -> str:
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path
        return "other"

    def _record(self, call: Call, status: int, started_ns: int) -> None:
        self._front.metrics.http[call.route, status] += 1
        seconds = time.monotonic() - call.arrived_s
        notes: dict[str, Any] = {
            "request_id": call.request_id,
            "method": call.method,
            "route": call.route,
            "status": status,
            "seconds": round(seconds, 6),
            **call.notes,
        }
        if self._tracer is not None:
            self._tracer.record(call, status, started_ns, seconds)
        is_probe = call.route in PUBLIC_ROUTES
        quiet = is_probe or (call.route in _QUIET_ROUTES and status == 200)
        (log().debug if quiet else log().info)("request", **notes)
        if is_probe:
            self._note_probe(call, status)

    def _note_probe(self, call: Call, status: int) -> None:
        """One line when a probe's answer is another than before; the first good one is none."""
        before = self._probes.get(call.route, "ok")
        found = "ok" if status == 200 else str(call.notes.get("error", status))
        if found != before and status != _CLIENT_GONE_STATUS:
            self._probes[call.route] = found
            log().warning("probe_changed", route=call.route, before=before, now=found)


def _refuse_two_ids(scope: Scope) -> None:
    if sum(name == b"x-request-id" for name, _ in scope["headers"]) > 1:
        raise invalid("X-Request-Id: at most one.", "x-request-id")


def _path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_one_of(call: Call, keys: Sequence[str]) -> bool:
    """Compares with all of them, in a time that depends on none of their characters."""
    scheme, _, value = call.headers.get(b"authorization", b"").partition(b" ")
    given = value.strip() if scheme.lower() == b"bearer" else b""
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    return any(matches)


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        401,
        f"{message} Send it as 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _route_error(error: HTTPException, scope: Scope) -> ApiError:
    path = _path_of(scope)[:200]
    if error.status_code == 404:
        return ApiError(404, f"There is no route {path}.", code="unknown_url")
    if error.status_code == 405:
        return ApiError(
            405,
            f"{scope['method']} is not allowed on {path}.",
            code="method_not_allowed",
            headers=error.headers,
        )
    return ApiError(error.status_code, error.detail)
