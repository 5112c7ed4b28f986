"""An engine in a process of its own, as the front end sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from typing import Final

import msgspec

from runtime.engine.frames import (
    Control,
    ControlDone,
    EngineInfo,
    FromEngine,
    ToEngine,
)
from runtime.engine.settings import EngineSettings
from runtime.engine.wire import (
    LENGTH,
    START_FAILED,
    WireError,
    from_engine_decoder,
    length_of,
    packed,
)
from runtime.server.framed_engine import FramedEngine

SHUTDOWN_S: Final = 10.0
PASSIVE_THREADS: Final = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


class EngineStartError(ValueError):
    """The engine did not start; the message is its own."""


class ProcessEngine(FramedEngine):
    """The front end's side of the socket; see ``EngineClient``."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        info: EngineInfo,
    ) -> None:
        """See ``start``."""
        super().__init__(info)
        self._process, self._reader, self._writer = process, reader, writer
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, settings: EngineSettings) -> ProcessEngine:
        """Start a process and wait until its model is loaded.

        Raises:
            EngineStartError: If it ends before.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            threads = str(settings.threads)
            process = subprocess.Popen(  # outlives this call: ended by close
                [
                    sys.executable,
                    "-m",
                    "runtime.engine",
                    str(theirs.fileno()),
                    msgspec.json.encode(settings).decode(),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": threads, **PASSIVE_THREADS, **os.environ},
            )
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            first = await _next(reader)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if isinstance(first, EngineInfo):
            return cls(process, reader, writer, first)
        writer.close()
        code = await asyncio.to_thread(process.wait)
        if isinstance(first, ControlDone) and first.number == START_FAILED:
            raise EngineStartError(first.error)
        raise EngineStartError(f"the engine ended with exit code {code} before it was ready")

    @property
    def process_id(self) -> int:
        """Of the engine."""
        return self._process.pid

    async def close(self) -> None:
        """See ``EngineClient.close``."""
        with contextlib.suppress(OSError, WireError):
            self._say(Control(command="shutdown"))
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), SHUTDOWN_S)
        except TimeoutError:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listening
        self._writer.close()

    async def _listen(self) -> None:
        try:
            while (message := await _next(self._reader)) is not None:
                self._hear(message)
        finally:
            self._gone()

    def _send(self, message: ToEngine) -> None:
        self._writer.write(packed(message))


async def _next(reader: asyncio.StreamReader) -> FromEngine | None:
    """The next message; None when the engine is gone."""
    try:
        head = await reader.readexactly(LENGTH.size)
        body = await reader.readexactly(length_of(head))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    message: FromEngine = from_engine_decoder.decode(body)
    return message
