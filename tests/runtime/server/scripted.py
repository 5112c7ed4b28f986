"""An engine that answers as told, and clients below HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from runtime.engine.frames import (
    EngineInfo,
    EngineStats,
    NewSequence,
    SequenceOutput,
    SequenceTimes,
    TokenLogprobs,
)
from runtime.server.app import App
from runtime.server.engine_client import EngineGoneError
from runtime.text.tokenizer import TextTokenizer

VOCABULARY = 300
CONTEXT_TOKENS = 512


class ScriptedEngine:
    """Answers as told, one token at a time; remembers what it was asked and what was aborted.

    Attributes:
        script: Sequence -> tokens before the end token.
        pause_s: Before every token.
        gate: Held before every token until it is set.
        dies_after: Tokens after which it is gone; None: never.
        fails_with: Error of the first output.
        stutter: Tokens given in one output.
    """

    def __init__(self, script: Callable[[NewSequence], Sequence[int]]) -> None:
        self.script = script
        self.info = EngineInfo(
            model="scripted",
            model_type="scripted",
            vocabulary=VOCABULARY,
            context_tokens=CONTEXT_TOKENS,
            kv_capacity_tokens=1 << 20,
            eos_token_ids=(256,),
            dtype="float32",
            device="cpu",
            experts="plain",
            block_tokens=16,
            page_bytes=1024,
            arena_pages=4096,
            has_prefix_store=True,
        )
        self.stats = EngineStats()
        self.silent_s = 0.0
        self.is_alive = True
        self.pause_s = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.dies_after: int | None = None
        self.fails_with = ""
        self.ends_silently = False
        self.stutter = 1
        self.cached_tokens = 0
        self.logprob: Callable[[int], float] = lambda token: -token / 100
        self.submitted: list[NewSequence] = []
        self.aborted: list[str] = []
        self.live: set[str] = set()
        self.controls: list[str] = []
        self.given = 0
        self.is_closed = False

    async def submit(self, sequence: NewSequence) -> AsyncIterator[SequenceOutput]:
        if not self.is_alive:
            raise EngineGoneError("gone")
        self.submitted.append(sequence)
        self.live.add(sequence.sequence_id)
        try:
            async for output in self._outputs(sequence):
                yield output
        finally:
            self.live.discard(sequence.sequence_id)

    async def _outputs(self, new: NewSequence) -> AsyncIterator[SequenceOutput]:
        sampling = new.sampling
        tokens = list(self.script(new))
        end = None if len(tokens) >= sampling.max_tokens else 256
        if sampling.ignore_eos:
            while len(tokens) < sampling.max_tokens:
                tokens.append(tokens[len(tokens) % max(len(tokens), 1)] if tokens else 97)
            end = None
        tokens = tokens[: sampling.max_tokens]
        stopped = next((i for i, t in enumerate(tokens) if t in sampling.stop_token_ids), None)
        if stopped is not None:
            tokens, end = tokens[:stopped], tokens[stopped]
        if self.fails_with:
            yield SequenceOutput(
                sequence_id=new.sequence_id, finish_reason="error", error=self.fails_with
            )
            return
        steps = [tokens[i : i + self.stutter] for i in range(0, len(tokens), self.stutter)] or [[]]
        for place, step in enumerate(steps):
            await asyncio.sleep(self.pause_s)
            await self.gate.wait()
            if self.dies_after is not None and self.given >= self.dies_after:
                self.is_alive = False
                raise EngineGoneError("gone")
            is_last = place == len(steps) - 1
            if is_last and self.ends_silently:
                return
            self.given += len(step)
            yield SequenceOutput(
                sequence_id=new.sequence_id,
                tokens=tuple(step),
                logprobs=tuple(self._logprobs(t, sampling.logprobs) for t in step)
                if sampling.logprobs is not None
                else (),
                prompt_logprobs=tuple(
                    self._logprobs(t, sampling.prompt_logprobs) for t in new.prompt[1:]
                )
                if sampling.prompt_logprobs is not None and place == 0
                else (),
                finish_reason=("length" if end is None else "stop") if is_last else None,
                stop_token=end if is_last else None,
                cached_tokens=self.cached_tokens if place == 0 else 0,
                times=SequenceTimes(0.25, 0.5, 1.0) if is_last else None,
            )

    def _logprobs(self, token: int, top: int | None) -> TokenLogprobs:
        likeliest = tuple((t, self.logprob(t)) for t in range(top or 0))
        return TokenLogprobs(token, self.logprob(token), token + 1, likeliest)

    def abort(self, sequence_ids: Iterable[str]) -> None:
        self.aborted += list(sequence_ids)

    async def control(self, command: str) -> None:
        if not self.is_alive:
            raise EngineGoneError("gone")
        if self.fails_with:
            raise RuntimeError(self.fails_with)
        self.controls.append(command)

    async def close(self) -> None:
        self.is_closed = True
        self.is_alive = False


def saying(text: TextTokenizer, words: str) -> Callable[[NewSequence], list[int]]:
    tokens = text.encode(words)
    return lambda _: tokens


@asynccontextmanager
async def client_of(app: App, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers=headers, timeout=20
    ) as client:
        app.front.start()
        try:
            yield client
        finally:
            await app.front.close()


class RawCall:
    """One request at the ASGI level, whose client can go away or stop reading."""

    def __init__(
        self,
        app: App,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),),
        chunks: Iterable[bytes] | None = None,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": root_path,
            "query_string": b"",
            "headers": list(headers),
            "client": ("test", 1),
            "server": ("test", 80),
            "scheme": "http",
            "state": {},
        }
        if chunks is None:
            chunks = [body if isinstance(body, bytes) else json.dumps(body).encode()]
        self._chunks = iter(chunks)
        self._gone = asyncio.Event()
        self._has_ended = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.received = b""
        self.news = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.task = asyncio.get_running_loop().create_task(
            self._app(self._scope, self._receive, self._send)
        )

    async def _receive(self) -> dict[str, Any]:
        for chunk in self._chunks:
            return {"type": "http.request", "body": chunk, "more_body": True}
        if not self._has_ended:
            self._has_ended = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.received += message.get("body", b"")
        self.news.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_so():
                await asyncio.sleep(0)

    def go_away(self) -> None:
        self._gone.set()

    async def ended(self) -> None:
        async with asyncio.timeout(10):
            await self.task


def events_of(body: bytes | str) -> list[Any]:
    """Events of a stream; ``[DONE]`` as a string."""
    raw = body.encode() if isinstance(body, str) else body
    found = []
    for block in raw.split(b"\n\n"):
        if block:
            assert block.startswith(b"data: "), block
            data = block.removeprefix(b"data: ")
            found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


def text_of(events: Iterable[Any], index: int = 0) -> str:
    """Text of one answer of a stream."""
    found = ""
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) and "choices" in event else ():
            if choice["index"] == index:
                found += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return found
