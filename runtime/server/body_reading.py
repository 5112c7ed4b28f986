"""From the bytes of a request's body to a checked record."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from runtime.server.errors import ApiError, invalid
from runtime.server.settings import ServerSettings

Body = TypeVar("Body", bound=msgspec.Struct)

_SHOWN_CHARACTERS = 60
# The rest of the body is not read, so nothing else can be asked on the connection.
_CLOSE = {"Connection": "close"}
_JSON_TYPE = re.compile(r"application/(json|[\w.+-]+\+json)$")


class ClientGoneError(Exception):
    """The client went away before its request was whole."""


class BodyReader:
    """Reads bodies within a limit each and a limit for all that are being read."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.held_bytes = 0

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """The body of a request, whole.

        Raises:
            ApiError: 408, 413, 415, 429.
            ClientGoneError: If the client went away.
        """
        check_content_type(headers)
        self._refuse_long(_content_length(headers))
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    self.held_bytes += len(chunk)
                    self._refuse_long(size)
                    self._refuse_crowd()
                    chunks.append(chunk)
                    more = message.get("more_body", False)
        except TimeoutError:
            seconds = self._settings.body_timeout_s
            raise ApiError(
                408,
                f"The body did not arrive within {seconds:g} s.",
                code="body_timeout",
                headers=_CLOSE,
            ) from None
        finally:
            self.held_bytes -= size
        return b"".join(chunks)

    def _refuse_long(self, size: int) -> None:
        limit = self._settings.max_body_bytes
        if size > limit:
            raise ApiError(
                413,
                f"The body is longer than {limit} bytes.",
                code="request_too_large",
                headers=_CLOSE,
            )

    def _refuse_crowd(self) -> None:
        if self.held_bytes > self._settings.max_bodies_bytes:
            wait_s = self._settings.retry_after_s
            raise ApiError(
                429,
                "Too many bytes of bodies are under way.",
                code="bodies_full",
                headers={"Retry-After": str(wait_s)} if self._settings.return_retry_after else None,
            )


def _content_length(headers: Mapping[bytes, bytes]) -> int:
    value = headers.get(b"content-length", b"0")
    if not value.isdigit() or len(value) > 18:
        raise invalid("Content-Length must be a number of bytes.", "content-length")
    return int(value)


def check_content_type(headers: Mapping[bytes, bytes]) -> None:
    """JSON in UTF-8, not compressed.

    Raises:
        ApiError: 415.
    """
    value = headers.get(b"content-type", b"").decode("latin-1")
    kind, _, rest = value.partition(";")
    if not _JSON_TYPE.match(kind.strip().lower()):
        found = f"not {value[:_SHOWN_CHARACTERS]!r}" if value else "and none was given"
        raise ApiError(
            415,
            f"Content-Type must be application/json, {found}.",
            param="content-type",
            code="unsupported_media_type",
        )
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", rest, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(
            415,
            f"The charset must be UTF-8, not {charset[1][:_SHOWN_CHARACTERS]!r}.",
            param="content-type",
            code="unsupported_media_type",
        )
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if encoding not in ("identity", ""):
        raise ApiError(
            415,
            f"A compressed body is not accepted: {encoding[:_SHOWN_CHARACTERS]!r}.",
            param="content-encoding",
            code="unsupported_media_type",
        )


def decode_body(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """A record from JSON.

    Raises:
        ApiError: 400, naming the field where there is one.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"The body is not UTF-8 (byte {error.start}).", code="invalid_utf8") from None
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), text, decoder) from None
    except msgspec.DecodeError as error:
        raise invalid(_why_not_json(str(error), text), code="invalid_json") from None
    except RecursionError:
        raise invalid("The body is nested too deeply.", code="invalid_json") from None


def _why_not_json(message: str, text: str) -> str:
    if not text.strip():
        return "The body is empty; a JSON object is expected."
    if re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return "A string in the body holds half of a surrogate pair."
    return f"The body is not valid JSON: {message[:200]}."


def _field_error(message: str, text: str, decoder: msgspec.json.Decoder[Body]) -> ApiError:
    """msgspec's words, the field's path and the value that was found there."""
    words, _, place = message.partition(" - at ")
    path = place.strip("`").removeprefix("key` in `").removeprefix("$").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", words)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return invalid(f"{path}: required, but it is not there.", path, "missing_field")
    if not path:
        return invalid(f"The body: {_lower_first(words)}.", code="invalid_type")
    if place.startswith("`key` in ") or path.endswith("[...]"):
        path, found = _found_entry(message, text, path, decoder)
    else:
        found = "" if ", got " in words else _found_at(text, path)
    code = "invalid_type" if ", got " in words else "invalid_value"
    return invalid(f"{path}: {_lower_first(words)}{found}.", path, code)


def _found_entry(
    message: str, text: str, path: str, decoder: msgspec.json.Decoder[Body]
) -> tuple[str, str]:
    """Path and value of the entry at fault: msgspec calls all entries of an object ``[...]``.

    Decoded one by one, the entry at fault is the one with the same complaint.
    """
    field = path.removesuffix("[...]")
    is_key = field == path
    try:
        entries = msgspec.json.decode(text)[field]
        for key, value in entries.items():
            try:
                decoder.decode(msgspec.json.encode({field: {key: value}}))
            except msgspec.ValidationError as error:
                if str(error) == message:
                    name = f"{field}.{key[:_SHOWN_CHARACTERS]}"
                    found = "the key " + json.dumps(key) if is_key else json.dumps(value)
                    return name, f", found {found[:_SHOWN_CHARACTERS]}"
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return path, ""


def _lower_first(words: str) -> str:
    return words[:1].lower() + words[1:].replace("`", "")


def _found_at(text: str, path: str) -> str:
    """``, found VALUE`` where the path leads to something short."""
    try:
        value: Any = msgspec.json.decode(text)
        for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
            value = value[name] if name else value[int(index)]
    except (msgspec.DecodeError, LookupError, TypeError, RecursionError):
        return ""
    if isinstance(value, list | dict):
        return f", found {len(value)}"
    return f", found {json.dumps(value)[:_SHOWN_CHARACTERS]}"
