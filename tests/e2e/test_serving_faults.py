"""What clients, operators and other processes can do to a running server, and what it does then."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from runtime.demo_model_tiny import TinySizes, make_tiny_checkpoint
from tests.e2e.server_process import ENVIRONMENT, Server, Stream, command, wait_for

LONG = 6_000
"""Tokens of an answer that is still under way when a test has done what it does."""
UNREAD = 1_500
UNREAD_ANSWERS = 6
"""With 20 logprobs a token, their events are more than the kernel keeps for one connection."""
CONTEXT = 16_384
ADMIN = {"Authorization": "Bearer the-admin-key"}
pytestmark = [
    pytest.mark.timeout(600),  # the first start on a machine builds kernels
    pytest.mark.xdist_group("serving_faults"),
]


class StoreProcess:
    """`runtime store serve`, which a test may kill and start again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.socket = folder / "store.sock"
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        with (self._folder.parent / "store.log").open("ab") as log:
            self.process = subprocess.Popen(
                command("store", "serve", str(self._folder), "--dram", "64MiB"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRONMENT,
            )

        def answers() -> bool:
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
                probe.connect(str(self.socket))
                return True
            return False

        assert wait_for(answers)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A short path, for sockets."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def checkpoint(home: Path) -> Path:
    return make_tiny_checkpoint(home / "tiny", sizes=TinySizes(context_tokens=CONTEXT))


@pytest.fixture(scope="module")
def store(home: Path) -> Iterator[StoreProcess]:
    (home / "store").mkdir()
    served = StoreProcess(home / "store")
    yield served
    served.kill()


@pytest.fixture(scope="module")
def server(home: Path, checkpoint: Path, store: StoreProcess) -> Iterator[Server]:
    """The one that all tests of this file share; the last of them ends it."""
    (home / "decisions").mkdir()
    started = Server(
        checkpoint,
        *("--memory", "64MiB", "--prefix-store", str(store.socket)),
        *("--decisions", str(home / "decisions" / "log.jsonl.gz")),
        *("--admin-key", "the-admin-key", "--max-running", "8", "--drain-timeout", "300"),
    )
    try:
        yield started.wait_until_ready()
    finally:
        started.kill()


# --- clients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["vanish", "reset"])
def test_a_client_that_goes_in_mid_stream_frees_its_pages_at_once(server, how):
    aborted, finished = server.settled("engine_aborted_total", "engine_finished_total")
    streams = [Stream(server, max_tokens=LONG).first_event() for _ in range(2)]
    assert wait_for(lambda: server.metric("pages", 'use="kv"') > 0)
    for stream in streams:
        getattr(stream, how)()
    assert wait_for(server.is_at_rest)
    assert wait_for(lambda: server.metric("engine_aborted_total") == aborted + 2)
    assert server.metric("engine_finished_total") == finished


def test_a_client_that_goes_before_its_first_token_frees_its_place(server):
    (aborted,) = server.settled("engine_aborted_total")
    running = [Stream(server, max_tokens=LONG).first_event() for _ in range(8)]
    waiting = Stream(server, max_tokens=LONG)
    assert wait_for(lambda: server.metric("queued_requests") == 1)
    waiting.vanish()
    assert wait_for(lambda: server.metric("queued_requests") == 0)
    for stream in running:
        stream.vanish()
    assert wait_for(server.is_at_rest)
    assert wait_for(lambda: server.metric("engine_aborted_total") == aborted + 9)


def test_a_client_that_waits_for_a_whole_answer_and_goes_frees_its_pages(server):
    (aborted,) = server.settled("engine_aborted_total")
    client = Stream(server, max_tokens=LONG, stream=False, stream_options=None)
    assert wait_for(lambda: server.metric("num_requests_running") == 1)
    client.vanish()
    assert wait_for(server.is_at_rest)
    assert wait_for(lambda: server.metric("engine_aborted_total") == aborted + 1)


def test_half_open_connections_keep_nobody_from_being_answered(server):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for number, connection in enumerate(idle):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall((b"", b"PO", head, head + b"Content-Length: 99\r\n\r\n{")[number % 4])
    try:
        assert server.ask(max_tokens=4).status_code == 200
        assert server.get("/health").status_code == 200
        assert server.metric("queued_requests") == 0
    finally:
        for connection in idle:
            connection.close()
    assert wait_for(server.is_at_rest)


def test_a_client_that_does_not_read_holds_no_pages_and_misses_nothing(server):
    (finished,) = server.settled("engine_finished_total")
    before = server.resident_bytes()
    slow = Stream(server, max_tokens=UNREAD, n=UNREAD_ANSWERS, receive_bytes=4096, logprobs=20)
    assert wait_for(lambda: server.metric("num_requests_running") == UNREAD_ANSWERS)
    quick = [server.ask(max_tokens=8) for _ in range(3)]
    expected = UNREAD_ANSWERS + len(quick)
    assert [each.status_code for each in quick] == [200] * 3
    assert wait_for(lambda: server.metric("engine_finished_total") == finished + expected, 300)
    assert wait_for(lambda: server.metric("pages", 'use="kv"') == 0)
    assert server.metric("active_requests") == 1, "its events are still to be written"
    assert server.resident_bytes() - before < 64 << 20
    events = slow.rest()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == UNREAD * UNREAD_ANSWERS
    assert wait_for(server.is_at_rest)


def test_texts_of_five_megabytes_do_not_hold_up_health(server):
    text = "the quick brown fox " * (5 * 2**20 // 20)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.ask, prompt=text) for _ in range(8)]
        while not all(each.done() for each in asked):
            assert server.get("/health").status_code == 200
    refused = [each.result() for each in asked]
    assert {each.status_code for each in refused} == {400}
    assert {each.json()["error"]["code"] for each in refused} == {"context_length_exceeded"}
    assert wait_for(server.is_at_rest)


# --- other processes ----------------------------------------------------------------------------


def test_an_engine_that_stands_still_is_told_and_goes_on(server):
    stream = Stream(server, max_tokens=400).first_event()
    os.kill(server.engine_id, signal.SIGSTOP)
    try:
        assert wait_for(lambda: server.get("/ready").status_code == 503)
        ready = server.get("/ready")
        assert ready.json()["error"]["code"] == "engine_silent"
        assert ready.headers["retry-after"]
        assert server.get("/health").status_code == 200  # a short silence is no reason to restart
        assert server.get("/metrics").status_code == 200
        meanwhile: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: meanwhile.append(server.ask(max_tokens=4)))
        asking.start()
        assert wait_for(lambda: server.metric("queued_requests") == 1)
    finally:
        os.kill(server.engine_id, signal.SIGCONT)
    asking.join(60)
    assert meanwhile[0].status_code == 200
    events = stream.rest()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 400
    assert wait_for(lambda: server.get("/ready").status_code == 200)
    assert wait_for(server.is_at_rest)


def test_a_killed_store_costs_recomputation_and_never_a_wrong_token(server, store):
    prompt = [(7 * token) % 250 + 5 for token in range(400)]

    def answer(start: int) -> tuple[str, int]:
        found = server.ask(prompt=[start, *prompt], max_tokens=24)
        assert found.status_code == 200
        body = found.json()
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return body["choices"][0]["text"], cached

    first, cached = answer(5)
    assert cached == 0
    assert wait_for(lambda: answer(5)[1] > 0), "the store finds nothing"
    assert answer(5)[0] == first
    during = Stream(server, max_tokens=200).first_event()
    store.kill()
    assert answer(5) == (first, 0)
    other, cached = answer(6)
    assert cached == 0
    assert json.loads(during.rest()[-2])["usage"]["completion_tokens"] == 200
    assert server.get("/health").status_code == 200
    store.start()
    assert wait_for(lambda: answer(6)[1] > 0), "no hits after the store came back"
    assert (answer(5)[0], answer(6)[0]) == (first, other)
    assert wait_for(server.is_at_rest)


def test_a_decision_log_that_cannot_be_written_is_told_and_stops_nothing(server, home):
    def write() -> httpx.Response:
        return httpx.post(f"{server.url}/admin/write_decisions", headers=ADMIN, timeout=60)

    log = home / "decisions" / "log.jsonl.gz"
    assert write().status_code == 200 and log.stat().st_size > 0
    (home / "decisions").rename(home / "moved")
    failed = write()
    error = failed.json()["error"]
    assert (failed.status_code, error["code"]) == (500, "engine_error")
    assert str(log) in error["message"] and "No such file or directory" in error["message"]
    assert server.ask(max_tokens=4).status_code == 200
    assert server.get("/ready").status_code == 200
    (home / "decisions").write_text("a file where the folder was")
    assert "Not a directory" in write().json()["error"]["message"]


# --- the operator -------------------------------------------------------------------------------


def test_sigterm_lets_streams_end_and_refuses_new_requests(server, home):
    """The last test of the shared server."""
    if (home / "decisions").is_dir():
        (home / "decisions").rename(home / "moved")
    stream = Stream(server, max_tokens=600).first_event()
    server.process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: server.get("/ready").status_code == 503)
    refused = server.ask(max_tokens=4)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"]
    assert server.get("/health").status_code == 200
    events = stream.rest()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 600
    assert server.ended() == 0, server.said()
    assert "Traceback" not in server.said()
    # what the decision log could not be written to is told, and no reason to fail
    assert str(home / "decisions" / "log.jsonl.gz") in server.said()


@pytest.mark.slow
def test_a_second_sigterm_ends_streams_at_once(checkpoint):
    server = Server(checkpoint, "--memory", "64MiB", "--drain-timeout", "600")
    try:
        server.wait_until_ready()
        engine = server.engine_id
        stream = Stream(server, max_tokens=CONTEXT - 100).first_event()
        server.process.send_signal(signal.SIGTERM)
        assert wait_for(lambda: server.get("/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0, server.said()
        events = stream.rest()
        assert events[-1] == "[DONE]" and "server_shutdown" in events[-2]
        assert not Path(f"/proc/{engine}").exists()
        assert "Traceback" not in server.said()
    finally:
        server.kill()


@pytest.mark.slow
def test_a_killed_engine_ends_streams_with_an_error_and_the_server_with_code_1(checkpoint):
    server = Server(checkpoint, "--memory", "64MiB")
    try:
        server.wait_until_ready()
        stream = Stream(server, max_tokens=CONTEXT - 100).first_event()
        os.kill(server.engine_id, signal.SIGKILL)
        events = stream.rest()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "engine_gone"
        assert server.ended() == 1
        assert "error: the engine has ended" in server.lines[-1]
        assert "Traceback" not in server.said()
    finally:
        server.kill()
