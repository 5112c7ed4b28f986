"""Answers in one piece, straight to ASGI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import Send

from runtime.server.errors import ApiError

JSON = b"application/json"


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Status, headers and body."""
    all_headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any, status: int = 200) -> None:
    """A JSON value."""
    await send_bytes(send, status, orjson.dumps(value))


async def send_error(send: Send, error: ApiError) -> None:
    """An error object with its headers."""
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send_bytes(send, error.status, error.encoded(), headers=headers)
