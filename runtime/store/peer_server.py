"""Answers the other nodes: blocks, room for regions, announcements, signs of life.

One thread accepts, one more serves each connection; system calls and checksums release the
interpreter. Whatever goes wrong on a connection closes that connection and is counted; the server
goes on. Connections, frames and counts are bounded, and strangers are refused before they are
listened to (peer_identity.py).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreSetupError, StoreUnavailableError
from runtime.store.peer_answers import AnnouncementReceiver, PeerAnswers, ReadableMemory
from runtime.store.peer_counters import PeerCounters
from runtime.store.peer_faults import Seldom, what_failed
from runtime.store.peer_handler import PeerHandler
from runtime.store.peer_identity import (
    Incarnations,
    NodeIdentity,
    RefusedError,
    receive_greeting,
)
from runtime.store.peer_messages import Request
from runtime.store.wire import ClosedError, FrameError, close_socket, recv_frame

_log = structlog.get_logger(__name__)
_ACCEPT_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How much a server of peers lets happen at once.

    Attributes:
        connections: Open at the same time, handshakes included.
        handshakes: Unfinished at the same time.
        handshake_s: Longest handshake.
        idle_s: A connection without a request for so long is closed.
        request_s: Longest answer, whatever the asker allows.
    """

    connections: int = 512
    handshakes: int = 32
    handshake_s: float = 2.0
    idle_s: float = 600.0
    request_s: float = 60.0


class PeerServer:
    """A listening socket and the threads behind it.

    Args:
        host: Address to listen on.
        port: 0 picks a free one.
        handler: The node behind the server.
        identity: Who this node is.
        incarnations: Shared with the other parts of the node.
        receiver: Takes announcements.
        memory: Memory that may be read one-sided, if any.
        last_announced: Number of this node's last change announced.
        limits: How much is let happen at once.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handler: PeerHandler,
        identity: NodeIdentity,
        *,
        incarnations: Incarnations | None = None,
        receiver: AnnouncementReceiver | None = None,
        memory: ReadableMemory | None = None,
        last_announced: Callable[[], int] = lambda: 0,
        limits: ServerLimits | None = None,
    ) -> None:
        self.counters = PeerCounters()
        self._asked = (host, port)
        self._identity = identity
        self._incarnations = incarnations or Incarnations()
        self._limits = limits or ServerLimits()
        self._answers = PeerAnswers(handler, receiver, memory, self.counters, last_announced)
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        # Insertion order; the value is the node at the other end, once it is known.
        self._open: dict[socket.socket, tuple[threading.Thread, str, int]] = {}
        self._handshakes = 0
        self._seldom = Seldom()
        self._is_stopping = False
        self._incarnations.when_newer(self._close_older)

    @property
    def port(self) -> int:
        """Port listened on; only after start."""
        assert self._listener is not None
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        """Listens.

        Raises:
            StoreSetupError: If the address cannot be listened on.
        """
        host, port = self._asked
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise StoreSetupError(f"cannot listen on {host}:{port}: {error}") from error
        self._acceptor = threading.Thread(target=self._accept, name="peer-accept", daemon=True)
        self._acceptor.start()

    def stop(self, deadline: Deadline | None = None) -> bool:
        """Closes all connections and waits for the threads.

        Args:
            deadline: When to stop waiting; 10 s unless told.

        Returns:
            Whether all threads ended in time.
        """
        deadline = deadline or Deadline.after(10)
        with self._lock:
            self._is_stopping = True
            threads = [thread for thread, _, _ in self._open.values()]
            for sock in self._open:
                with suppress(OSError):  # its thread closes it
                    sock.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            close_socket(self._listener)
        if self._acceptor is not None:
            threads.append(self._acceptor)
        for thread in threads:
            thread.join(deadline.left_s())
        return not any(thread.is_alive() for thread in threads)

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._is_stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_stopping or self._listener.fileno() < 0:
                    return
                self.counters.add("accept_errors")  # such as no file descriptors left
                threading.Event().wait(_ACCEPT_PAUSE_S)
                continue
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        with self._lock:
            is_full = (
                len(self._open) >= self._limits.connections
                or self._handshakes >= self._limits.handshakes
            )
            if is_full or self._is_stopping:
                self.counters.add("connections_turned_away")
                close_socket(sock)
                return
            thread = threading.Thread(
                target=self._serve, args=(sock,), name="peer-serve", daemon=True
            )
            # Under the lock: stop() joins only threads that were started.
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had
                self.counters.add("connections_turned_away")
                close_socket(sock)
                return
            self._open[sock] = (thread, "", 0)
            self._handshakes += 1

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            node, incarnation = self._greet(sock)
            self._answer_all(sock, node, incarnation)
        except ClosedError:
            pass
        except RefusedError as error:
            self.counters.add("handshakes_refused")
            self._say("peer refused", reason=str(error), address=_address(sock))
        except FrameError as error:
            self.counters.add("bad_frames")
            self._say("peer connection closed", reason=str(error))
        except DeadlineError:
            self.counters.add("connections_timed_out")
        except (StoreUnavailableError, OSError):
            self.counters.add("connections_broken")
        except Exception as error:
            self.counters.add("handler_errors")
            self._say("peer connection closed by an error of this node", **what_failed(error))
        finally:
            close_socket(sock)
            with self._lock:
                self._open.pop(sock, None)

    def _say(self, event: str, **more: str) -> None:
        if self._seldom.may_say(event + str(more), now=time.monotonic()):
            _log.warning(event, **more)

    def _greet(self, sock: socket.socket) -> tuple[str, int]:
        try:
            hello = receive_greeting(
                sock, self._identity, self._incarnations, Deadline.after(self._limits.handshake_s)
            )
        finally:
            with self._lock:
                self._handshakes -= 1
        with self._lock:
            thread, _, _ = self._open[sock]
            self._open[sock] = (thread, hello.node, hello.incarnation)
            if self._is_stopping:
                raise ClosedError("the server is stopping")
        return hello.node, hello.incarnation

    def _answer_all(self, sock: socket.socket, node: str, incarnation: int) -> None:
        while True:
            request = recv_frame(sock, Request, Deadline.after(self._limits.idle_s))
            if incarnation != self._incarnations.newest(node):
                self.counters.add("older_incarnation_frames")
                return
            try:
                self._answers.answer(sock, node, incarnation, request, self._limits.request_s)
            except DeadlineError:
                self.counters.add("answers_late")
                raise
            self.counters.add(f"requests_{type(request).__name__.lower()}")

    def _close_older(self, node: str, incarnation: int) -> None:
        with self._lock:
            for sock, (_, other, seen) in self._open.items():
                if other == node and seen < incarnation:
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)


def _address(sock: socket.socket) -> str:
    """Host at the other end; its port is another one each time."""
    with suppress(OSError, IndexError):
        return str(sock.getpeername()[0])
    return "unknown"
