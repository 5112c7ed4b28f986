"""Engines under load: started, asked over HTTP or a pipe, and their CPU seconds counted.

A *server* speaks OpenAI's completions; a *worker* reads one JSON object per line on standard input,
``{"prompts": [[token, ...], ...], "new": 64}``, and answers each with one line ``{"tokens": [64,
...]}``. CPU seconds are those of the process and all its descendants, the front end's included.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import subprocess
import threading
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
READY_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Measured:
    """One batch of concurrent requests.

    Attributes:
        wall_s: From the first request to the last answer.
        cpu_s: Of the engine's processes meanwhile.
        first_token_s: Per request, until the first token; empty where the engine does not tell.
    """

    wall_s: float
    cpu_s: float
    first_token_s: tuple[float, ...] = ()


class Engine(Protocol):
    """What the benchmark drives."""

    name: str

    def start(self) -> None: ...

    def run(self, prompts: list[list[int]], new: int) -> Measured: ...

    def stop(self) -> None: ...


def cpu_seconds(root: int) -> float:
    """User and system seconds of a process, its descendants and those that they have reaped."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        ticks[int(folder.name)] = sum(int(fields[place]) for place in (11, 12, 13, 14))
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += ticks.get(process, 0)
        waiting += children.get(process, [])
    return total / TICKS_PER_S


class _Process:
    """A command in a process group of its own, one thread, passive waiting."""

    def __init__(self, name: str, command: str, threads: int, logs: Path) -> None:
        self.name = name
        self._command = shlex.split(command)
        self._environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.log = logs / f"{name.replace(' ', '-').replace('/', '-')}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **pipes: Any) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                start_new_session=True,
                stderr=log,
                **({"stdout": log} | pipes),
            )
        return self.process

    def require_alive(self) -> int:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}: see {self.log}")
        return self.process.pid

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class ServerEngine:
    """An OpenAI server that this process starts."""

    def __init__(
        self, name: str, model: str, url: str, command: str, threads: int, logs: Path
    ) -> None:
        self.name, self.model = name, model
        self._url = urllib.parse.urlparse(url)
        self._process = _Process(name, command, threads, logs)

    def start(self) -> None:
        """Start it and wait until ``/ready``, or where there is none ``/health``, answers 200."""
        self._process.start()
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            self._process.require_alive()
            status = self._status("/ready")
            if status == 200 or (status in (404, 405) and self._status("/health") == 200):
                return
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} was not ready in {READY_TIMEOUT_S} s")

    def run(self, prompts: list[list[int]], new: int) -> Measured:
        pid = self._process.require_alive()
        first: list[float] = []
        errors: list[str] = []
        threads = [
            threading.Thread(target=self._ask, args=(prompt, new, first, errors))
            for prompt in prompts
        ]
        cpu, start = cpu_seconds(pid), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s, cpu_s = time.perf_counter() - start, cpu_seconds(pid) - cpu
        if errors:
            raise RuntimeError(f"{self.name}: {errors[0]}")
        return Measured(wall_s, cpu_s, tuple(first))

    def stop(self) -> None:
        self._process.stop()

    @property
    def process_id(self) -> int:
        """Of the server."""
        return self._process.require_alive()

    def _status(self, path: str) -> int:
        connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def _ask(self, prompt: list[int], new: int, first: list[float], errors: list[str]) -> None:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            connection = http.client.HTTPConnection(
                self._url.hostname or "", self._url.port, timeout=REQUEST_TIMEOUT_S
            )
            start = time.perf_counter()
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                errors.append(f"status {answer.status}: {answer.read(500)!r}")
                return
            first_s, tokens = 0.0, 0
            for line in answer:
                if line.startswith(b"data: {"):
                    first_s = first_s or time.perf_counter() - start
                    usage = json.loads(line[6:]).get("usage") or {}
                    tokens = usage.get("completion_tokens", tokens)
            connection.close()
            if tokens != new:
                errors.append(f"{tokens} tokens came, {new} were asked for")
            first.append(first_s)
        except (OSError, ValueError, http.client.HTTPException) as error:
            errors.append(f"{type(error).__name__}: {error}")


class WorkerEngine:
    """A program that answers batches over a pipe."""

    def __init__(self, name: str, command: str, threads: int, logs: Path) -> None:
        self.name = name
        self._process = _Process(name, command, threads, logs)

    def start(self) -> None:
        self._pipe = self._process.start(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._exchange({"prompts": [[3, 4, 5]], "new": 2})

    def run(self, prompts: list[list[int]], new: int) -> Measured:
        pid = self._process.require_alive()
        cpu, start = cpu_seconds(pid), time.perf_counter()
        answer = self._exchange({"prompts": prompts, "new": new})
        wall_s, cpu_s = time.perf_counter() - start, cpu_seconds(pid) - cpu
        if answer["tokens"] != [new] * len(prompts):
            raise RuntimeError(
                f"{self.name}: {answer['tokens']} tokens came, {new} each were asked"
            )
        return Measured(wall_s, cpu_s)

    def stop(self) -> None:
        self._process.stop()

    def _exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._pipe.stdin is not None and self._pipe.stdout is not None
        self._pipe.stdin.write(json.dumps(question).encode() + b"\n")
        self._pipe.stdin.flush()
        line = self._pipe.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: see {self._process.log}")
        return dict(json.loads(line))
