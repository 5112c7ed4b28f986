"""The server as a process: it listens while it loads, drains at a signal, stops at the second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.text.tokenizer import TextTokenizer

PROGRAM = """
import asyncio, sys
from pathlib import Path
from runtime.server.http_server import Address, Opened, run_server
from runtime.server.logs import log_as_json
from runtime.server.settings import ServerSettings
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.scripted import ScriptedEngine, saying

folder, load_s, pause_s, drain_s, fails = sys.argv[1:]

async def open_engine():
    await asyncio.sleep(float(load_s))
    if fails:
        raise ValueError(fails)
    text = TextTokenizer.open(Path(folder))
    engine = ScriptedEngine(saying(text, "x" * 100))
    engine.pause_s = float(pause_s)
    return Opened(engine=engine, text=text, template=None)

log_as_json()
run_server(
    ServerSettings(model_names=("tiny",), drain_timeout_s=float(drain_s)),
    open_engine,
    Address(port=0),
    on_listening=lambda port: print(port, flush=True),
    on_ready=lambda: print("ready", flush=True),
)
print("ended", flush=True)
"""
ROOT = Path(__file__).resolve().parents[3]


class Process:
    """A server in a process of its own."""

    def __init__(
        self, text: TextTokenizer, *, load_s: float, pause_s: float, drain_s: float, fails: str = ""
    ) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", PROGRAM, str(text.folder)),
                *(str(load_s), str(pause_s), str(drain_s), fails),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.url = f"http://127.0.0.1:{self.line()}"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    found: list[Process] = []
    yield found
    for each in found:
        each.process.kill()
        each.process.wait()


def long_stream(url: str) -> tuple[threading.Thread, list[str]]:
    """A stream of 100 tokens in a thread, and its lines; returns once it has begun."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": "a", "max_tokens": 100, "stream": True}
        try:
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as answer:
                for line in answer.iter_lines():
                    if line:
                        lines.append(line)
                        begun.set()
        except httpx.HTTPError as error:
            lines.append(type(error).__name__)
            begun.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(20)
    return thread, lines


def error_code(answer: httpx.Response) -> Any:
    return answer.json()["error"]["code"]


def test_it_answers_while_it_loads_and_is_ready_afterwards(
    text: TextTokenizer, processes: list[Process]
) -> None:
    server = Process(text, load_s=1.0, pause_s=0, drain_s=5)
    processes.append(server)
    assert httpx.get(server.url + "/health").status_code == 200
    ready = httpx.get(server.url + "/ready")
    assert (ready.status_code, error_code(ready)) == (503, "loading")
    refused = httpx.post(server.url + "/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] is None
    assert httpx.get(server.url + "/metrics").status_code == 200
    assert server.line() == "ready"
    assert httpx.get(server.url + "/ready").status_code == 200
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert answer.json()["choices"][0]["text"] == "xxx"
    server.signal(signal.SIGINT)
    assert server.ended()[0] == 0


def test_sigterm_lets_answers_under_way_end(text: TextTokenizer, processes: list[Process]) -> None:
    server = Process(text, load_s=0, pause_s=0.01, drain_s=30)
    processes.append(server)
    assert server.line() == "ready"
    thread, lines = long_stream(server.url)
    server.signal()
    until = time.monotonic() + 10
    while httpx.get(server.url + "/ready").status_code == 200:
        assert time.monotonic() < until
    refused = httpx.post(server.url + "/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, error_code(refused)) == (503, "draining")
    thread.join(20)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    code, errors = server.ended()
    assert code == 0 and '"all_finished":true' in errors
    logged = [json.loads(line) for line in errors.splitlines()]
    done = [line for line in logged if line.get("completion_tokens") == 100]
    assert done[0]["finish_reason"] == "length" and "prompt" not in done[0]


def test_after_the_drain_s_time_answers_are_ended_in_the_open(
    text: TextTokenizer, processes: list[Process]
) -> None:
    server = Process(text, load_s=0, pause_s=0.1, drain_s=0.2)
    processes.append(server)
    assert server.line() == "ready"
    thread, lines = long_stream(server.url)
    server.signal()
    thread.join(20)
    assert lines[-1] == "data: [DONE]" and "server_shutdown" in lines[-2]
    code, errors = server.ended()
    assert code == 0 and '"all_finished":false' in errors


def test_a_second_signal_stops_at_once(text: TextTokenizer, processes: list[Process]) -> None:
    server = Process(text, load_s=0, pause_s=1.0, drain_s=600)
    processes.append(server)
    assert server.line() == "ready"
    thread, _ = long_stream(server.url)
    server.signal()
    until = time.monotonic() + 10
    while httpx.get(server.url + "/ready").status_code == 200:
        assert time.monotonic() < until
    server.signal(signal.SIGINT)
    code, errors = server.ended()
    thread.join(10)
    assert code == 0 and "stopping_at_once" in errors


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(
    text: TextTokenizer, processes: list[Process]
) -> None:
    server = Process(text, load_s=0, pause_s=0, drain_s=1, fails="no such folder")
    processes.append(server)
    code, errors = server.ended()
    assert code == 1 and "ValueError: no such folder" in errors


def test_a_signal_while_loading_ends_it(text: TextTokenizer, processes: list[Process]) -> None:
    server = Process(text, load_s=60, pause_s=0, drain_s=1)
    processes.append(server)
    server.signal()
    assert server.ended()[0] == 0
