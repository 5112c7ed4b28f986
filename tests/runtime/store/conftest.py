"""Chains of blocks whose bytes follow from their keys, so that a wrong byte is always seen."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.store.errors import StoreUnavailableError
from runtime.store.store import PrefixStore, connect

BLOCK = 4096


def chain(name: str, length: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(length)]


def block(key: bytes, size: int = BLOCK) -> bytes:
    return (hashlib.sha256(key).digest() * (size // 32 + 1))[:size]


def blocks(keys: list[bytes]) -> list[bytes]:
    return [block(key) for key in keys]


class ServerProcess:
    """A server of its own process, on one folder, that can be killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.socket = folder / "store.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> PrefixStore:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "runtime", "store", "serve", str(self.folder)),
                    *("--block-bytes", str(BLOCK), *self.options),
                ],
                stderr=log,
            )
        return self.connect()

    def connect(self) -> PrefixStore:
        for _ in range(400):
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log").read_text()
            try:
                return connect(self.socket)
            except StoreUnavailableError:
                time.sleep(0.05)
        raise AssertionError("the server does not answer")

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        return self.process.wait(20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def make(*options: str, name: str = "s") -> ServerProcess:
        one = ServerProcess(tmp_path / name, *options)
        started.append(one)
        return one

    yield make
    for one in started:
        if one.process is not None:
            one.kill(signal.SIGTERM)
