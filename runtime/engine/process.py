"""The engine as a process of its own, at the other end of a socket.

    reader thread   frames in -> inbox
    main thread     inbox -> engine core -> outbox
    writer thread   outbox -> frames out

The main thread never waits for the socket, so a front end that is slow to read does not hold up
a step. When the front end is gone the engine ends.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from runtime.engine.core import EngineCore
from runtime.engine.frames import (
    Abort,
    Control,
    ControlDone,
    FromEngine,
    NewSequence,
    Outputs,
    ToEngine,
)
from runtime.engine.grammar import GrammarError
from runtime.engine.parts import EngineParts
from runtime.engine.settings import EngineSettings
from runtime.engine.wire import START_FAILED, WireError, packed, receive, to_engine_decoder

MAX_FAILED_STEPS: Final = 20  # in a row
STARVED_WAIT_S: Final = 0.001
BUSY_TICK_S: Final = 0.02
IDLE_TICK_S: Final = 0.25


class EngineProcess:
    """Main loop over one connection."""

    def __init__(self, connection: socket.socket, parts: EngineParts) -> None:
        self._connection, self._parts = connection, parts
        self.core = EngineCore(parts)
        self._inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, name="engine reader", daemon=True),
            threading.Thread(target=self._write, name="engine writer", daemon=True),
        ]
        self._is_ending = False
        self._failed_in_a_row = 0
        self._reported_s = 0.0

    def run(self) -> None:
        """Serve until the front end goes or says so."""
        for thread in self._threads:
            thread.start()
        self._say(self._parts.info)
        self._report()
        while not self._is_ending:
            self._take(self._wait_s())
            if self._is_ending:
                break
            self._advance()
            if time.monotonic() - self._reported_s >= self._parts.settings.report_interval_s:
                self._report()
        self._outbox.put(None)
        self._threads[1].join(timeout=2.0)

    def _wait_s(self) -> float:
        core = self.core
        if core.has_work:
            return STARVED_WAIT_S if core.is_starved else 0.0
        mover = self._parts.mover
        return IDLE_TICK_S if mover is None or mover.at_rest else BUSY_TICK_S

    def _take(self, wait_s: float) -> None:
        """All messages that are there; waits for the first one."""
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            self._handle(message)
            while not self._is_ending:
                self._handle(self._inbox.get_nowait())

    def _handle(self, message: ToEngine | None) -> None:
        match message:
            case None:
                self._is_ending = True
            case NewSequence():
                self.core.add(message)
            case Abort():
                self.core.abort(message.sequence_ids)
            case Control():
                self._control(message)

    def _control(self, order: Control) -> None:
        error = ""
        try:
            match order.command:
                case "shutdown":
                    self._is_ending = True
                case "reset_prefix_cache":
                    self.core.reset_prefix_cache()
                case "write_decisions":
                    write_decisions(self._parts)
        except (OSError, ValueError) as failure:
            error = str(failure)
        self._say(ControlDone(order.number, error))

    def _advance(self) -> None:
        core = self.core
        if not core.has_work:
            core.idle()
            return
        failed = core.counts.failed_steps
        outputs = core.step()
        if outputs:
            self._say(Outputs(tuple(outputs)))
        is_failing = core.counts.failed_steps > failed
        self._failed_in_a_row = self._failed_in_a_row + 1 if is_failing else 0
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            message = f"the engine ends after {MAX_FAILED_STEPS} failed steps in a row"
            self._say(Outputs(tuple(core.fail_all(message))))
            self._is_ending = True

    def _report(self) -> None:
        self._reported_s = time.monotonic()
        self._say(self.core.stats())

    def _say(self, message: FromEngine) -> None:
        self._outbox.put(packed(message))

    def _read(self) -> None:
        try:
            while (body := receive(self._connection)) is not None:
                message = to_engine_decoder.decode(body)
                if isinstance(message, NewSequence):
                    self._compile_grammar(message)
                self._inbox.put(message)
        except (OSError, WireError, msgspec.DecodeError) as error:
            sys.stderr.write(f"engine: the front end is gone: {error}\n")
        finally:
            self._inbox.put(None)

    def _compile_grammar(self, new: NewSequence) -> None:
        """Beside the steps, so that none waits for it; the core finds it compiled."""
        if new.sampling.grammar is not None and self._parts.grammars is not None:
            with contextlib.suppress(GrammarError):  # the core says it
                self._parts.grammars.compile(new.sampling.grammar)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (frame := self._outbox.get()) is not None:
                self._connection.sendall(frame)


def write_decisions(parts: EngineParts) -> None:
    """Write the decision log, whole or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    from pathlib import Path

    from traces.whole_file import write_whole

    if parts.settings.decision_log is not None:
        path = Path(parts.settings.decision_log)
        try:
            write_whole(path, parts.log.to_bytes())
        except OSError as error:  # names the file, not the temporary one beside it
            raise OSError(error.errno, error.strerror, str(path)) from error


def run_engine(
    connection: socket.socket,
    settings: EngineSettings,
    build: Callable[[EngineSettings], EngineParts],
) -> int:
    """Load the model, serve, end; the exit code.

    What keeps the engine from starting is told to the front end. Signals that end a whole process
    group do not end the engine: the front end does, or its end.
    """
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # of the group: the front end drains first
        signal.signal(sent_to_all, signal.SIG_IGN)  # and says when to end
    try:
        parts = build(settings)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            connection.sendall(packed(ControlDone(START_FAILED, str(error) or repr(error))))
        connection.close()
        return 2
    try:
        EngineProcess(connection, parts).run()
    finally:
        try:
            write_decisions(parts)
        except OSError as error:
            sys.stderr.write(f"engine: the decision log is lost: {error}\n")
        parts.close()
        connection.close()
    return 0
