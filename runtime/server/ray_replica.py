"""An engine inside a replica of Ray Serve.

    stream to the front end <- event loop <- socket <- engine thread
    calls of the front end  -> event loop -> socket -> engine thread

The engine thread is that of the engine process, and so are its frames, which pass through here in
batches as they are; the replica only keeps the ids of living sequences, to abort them when their
front end is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from runtime.engine.frames import Abort, ControlDone, EngineInfo, NewSequence, Outputs
from runtime.engine.settings import EngineSettings
from runtime.engine.wire import (
    LENGTH,
    START_FAILED,
    from_engine_decoder,
    length_of,
    packed,
    to_engine_decoder,
)

END_S: Final = 10.0
MOST_WAITING_BYTES: Final = 1 << 26
"""Kept for a front end that does not take its stream; it is then taken for gone."""


class EngineReplica:
    """One engine; the class that is deployed."""

    def __init__(self, settings: bytes, is_local: bool = False) -> None:
        """Load the model and start the engine thread.

        What keeps the engine from starting is told to whoever listens, since an error here would
        only be repeated by Serve.

        Args:
            settings: ``EngineSettings`` as msgpack.
            is_local: The cluster is this machine alone: nothing listens but on loopback.
        """
        if is_local:
            _listen_on_loopback()
        self._failure = ""
        self._living: set[str] = set()
        self._info: bytes = b""
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._news, self._is_connected = asyncio.Event(), asyncio.Event()
        self._listener = 0  # number of the one that listens; 0: nobody does
        self._listeners = 0
        self._has_ended = False
        self._pump: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._open(msgspec.msgpack.decode(settings, type=EngineSettings))

    def _open(self, settings: EngineSettings) -> None:
        from runtime.engine.build import build_engine
        from runtime.engine.process import EngineProcess, write_decisions

        try:
            parts = build_engine(settings)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            self._failure = str(error) or repr(error)
            return
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

        def run() -> None:
            try:
                EngineProcess(theirs, parts).run()
            finally:
                with contextlib.suppress(OSError):
                    write_decisions(parts)
                parts.close()
                theirs.close()

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    async def say(self, frames: bytes) -> None:
        """Pass frames on to the engine, in their order.

        Raises:
            RuntimeError: If it has ended.
        """
        if self._failure:
            raise RuntimeError(self._failure)
        await self._connect()
        if self._has_ended:
            raise RuntimeError("the engine has ended")
        begin = 0
        while begin < len(frames):
            end = begin + LENGTH.size + length_of(frames[begin : begin + LENGTH.size])
            message = to_engine_decoder.decode(frames[begin + LENGTH.size : end])
            if isinstance(message, NewSequence):
                self._living.add(message.sequence_id)
            elif isinstance(message, Abort):
                self._living.difference_update(message.sequence_ids)
            begin = end
        self._writer.write(frames)
        await self._writer.drain()

    async def listen(self) -> AsyncIterator[bytes]:
        """All that the engine says, as frames, its ``EngineInfo`` first; ends with the engine.

        A new listener takes the place of the one before. When nobody listens, the sequences that
        were under way are aborted.
        """
        if self._failure:
            yield packed(ControlDone(START_FAILED, self._failure))
            return
        await self._connect()
        self._listeners += 1
        number = self._listener = self._listeners
        self._waiting.clear()
        self._waiting_bytes = 0
        self._news.set()
        try:
            while not self._info and not self._has_ended:
                await self._wait()
            yield self._info
            while number == self._listener:
                if self._waiting:
                    frames = b"".join(self._waiting)
                    self._waiting.clear()
                    self._waiting_bytes = 0
                    yield frames
                elif self._has_ended:
                    return
                else:
                    await self._wait()
        finally:
            if number == self._listener:
                self._nobody_listens()

    async def process_id(self) -> int:
        """Of the replica."""
        return os.getpid()

    def check_health(self) -> None:
        """Asked by Serve, which starts a replica anew whose engine has ended.

        Raises:
            RuntimeError: If it has.
        """
        if self._thread is not None and not self._thread.is_alive():
            raise RuntimeError("the engine has ended")

    def __del__(self) -> None:
        """Called by Serve when the replica is to end: the engine writes its log and frees all.

        The end of the stream is what ends an engine whose front end is gone.
        """
        thread: threading.Thread | None = getattr(self, "_thread", None)
        if thread is not None and thread.is_alive():
            with contextlib.suppress(OSError):
                self._ours.shutdown(socket.SHUT_WR)
            thread.join(END_S)

    async def _connect(self) -> None:
        """The replica's event loop reads from the engine from now on."""
        if self._pump is None and self._thread is not None:
            self._pump = asyncio.create_task(self._read())
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._ours)
            self._is_connected.set()
        await self._is_connected.wait()

    async def _read(self) -> None:
        await self._is_connected.wait()
        try:
            while True:
                head = await self._reader.readexactly(LENGTH.size)
                body = await self._reader.readexactly(length_of(head))
                self._heard(head + body, from_engine_decoder.decode(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._has_ended = True
            self._news.set()

    def _heard(self, frame: bytes, message: object) -> None:
        if isinstance(message, EngineInfo):
            self._info = frame
            self._news.set()
            return
        if isinstance(message, Outputs):
            self._living.difference_update(
                one.sequence_id for one in message.outputs if one.finish_reason is not None
            )
        if self._listener == 0:
            return
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        self._news.set()
        if self._waiting_bytes > MOST_WAITING_BYTES:
            self._nobody_listens()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _nobody_listens(self) -> None:
        self._listener = 0
        self._waiting.clear()
        self._waiting_bytes = 0
        self._news.set()
        if self._living and not self._has_ended:
            self._writer.write(packed(Abort(tuple(self._living))))
            self._living.clear()


def _listen_on_loopback() -> None:
    """Serve's port between deployments, which nobody uses here, is bound to all addresses.

    There is no setting for it; what binds it is called after the replica's own ``__init__``.
    """
    replica: Any = importlib.import_module("ray.serve._private.replica")
    bind = getattr(replica, "add_port_to_grpc_server", None)
    if bind is not None:
        replica.add_port_to_grpc_server = lambda server, address: bind(
            server, address.replace("[::]", "127.0.0.1")
        )
