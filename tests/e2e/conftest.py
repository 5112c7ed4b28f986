"""One `runtime serve` of a tiny random model, started as a user would, shared by all tests here."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from runtime.demo_model_tiny import make_tiny_checkpoint

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
API_KEY = "a-key-of-the-tests"
MAX_QUEUED = 48


@dataclass(frozen=True)
class Served:
    """A server under test.

    Attributes:
        url: Its root, without a slash at the end.
        folder: Checkpoint that it serves.
        name: The model's.
        key: API key that it asks for.
    """

    url: str
    folder: Path
    name: str = "tiny"
    key: str = API_KEY

    def metric(self, name: str) -> float:
        """Sum over the labels of one metric, as Prometheus would read it."""
        found = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.key}"})
        found.raise_for_status()
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in found.text.splitlines()
            if re.match(rf"{re.escape(name)}[{{ ]", line)
        ]
        assert values, f"/metrics has no {name}"
        return sum(values)

    def wait_for(self, condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
        """Whether it comes true in time."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            if condition():
                return True
            time.sleep(0.05)
        return False


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server; its last act is a clean exit on SIGTERM."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    make_tiny_checkpoint(folder)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "runtime", "serve", str(folder), "--name", "tiny"),
            *("--port", "0", "--threads", "1", "--memory", "64MiB", "--prefix-memory", "32MiB"),
            *("--api-key", API_KEY, "--max-queued-requests", str(MAX_QUEUED)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    try:
        yield Served(_wait_until_ready(lines), folder)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_LIMIT_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Empty the pipe for as long as the server writes; the log of requests is of no use here."""
    assert process.stderr is not None
    with contextlib.suppress(ValueError):
        for line in process.stderr:
            lines.put(line)
    lines.put(None)


def _wait_until_ready(lines: queue.Queue[str | None]) -> str:
    """The root URL that the greeting tells."""
    seen: list[str] = []
    until_s = time.monotonic() + START_LIMIT_S
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left_s)
        except queue.Empty:
            break
        if line is None:
            pytest.fail("the server ended before it was ready:\n" + "".join(seen))
        seen.append(line)
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/v1, metrics at", line):
            return found.group(1)
    pytest.fail(f"the server was not ready within {START_LIMIT_S} s:\n" + "".join(seen))
