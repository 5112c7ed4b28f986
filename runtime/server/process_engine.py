"""An engine in a process of its own, as the front end sees it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final

import msgspec

from runtime.engine.frames import (
    Abort,
    Control,
    ControlDone,
    EngineInfo,
    EngineStats,
    FromEngine,
    NewSequence,
    Outputs,
    SequenceOutput,
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
from runtime.server.engine_client import EngineGoneError

SHUTDOWN_S: Final = 10.0
PASSIVE_THREADS: Final = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


class EngineStartError(ValueError):
    """The engine did not start; the message is its own."""


class ProcessEngine:
    """The front end's side of the socket; see ``EngineClient``."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        info: EngineInfo,
    ) -> None:
        """See ``start``."""
        self._process, self._reader, self._writer = process, reader, writer
        self._info, self._stats = info, EngineStats()
        self._heard_s = time.monotonic()
        self._is_alive = True
        self._queues: dict[str, asyncio.Queue[SequenceOutput | None]] = {}
        self._controls: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count(1)
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
    def info(self) -> EngineInfo:
        """What it serves."""
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Its last report."""
        return self._stats

    @property
    def silent_s(self) -> float:
        """Seconds since it last said anything."""
        return time.monotonic() - self._heard_s

    @property
    def is_alive(self) -> bool:
        """False once it has ended."""
        return self._is_alive

    @property
    def process_id(self) -> int:
        """Of the engine."""
        return self._process.pid

    async def submit(self, sequence: NewSequence) -> AsyncIterator[SequenceOutput]:
        """See ``EngineClient.submit``."""
        if not self._is_alive:
            raise EngineGoneError("the engine has ended")
        queue: asyncio.Queue[SequenceOutput | None] = asyncio.Queue()
        self._queues[sequence.sequence_id] = queue
        is_over = False
        try:
            self._say(sequence)
            while not is_over:
                output = await queue.get()
                if output is None:
                    is_over = True
                    raise EngineGoneError("the engine has ended")
                is_over = output.finish_reason is not None
                yield output
        finally:
            self._queues.pop(sequence.sequence_id, None)
            if not is_over:
                self._say(Abort((sequence.sequence_id,)))

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """See ``EngineClient.abort``."""
        known = tuple(name for name in sequence_ids if name in self._queues)
        if known:
            self._say(Abort(known))
            for name in known:
                self._queues[name].put_nowait(
                    SequenceOutput(sequence_id=name, finish_reason="abort")
                )

    async def control(self, command: str) -> None:
        """See ``EngineClient.control``."""
        if not self._is_alive:
            raise EngineGoneError("the engine has ended")
        number = next(self._numbers)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._controls[number] = done
        try:
            self._say(
                msgspec.convert(
                    {"type": "control", "command": command, "number": number}, type=Control
                )
            )
            error = await done
        finally:
            self._controls.pop(number, None)
        if error:
            raise RuntimeError(error)

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
                self._heard_s = time.monotonic()
                self._hear(message)
        finally:
            self._is_alive = False
            for queue in self._queues.values():
                queue.put_nowait(None)
            for done in self._controls.values():
                if not done.done():
                    done.set_exception(EngineGoneError("the engine has ended"))

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    queue = self._queues.get(output.sequence_id)
                    if queue is not None:
                        queue.put_nowait(output)
            case EngineStats():
                tokens = self._stats.step_tokens if len(self._stats.step_tokens) < 4096 else ()
                self._stats = msgspec.structs.replace(
                    message, step_tokens=tokens + message.step_tokens
                )
            case ControlDone():
                done = self._controls.get(message.number)
                if done is not None and not done.done():
                    done.set_result(message.error)
            case EngineInfo():
                self._info = message

    def take_step_tokens(self) -> tuple[int, ...]:
        """Tokens of the steps reported since the last call."""
        taken = self._stats.step_tokens
        self._stats = msgspec.structs.replace(self._stats, step_tokens=())
        return taken

    def _say(self, message: ToEngine) -> None:
        if self._is_alive:
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
