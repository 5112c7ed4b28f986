"""A completion streamed from a server that speaks OpenAI's API, over the standard library alone."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from runtime.replay_requests import ReplayError

MAX_LINE_BYTES: Final = 16 << 20
OPEN_TIMEOUT_S: Final = 30.0
DONE: Final = b"[DONE]"


class ServerAnswerError(ValueError):
    """The server did not answer as asked; the text holds status and message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a server is.

    Attributes:
        host, port: Of TCP.
        is_secure: Whether TLS is spoken.
        root: What stands before ``/v1``, without a slash at its end.
        api_key: Sent with every request; empty: none.
    """

    host: str
    port: int
    is_secure: bool
    root: str
    api_key: str = ""

    @classmethod
    def of(cls, url: str, api_key: str = "") -> ServerAddress:
        """Of a base address, with or without ``/v1`` at its end.

        Raises:
            ReplayError: If it is none.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ReplayError(f"--url: {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ReplayError(f"--url: must be http://HOST:PORT or https://..., found {url!r}")
        secure = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            host=host,
            port=port or (443 if secure else 80),
            is_secure=secure,
            root=root,
            api_key=api_key,
        )

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Events of a streamed answer, as they come.

        Raises:
            ServerAnswerError: If the status is not 200, or an event is an error.
            OSError: If the connection fails.
        """
        reader, writer = await self._open()
        try:
            payload = json.dumps(body, separators=(",", ":")).encode()
            await self._ask(writer, "POST", path, payload)
            status, headers = await _head(reader)
            lines = _lines(_body(reader, headers))
            if status != 200:
                text = b"".join([line async for line in lines])
                raise ServerAnswerError(f"{status}: {_message(text)}")
            async for line in lines:
                data = line.strip()
                if not data.startswith(b"data:"):
                    continue
                data = data[5:].strip()
                if data == DONE:
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerAnswerError(_message(data))
                yield event
            raise ServerAnswerError("the stream ended without its last event")
        finally:
            writer.close()

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON document.

        Raises:
            ServerAnswerError: If the status is not 200 or it is none.
            OSError: If the connection fails.
        """
        reader, writer = await self._open()
        try:
            await self._ask(writer, "GET", path, b"")
            status, headers = await _head(reader)
            text = b"".join([part async for part in _body(reader, headers)])
        finally:
            writer.close()
        if status != 200:
            raise ServerAnswerError(f"{path}: {status}: {_message(text)}")
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise ServerAnswerError(f"{path}: is not JSON: {error}") from None
        return found

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context() if self.is_secure else None
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            return await asyncio.open_connection(
                self.host, self.port, ssl=context, limit=MAX_LINE_BYTES
            )

    async def _ask(
        self, writer: asyncio.StreamWriter, method: str, path: str, payload: bytes
    ) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.root}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Connection: close",
            "Accept: application/json, text/event-stream",
        ]
        if payload:
            lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + payload)
        await writer.drain()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in lower case."""
    first = (await reader.readline()).decode("latin-1").split(None, 2)
    if len(first) < 2 or not first[0].startswith("HTTP/") or not first[1].isdigit():
        raise ServerAnswerError("this is no HTTP server")
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Pieces of the body, as they come: in chunks, of a known length, or up to the end."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while True:
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            if size == 0:
                return
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    left = int(headers.get("content-length", -1))
    while left != 0:
        piece = await reader.read(1 << 16 if left < 0 else min(left, 1 << 16))
        if not piece:
            return
        left -= len(piece) if left > 0 else 0
        yield piece


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _message(text: bytes) -> str:
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        message = text.decode("utf-8", "replace")
    return " ".join(str(message).split())[:300]
