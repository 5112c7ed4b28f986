"""`runtime serve` in a process of its own, and clients that misbehave.

A client here is a bare socket: it can stop reading, stop writing or vanish when a test says so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

START_LIMIT_S = 300.0
STOP_LIMIT_S = 90.0
WAIT_LIMIT_S = 60.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def command(*arguments: str) -> list[str]:
    """The command line of ``runtime``."""
    return [sys.executable, "-m", "runtime", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        env=os.environ | ENVIRONMENT,
        check=False,
    )


def wait_for(condition: Callable[[], Any], limit_s: float = WAIT_LIMIT_S) -> bool:
    """Whether it comes true in time."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        if condition():
            return True
        time.sleep(0.05)
    return False


class Server:
    """One server.

    Attributes:
        process: The front end.
        lines: What it has said on standard error so far.
        port: Of TCP.
    """

    def __init__(self, folder: Path | None, *options: str) -> None:
        """Start it; without a folder as a new user does, but for the port."""
        given = () if folder is None else (str(folder), "--name", "tiny", "--threads", "1")
        self.process = subprocess.Popen(
            command("serve", "--port", "0", *given, *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        self.lines: list[str] = []
        self.port = 0
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_until_ready(self) -> Server:
        """Until the greeting; its own last words otherwise."""

        def has_port() -> bool:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1, metrics at", self.said())
            self.port = int(found[1]) if found else 0
            return self.port > 0 or self.process.poll() is not None

        assert wait_for(has_port, START_LIMIT_S) and self.port, self.said()
        return self

    def said(self) -> str:
        """All of standard error."""
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """Its root."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_id(self) -> int:
        """Process id of its engine."""
        front = self.process.pid
        children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
        found = [
            int(child)
            for child in children
            if "runtime.engine" in Path(f"/proc/{child}/cmdline").read_text()
        ]
        assert len(found) == 1
        return found[0]

    def metric(self, name: str, label: str = "") -> float:
        """Sum over the labels of one of our metrics, or over those with this label."""
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT_LIMIT_S).text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if re.match(rf"serving_twin_{name}[{{ ]", line) and label in line
        ]
        assert values, f"/metrics has no {name}"
        return sum(values)

    def settled(self, *names: str) -> tuple[float, ...]:
        """Metrics of a server at rest, once a report has come since (they come twice a second)."""
        assert wait_for(self.is_at_rest)
        time.sleep(1.2)
        return tuple(self.metric(name) for name in names)

    def is_at_rest(self) -> bool:
        """Whether nothing runs or waits and keys and values hold no page."""
        return not (
            self.metric("pages", 'use="kv"')
            or self.metric("num_requests_running")
            or self.metric("num_requests_waiting")
            or self.metric("active_requests")
        )

    def ask(self, **body: Any) -> httpx.Response:
        """One completion, greedy unless told otherwise."""
        request = {"prompt": "the quick brown fox", "temperature": 0, "ignore_eos": True, **body}
        return httpx.post(f"{self.url}/v1/completions", json=request, timeout=STOP_LIMIT_S)

    def get(self, path: str) -> httpx.Response:
        """A state route; must answer whatever else happens."""
        return httpx.get(f"{self.url}{path}", timeout=WAIT_LIMIT_S)

    def resident_bytes(self) -> int:
        """Memory of the front end."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal and exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """The exit code, once all that it said is read."""
        code = self.process.wait(STOP_LIMIT_S)
        self._reading.join(10)
        return code

    def kill(self) -> None:
        """Leave nothing behind, whatever a test has done."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Stream:
    """A streamed completion over a bare socket; it reads when it is told to."""

    def __init__(self, server: Server, *, receive_bytes: int = 0, **body: Any) -> None:
        self._socket = socket.socket()
        if receive_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.settimeout(STOP_LIMIT_S)
        self._socket.connect(("127.0.0.1", server.port))
        request = {
            "prompt": "the quick brown fox",
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        self.send(request)
        self._seen = b""

    def send(self, request: dict[str, Any]) -> None:
        """One request on the connection."""
        raw = json.dumps(request).encode()
        self._socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw
        )

    def first_event(self) -> Stream:
        """Wait for it."""
        while b"data: " not in self._seen:
            piece = self._socket.recv(1)
            assert piece, self._seen
            self._seen += piece
        return self

    def rest(self) -> list[str]:
        """All events, once the server has closed the connection."""
        while piece := self._socket.recv(1 << 16):
            self._seen += piece
        lines = self._seen.split(b"\n")
        return [line[6:].decode().strip() for line in lines if line.startswith(b"data: ")]

    def vanish(self) -> None:
        """Close, as a program that ended does."""
        self._socket.close()

    def reset(self) -> None:
        """Close with RST, as a machine does that knows nothing of the connection."""
        linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._socket.close()
