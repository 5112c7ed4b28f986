"""Real sockets: the official client library, connections that break, HTTP that is none."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from runtime.text.chat_template import ChatTemplate
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.conftest import TEMPLATE
from tests.runtime.server.live import LiveServer, live_server
from tests.runtime.server.scripted import ScriptedEngine, saying

ANSWER = "hello world, this is a scripted answer"
HI: list[Any] = [{"role": "user", "content": "hi"}]


class Scripted:
    """A live server and the engine behind it."""

    def __init__(self, live: LiveServer, engine: ScriptedEngine) -> None:
        self.live = live
        self.engine = engine
        self.openai = openai.OpenAI(
            base_url=live.url + "/v1", api_key="secret", max_retries=0, timeout=20
        )

    def until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < until
            time.sleep(0.002)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.live.port), timeout=10)

    def raw(self, data: bytes) -> bytes:
        """All that comes back until the server closes."""
        with self.connect() as connection:
            connection.sendall(data)
            found = b""
            while chunk := connection.recv(65536):
                found += chunk
            return found


@pytest.fixture(scope="module")
def server(text: TextTokenizer) -> Iterator[Scripted]:
    engines: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        engines.append(ScriptedEngine(saying(text, ANSWER)))
        return engines[0]

    template = ChatTemplate({"default": TEMPLATE}, {})
    with live_server(
        make, text, template, api_keys=("secret",), max_header_bytes=4096, max_body_bytes=100_000
    ) as live:
        yield Scripted(live, engines[0])


@pytest.fixture(autouse=True)
def normal_engine(server: Scripted) -> Iterator[None]:
    yield
    server.engine.pause_s = 0.0
    server.live.on_loop(server.engine.gate.set)
    server.until(lambda: not server.engine.live)
    server.until(lambda: server.live.app.front.admission.active == 0)


def test_the_openai_library_reads_every_form_of_answer(server: Scripted) -> None:
    client = server.openai
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    completion = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=2)
    assert completion.choices[0].text == "hello" and completion.usage is not None
    assert completion.usage.completion_tokens == 5
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == list("hello")
    chat = client.chat.completions.create(
        model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=1
    )
    assert [choice.message.content for choice in chat.choices] == [ANSWER, ANSWER]
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 0
    stream = client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(ANSWER)
    parsed = client.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=1)
    assert parsed.headers["x-request-id"]


def test_the_openai_library_raises_its_own_errors(server: Scripted) -> None:
    client = server.openai
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="a")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert bad.value.param == "temperature" and "-1" in bad.value.message
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")
    server.engine.pause_s = 0.02
    stream = client.completions.create(
        model="tiny",
        prompt="a",
        stream=True,
        max_tokens=30,
        extra_headers={"X-Request-Timeout": "0.15"},
    )
    with pytest.raises(openai.APIError, match="not done"):
        list(stream)


def test_many_clients_at_once_get_their_own_answers(server: Scripted) -> None:
    async def many() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=server.live.url + "/v1", api_key="secret", max_retries=0
        ) as client:
            return await asyncio.gather(
                *(
                    client.completions.create(
                        model="tiny", prompt=f"{number}", echo=True, max_tokens=4
                    )
                    for number in range(32)
                )
            )

    found = asyncio.run(many())
    assert [answer.choices[0].text for answer in found] == [f"{n}hell" for n in range(32)]


def request_bytes(body: dict[str, Any], extra: bytes = b"") -> bytes:
    content = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        b"Content-Type: application/json\r\n%sContent-Length: %d\r\n\r\n" % (extra, len(content))
    ) + content


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_frees_the_engine(server: Scripted, stream: bool) -> None:
    server.live.on_loop(server.engine.gate.clear)
    with server.connect() as connection:
        connection.sendall(request_bytes({"prompt": "a", "stream": stream}))
        server.until(lambda: bool(server.engine.live))
    server.until(lambda: not server.engine.live)


def test_a_closed_connection_frees_all_requests_that_were_sent_on_it(server: Scripted) -> None:
    server.live.on_loop(server.engine.gate.clear)
    with server.connect() as connection:
        connection.sendall(request_bytes({"prompt": "a", "stream": True}) * 3)
        server.until(lambda: bool(server.engine.live))
    server.until(lambda: not server.engine.live)
    server.until(lambda: server.live.app.front.admission.active == 0)


def test_requests_sent_without_waiting_are_answered_in_order(server: Scripted) -> None:
    bodies = [{"prompt": "a", "max_tokens": count} for count in (1, 2, 3)]
    data = b"".join(map(request_bytes, bodies[:2]))
    found = server.raw(data + request_bytes(bodies[2], b"Connection: close\r\n"))
    places = [found.index(b'"text":"%s"' % ANSWER[:count].encode()) for count in (1, 2, 3)]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nname\x00: value\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_object_too(server: Scripted, data: bytes) -> None:
    head, _, body = server.raw(data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert httpx.get(server.live.url + "/health").status_code == 200


def test_headers_without_end_are_cut_off(server: Scripted) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        for number in range(100):
            try:
                connection.sendall(b"x-%d: %s\r\n" % (number, b"y" * 100))
            except (BrokenPipeError, ConnectionResetError):
                break
        try:
            found = connection.recv(4096)
        except ConnectionResetError:
            found = b"HTTP/1.1 431"
    assert found.startswith(b"HTTP/1.1 431")
    assert httpx.get(server.live.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "offer",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
        b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    ],
)
@pytest.mark.parametrize("cut", [20, 330])
def test_an_offer_of_another_protocol_is_ignored_and_the_body_read(
    server: Scripted, offer: bytes, cut: int
) -> None:
    data = request_bytes({"prompt": "a", "max_tokens": 3}, offer)
    data += request_bytes({"prompt": "b", "max_tokens": 4}, offer)
    with server.connect() as connection:
        connection.sendall(data[:-cut])
        connection.sendall(data[-cut:])
        found = b""
        while b'"text":"hell"' not in found:
            chunk = connection.recv(65536)
            assert chunk, found
            found += chunk
    assert found.count(b"HTTP/1.1 200 ") == 2 and b'"text":"hel"' in found


@pytest.mark.parametrize("hosts", [b"", b"Host: x\r\nHost: y\r\n"])
def test_a_request_has_one_host(server: Scripted, hosts: bytes) -> None:
    given = len(server.engine.submitted)
    found = server.raw(request_bytes({"prompt": "a"}).replace(b"Host: x\r\n", hosts))
    assert found.startswith(b"HTTP/1.1 400 ") and b'"param":"host"' in found
    assert len(server.engine.submitted) == given
    assert b"200 OK" in server.raw(b"GET /health HTTP/1.0\r\n\r\n")


def test_silent_and_slow_connections_are_closed(text: TextTokenizer) -> None:
    template = ChatTemplate({"default": TEMPLATE}, {})
    with live_server(
        lambda: ScriptedEngine(saying(text, ANSWER)),
        text,
        template,
        header_timeout_s=0.2,
        body_timeout_s=0.2,
    ) as live:
        slow = Scripted(live, ScriptedEngine(saying(text, ANSWER)))
        assert slow.raw(b"GET /health HTTP/1.1\r\nHost:").startswith(b"HTTP/1.1 408 ")
        assert slow.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nG").count(b"HTTP/1.1 ") == 2
        late = slow.raw(request_bytes({"prompt": "a" * 100})[:-50])
        assert late.startswith(b"HTTP/1.1 408 ") and b"connection: close\r\n" in late
        live.server.config.timeout_keep_alive = 0.1  # type: ignore[assignment]
        assert slow.raw(b"") == slow.raw(b"\r\n") == b""


def test_a_413_reaches_a_client_that_goes_on_sending_and_the_connection_is_closed(
    server: Scripted,
) -> None:
    head = request_bytes({}).partition(b"Content-Length")[0]
    with server.connect() as connection:
        connection.sendall(head + b"Content-Length: 5000000\r\n\r\n")
        found = connection.recv(65536)
        connection.sendall(b" " * 4_000_000)
        while chunk := connection.recv(65536):
            found += chunk
        connection.sendall(b" " * 1_000_000)
        server.until(lambda: not server.live.on_loop(lambda: list(connections_of(server))))
    assert found.startswith(b"HTTP/1.1 413 ") and b"connection: close\r\n" in found
    assert b"request_too_large" in found


def test_a_body_that_turns_into_nonsense_after_its_413_gets_no_second_answer(
    server: Scripted,
) -> None:
    head = request_bytes({}).partition(b"Content-Length")[0]
    chunk = b"30d40\r\n" + b" " * 200_000 + b"\r\n"
    with server.connect() as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        found = connection.recv(65536)
        connection.sendall(b"nonsense\r\n")
        while more := connection.recv(65536):
            found += more
        server.until(lambda: not server.live.on_loop(lambda: list(connections_of(server))))
    assert found.startswith(b"HTTP/1.1 413 ") and found.count(b"HTTP/1.1 ") == 1


def connections_of(server: Scripted) -> Iterator[Any]:
    yield from server.live.server.server_state.connections


def test_a_body_in_chunks_without_a_length_is_413_and_the_next_request_is_answered(
    server: Scripted,
) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 10_000

    headers = {"authorization": "Bearer secret", "content-type": "application/json"}
    with httpx.Client(base_url=server.live.url, headers=headers) as client:
        answer = client.post("/v1/completions", content=endless())
        assert answer.status_code == 413, answer.text
        assert answer.json()["error"]["code"] == "request_too_large"
        assert client.get("/v1/models").status_code == 200
    assert server.live.app.front.reader.held_bytes == 0


def test_a_body_that_stops_in_the_middle_leaves_nothing(server: Scripted) -> None:
    with server.connect() as connection:
        connection.sendall(request_bytes({"prompt": "a" * 1000})[:-500])
        server.until(lambda: server.live.app.front.reader.held_bytes > 0)
    server.until(lambda: server.live.app.front.reader.held_bytes == 0)


def test_a_stream_arrives_token_by_token(server: Scripted) -> None:
    server.engine.pause_s = 0.03
    stream = server.openai.completions.create(model="tiny", prompt="a", stream=True, max_tokens=20)
    next(iter(stream))
    assert server.engine.live, "the engine is still at work when the first token is here"
    assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER[1:20]


def test_metrics_of_live_requests_can_be_scraped(server: Scripted) -> None:
    headers = {"authorization": "Bearer secret"}
    answer = httpx.get(server.live.url + "/metrics", headers=headers)
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'serving_twin_http_requests_total{route="/v1/completions",status="200"}' in answer.text
