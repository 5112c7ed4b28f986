"""The way to the server of this node: a unix socket for messages, shared memory for blocks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from runtime.store import messages
from runtime.store.arena import SharedArena
from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreError, StoreUnavailableError
from runtime.store.forks import on_fork
from runtime.store.link import Offered, Reserved
from runtime.store.socket_answers import count_of, offered, reserved, stats_of
from runtime.store.wire import FrameError, close_socket, recv_frame, send_frame

CONNECT_S = 2.0
RETRY_S = 1.0
TELL_S = 0.25
MOST_UNSAID = 4096  # what is older has expired since
MOST_BYTES = 64 << 20
MOST_IDLE = 8
_Reply = TypeVar("_Reply")
_Answer = TypeVar("_Answer")


class _StaleError(StoreUnavailableError):
    """A connection that had been used before is closed at the other end."""


class SocketLink:
    """Connections of one client to the server of its node. Thread-safe.

    When the server goes away every call raises ``StoreUnavailableError`` at once; a new connection
    is tried at most once a second. So does a call whose answer is none, and its connection is
    closed. A forked child is a client of its own: it shares no connection with its parent.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Connect.

        Raises:
            StoreUnavailableError: If no server answers there.
        """
        self.path = Path(path)
        self._arena: SharedArena | None = None
        self._server = 0
        self._is_closed = False
        self._start_session()
        on_fork(self, SocketLink._forget)
        try:
            self._give_back(self._connect(Deadline.after(CONNECT_S)))
        except DeadlineError as error:
            raise StoreUnavailableError(f"{self.path}: no store answers: {error}") from error

    def _start_session(self) -> None:
        self._pid = os.getpid()
        self._session = os.urandom(16)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()  # all, in whatever state
        self._idle: list[socket.socket] = []
        self._open: dict[socket.socket, SharedArena] = {}
        self._presence_server = 0
        self._presence: socket.socket | None = None  # never idle: while it lives, leases do
        self._unsaid: deque[Any] = deque(maxlen=MOST_UNSAID)
        self._retry_at_s = 0.0

    def _forget(self) -> None:
        """In a forked child: the connections and what is held over them are the parent's."""
        inherited = list(self._sockets)
        self._start_session()
        for sock in inherited:
            sock.close()  # not shut down: that would end the parent's connection

    @property
    def arena(self) -> SharedArena:
        """The shared memory of the server that was connected last."""
        assert self._arena is not None
        return self._arena

    # --- verbs -----------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], deadline: Deadline) -> int:
        """See ``StoreLink``."""
        request = messages.Lookup(messages.joined(keys))
        return self._ask(request, messages.Count, deadline, partial(count_of, most=len(keys)))

    def load(
        self,
        keys: Sequence[bytes],
        deadline: Deadline,
        category: int,
        is_checked: bool,
        tenant: bytes,
    ) -> Offered:
        """See ``StoreLink``."""
        request = messages.Load(
            messages.joined(keys), deadline.left_s(), category, is_checked, tenant
        )
        return self._ask(request, messages.Offer, deadline, partial(offered, most=len(keys)))

    def doubt(self, key: bytes) -> None:
        """See ``StoreLink``."""
        self._tell(messages.Doubt(key))

    def release(self, lease_id: int) -> None:
        """See ``StoreLink``."""
        self._tell(messages.Release(lease_id))

    def reserve(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        first: int,
        tenant: bytes,
        is_durable: bool,
        deadline: Deadline,
    ) -> Reserved:
        """See ``StoreLink``."""
        request = messages.Reserve(messages.joined(keys), list(lengths), first, tenant, is_durable)
        accept = partial(reserved, first=first, lengths=lengths)
        return self._ask(request, messages.Room, deadline, accept)

    def commit(
        self, reservation_id: int, checksums: Sequence[int], is_durable: bool, deadline: Deadline
    ) -> int:
        """See ``StoreLink``."""
        request = messages.Commit(reservation_id, list(checksums), is_durable, deadline.left_s())
        return self._ask(request, messages.Count, deadline, partial(count_of, most=len(checksums)))

    def abort(self, reservation_id: int) -> None:
        """See ``StoreLink``."""
        self._tell(messages.Abort(reservation_id))

    def flush(self, deadline: Deadline) -> bool:
        """See ``StoreLink``."""
        request = messages.Flush(deadline.left_s())
        return bool(self._ask(request, messages.Count, deadline, partial(count_of, most=1)))

    def stats(self, deadline: Deadline) -> Mapping[str, Any]:
        """See ``StoreLink``."""
        return self._ask(messages.Stats(), messages.Text, deadline, stats_of)

    def close(self) -> None:
        """Close all connections: leases and reservations end."""
        with self._lock:
            self._is_closed = True
            sockets, self._sockets, self._open, self._idle = self._sockets, set(), {}, []
        for sock in sockets:
            close_socket(sock)
        if self._arena is not None:
            self._arena.close()

    # --- connections -----------------------------------------------------------------------

    def _ask(
        self,
        request: Any,
        kind: type[_Reply],
        deadline: Deadline,
        accept: Callable[[_Reply, SharedArena], _Answer],
    ) -> _Answer:
        """What the server says.

        Args:
            request: The message.
            kind: What answers it, unless it fails.
            deadline: When to give up.
            accept: Takes the answer and the memory of the very server that gave it; raises
                ``ValueError`` or ``FrameError`` if it can be no answer to this request.
        """

        def take(reply: Any, arena: SharedArena) -> _Answer | messages.Failed:
            if isinstance(reply, messages.Failed):
                return reply
            if not isinstance(reply, kind):
                raise FrameError(f"an answer of another kind: {type(reply).__name__}")
            return accept(reply, arena)

        try:
            answer = self._exchange(request, deadline, take)
        except _StaleError:  # the server went away while the connection lay idle
            self._drop_idle()
            answer = self._exchange(request, deadline, take)
        if isinstance(answer, messages.Failed):
            raise StoreUnavailableError(f"the server answered: {answer.reason}")
        return answer

    def _exchange(
        self, request: Any, deadline: Deadline, take: Callable[[Any, SharedArena], _Answer]
    ) -> _Answer:
        with self._connection(deadline) as (sock, is_used):
            with self._lock:
                arena = self._open.get(sock)
            if arena is None:
                raise StoreUnavailableError("the store is closed")
            try:
                self._say_unsaid(sock, deadline)
                send_frame(sock, request, deadline, max_bytes=MOST_BYTES)
                return take(recv_frame(sock, messages.Reply, deadline, MOST_BYTES), arena)
            except (FrameError, ValueError) as error:  # out of step, or no server of ours
                raise StoreUnavailableError(f"the server's answer is none: {error}") from error
            except StoreUnavailableError as error:
                if is_used and not deadline.is_over:
                    raise _StaleError(str(error)) from error
                raise

    def _tell(self, message: Any) -> None:
        """Say something that is not answered; now, or else before the next request."""
        deadline = Deadline.after(TELL_S)
        try:
            with self._connection(deadline) as (sock, _):
                send_frame(sock, message, deadline)
        except StoreError:
            self._unsaid.append(message)
            raise

    def _say_unsaid(self, sock: socket.socket, deadline: Deadline) -> None:
        """Else a server that lives would keep room for whoever gave up."""
        while self._unsaid:
            with suppress(IndexError):  # another thread took the last
                message = self._unsaid.popleft()
                try:
                    send_frame(sock, message, deadline)
                except StoreError:
                    self._unsaid.append(message)
                    raise

    @contextmanager
    def _connection(self, deadline: Deadline) -> Iterator[tuple[socket.socket, bool]]:
        """A connection that nobody else uses, and whether it was used before.

        Closed after an error, for it is out of step.
        """
        if self._pid != os.getpid():  # forked in a way that tells nobody
            self._forget()
        with self._lock:
            if self._is_closed:
                raise StoreUnavailableError("the store is closed")
            sock = self._idle.pop() if self._idle else None
        is_used = sock is not None
        if sock is None:
            sock = self._connect(deadline.earlier(CONNECT_S))
        try:
            yield sock, is_used
        except BaseException:
            self._drop(sock)
            raise
        self._give_back(sock)

    def _give_back(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._is_closed and sock in self._open and len(self._idle) < MOST_IDLE:
                self._idle.append(sock)
                return
        self._drop(sock)

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.pop(sock, None)
            self._sockets.discard(sock)
        # Not shut down before: the server is to see an answer that nobody read as a reset.
        sock.close()

    def _connect(self, deadline: Deadline) -> socket.socket:
        sock, arena = self._open_socket(deadline)
        with self._lock:
            lost = None
            if self._is_closed:
                lost = sock
            elif self._presence is None or self._presence_server != self._server:
                lost, self._presence = self._presence, sock
                self._presence_server = self._server
            else:
                self._open[sock] = arena
                return sock
        if lost is not None:
            with self._lock:
                self._sockets.discard(lost)
            close_socket(lost)
        if lost is sock:
            raise StoreUnavailableError("the store is closed")
        return self._connect(deadline)

    def _open_socket(self, deadline: Deadline) -> tuple[socket.socket, SharedArena]:
        if time.monotonic() < self._retry_at_s:
            raise StoreUnavailableError(f"{self.path}: the server is gone")
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # such as no descriptors left
            raise StoreUnavailableError(f"{self.path}: {error.strerror}") from error
        with self._lock:
            self._sockets.add(sock)
        try:
            sock.settimeout(deadline.require("connecting"))
            sock.connect(os.fspath(self.path))
            hello = messages.Hello(messages.VERSION, self._session)
            send_frame(sock, hello, deadline)
            reply = recv_frame(sock, messages.Reply, deadline)
            if not isinstance(reply, messages.Welcome):
                reason = reply.reason if isinstance(reply, messages.Failed) else "no welcome"
                raise StoreUnavailableError(f"{self.path}: {reason}")
            arena = self._greet(reply)
        except (TimeoutError, DeadlineError) as error:
            self._drop(sock)  # a caller in a hurry says nothing about the server
            raise DeadlineError("out of time while connecting") from error
        except (OSError, ValueError, StoreError) as error:
            self._drop(sock)
            self._retry_at_s = time.monotonic() + RETRY_S
            if isinstance(error, StoreUnavailableError):
                raise
            detail = getattr(error, "strerror", None) or error
            raise StoreUnavailableError(f"{self.path}: no store answers: {detail}") from error
        return sock, arena

    def _greet(self, welcome: messages.Welcome) -> SharedArena:
        """Map the server's memory; a server that started again may have another."""
        with self._lock:
            if self._arena is None or welcome.server != self._server:
                # The old mapping stays alive as long as views into it do.
                self._arena = SharedArena(Path(welcome.arena), is_writable=True)
                self._server = welcome.server
            return self._arena
