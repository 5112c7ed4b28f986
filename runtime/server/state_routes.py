"""What is served and how it is: models, version, health, metrics, the description of all that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import Receive, Send

from runtime.server.call import Call
from runtime.server.engine_client import EngineGoneError
from runtime.server.errors import ApiError
from runtime.server.front_end import FrontEnd
from runtime.server.openapi import document
from runtime.server.preparing import model_of
from runtime.server.responses import send_bytes, send_json

Handler = Callable[[FrontEnd, Call, Receive, Send], Awaitable[None]]
_CONTROL_TIMEOUT_S = 60.0


def program_version() -> str:
    """Of the installed package."""
    try:
        return version("serving-twin")
    except PackageNotFoundError:
        return "0"


async def health(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """200 while it makes sense to wait, 503 when only a new start helps."""
    found = front.unhealthy()
    if found is not None:
        raise front.unavailable(*found)
    await send_json(send, {"status": "ok", **_instances(front)})


async def ready(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """200 when requests should be sent here."""
    found = front.unready()
    if found is not None:
        raise front.unavailable(*found)
    await send_json(send, {"status": "ready", **_instances(front)})


async def ping(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """As ``/health``, under SageMaker's name."""
    await health(front, call, receive, send)


async def show_version(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """Of this program."""
    await send_json(send, {"version": program_version()})


async def models(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """All names of the model."""
    names = front.settings.model_names
    data = [_model(front, name) for name in names]
    await send_json(send, {"object": "list", "data": data})


async def model(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """One name of the model."""
    name = call.path_params["model"]
    if not name:
        raise ApiError(404, "The name of a model is missing.", code="model_not_found")
    await send_json(send, _model(front, model_of(name, front.settings)))


async def openapi(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
    """The description of these routes."""
    await send_json(send, document(front.settings, program_version()))


def metrics_handler(registry: CollectorRegistry) -> Handler:
    """``/metrics`` in Prometheus' text form."""

    async def metrics(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
        await send_bytes(
            send, 200, generate_latest(registry), CONTENT_TYPE_LATEST.encode("latin-1")
        )

    return metrics


def control_handler(command: str) -> Handler:
    """An order of the operator to the engine."""

    async def control(front: FrontEnd, call: Call, receive: Receive, send: Send) -> None:
        engine = front.engine
        if engine is None:
            raise front.unavailable("loading", "The model is being loaded.")
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                await engine.control(command)
        except TimeoutError:
            raise ApiError(504, f"{command}: the engine did not answer.", code="timeout") from None
        except EngineGoneError:
            raise front.unavailable("engine_gone", "The engine has ended.") from None
        except RuntimeError as error:
            raise ApiError(500, f"{command}: {error}", code="engine_error") from None
        await send_json(send, {"status": "done"})

    return control


def _instances(front: FrontEnd) -> dict[str, Any]:
    """How many of several engines are there."""
    if len(front.instances) < 2:
        return {}
    alive = sum(instance.is_alive for instance in front.instances)
    return {"instances": {"alive": alive, "configured": len(front.instances)}}


def _model(front: FrontEnd, name: str) -> dict[str, Any]:
    engine = front.engine
    return {
        "id": name,
        "object": "model",
        "created": front.created_s,
        "owned_by": "serving-twin",
        "root": front.settings.model_names[0],
        "parent": None,
        "max_model_len": None if engine is None else front.tokenizing.limit.tokens,
        "vocab_size": None if engine is None else front.tokenizing.vocabulary,
    }
