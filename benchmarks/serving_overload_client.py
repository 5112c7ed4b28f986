"""A client of many connections for overload: every request has one outcome, whatever happens.

Standard library only and one connection per request, as strangers come: nothing is retried, pooled
or held back, so that a refused connection or a missing byte is seen.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

REQUEST_TIMEOUT_S = 180.0
"""No answer is due so late: the queue is finite. What takes longer counts as stuck."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request.

    Attributes:
        status: Of HTTP; 0: there was none.
        first_byte_s: From the attempt to connect to the status line.
        seconds: To the last byte.
        tokens: Of the answer, as the server counts them in ``usage``.
        is_stream: Whether events were asked for.
        has_retry_after: Whether the answer said when to come back.
        problem: What is wrong with the answer; empty: nothing.
    """

    status: int
    first_byte_s: float
    seconds: float
    tokens: int = 0
    is_stream: bool = False
    has_retry_after: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server listens."""

    host: str
    port: int

    async def exchange(self, method: str, path: str, body: bytes = b"") -> tuple[float, bytes]:
        """(seconds to the status line, everything the server sent).

        Raises:
            OSError: If the connection is refused or breaks.
        """
        began_s = time.perf_counter()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = await reader.readline()
            first_s = time.perf_counter() - began_s
            return first_s, head + await reader.read()
        finally:
            writer.close()

    async def get(self, path: str) -> tuple[int, float, str]:
        """(status, seconds, body) of a GET."""
        began_s = time.perf_counter()
        _, answer = await self.exchange("GET", path)
        status, _, body = _parted(answer)
        return status, time.perf_counter() - began_s, body.decode()

    async def ask(self, request: dict[str, Any]) -> Outcome:
        """One completion; never raises for what a server can do wrong."""
        began_s = time.perf_counter()
        is_stream = bool(request.get("stream"))
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                first_s, answer = await self.exchange(
                    "POST", "/v1/completions", json.dumps(request).encode()
                )
        except TimeoutError:
            return Outcome(0, 0.0, REQUEST_TIMEOUT_S, is_stream=is_stream, problem="stuck")
        except OSError as error:
            name = type(error).__name__
            return Outcome(0, 0.0, time.perf_counter() - began_s, is_stream=is_stream, problem=name)
        seconds = time.perf_counter() - began_s
        try:
            status, headers, body = _parted(answer)
            tokens, problem = _checked(status, body, request)
        except (ValueError, LookupError) as error:
            return Outcome(
                0, first_s, seconds, is_stream=is_stream, problem=f"broken: {error}"[:90]
            )
        return Outcome(
            status, first_s, seconds, tokens, is_stream, b"retry-after" in headers.lower(), problem
        )


def _parted(answer: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of an answer that ended with its connection."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        raise ValueError(f"no end of headers in {answer[:40]!r}")
    if b"transfer-encoding: chunked" in head.lower():
        body = _dechunked(body)
    return int(head.split(b" ", 2)[1]), head, body


def _dechunked(body: bytes) -> bytes:
    pieces: list[bytes] = []
    while True:
        size, separator, body = body.partition(b"\r\n")
        if not separator:
            raise ValueError("the answer ended before its last chunk")
        if int(size, 16) == 0:
            return b"".join(pieces)
        pieces.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]


def _checked(status: int, body: bytes, request: dict[str, Any]) -> tuple[int, str]:
    """Tokens of a whole answer, and what is wrong with it."""
    if status != 200:
        code = json.loads(body)["error"]["code"]
        allowed = {429: ("queue_full", "bodies_full"), 503: ("draining", "engine_silent")}
        return 0, "" if code in allowed.get(status, ()) else f"{status} {code}"
    if request.get("stream"):
        events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
        if events[-1].strip() != b"[DONE]":
            return 0, "a stream without [DONE]"
        parsed = [json.loads(event) for event in events[:-1]]
        if any("error" in event for event in parsed):
            return 0, "an error event"
        reasons = [c["finish_reason"] for event in parsed for c in event["choices"]]
        usage = parsed[-1]["usage"]
    else:
        answer = json.loads(body)
        reasons, usage = [choice["finish_reason"] for choice in answer["choices"]], answer["usage"]
    tokens = int(usage["completion_tokens"])
    if [reason for reason in reasons if reason] != ["length"] or tokens != request["max_tokens"]:
        return tokens, f"{tokens} tokens of {request['max_tokens']}, ended by {reasons[-1]}"
    return tokens, ""


def mixed_request(rng: np.random.Generator, vocabulary: int) -> dict[str, Any]:
    """Short and long prompts and answers, three of five streamed; no two share a prefix."""
    is_stream = bool(rng.random() < 0.6)
    long = rng.random() < 0.15
    tokens = int(rng.integers(200, 480) if long else rng.integers(4, 96))
    request: dict[str, Any] = {
        "prompt": rng.integers(3, vocabulary, tokens).tolist(),
        "max_tokens": int(rng.integers(2, 64)),
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_stream,
    }
    if is_stream:
        request["stream_options"] = {"include_usage": True}
    return request
