"""Serves the engines of this node over a unix socket; blocks go through shared memory.

One thread per connection. The connections of one client form a session: its leases and
reservations end with its last connection, however the client went.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any, assert_never

import structlog

from runtime.store import messages
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError, StoreSetupError
from runtime.store.forks import on_fork
from runtime.store.leases import Holder
from runtime.store.messages import TENANT_SIZES, parted
from runtime.store.node import StoreNode
from runtime.store.node_stats import node_stats
from runtime.store.wire import ClosedError, close_socket, recv_frame, send_frame

GREETING_S = 5.0
PROBE_S = 2.0
REPLY_S = 5.0
ACCEPT_PAUSE_S = 0.1
IDLE_S = 3600.0 * 24 * 365
MOST_BYTES = 64 << 20
MOST_CONNECTIONS = 1024

_log = structlog.get_logger("store")


class UnixServer:
    """Listens on a socket file."""

    def __init__(self, node: StoreNode, path: Path) -> None:
        """Listen.

        Args:
            node: Open.
            path: Of the socket; a file that a server left there is replaced.

        Raises:
            StoreSetupError: If another server listens there, or the path cannot be used.
        """
        self._node, self.path = node, path
        self._pid = os.getpid()
        self._listener = _listen(path)
        self._lock = threading.Lock()
        self._sessions: dict[bytes, tuple[Holder, int]] = {}
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._is_stopping = False
        self._stopped = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="store-accept", daemon=True)
        on_fork(self, UnixServer._forget)

    def _forget(self) -> None:
        """In a forked child: clients are to see at once when the parent goes away."""
        self._pid = 0
        for sock in (self._listener, *self._threads.values()):
            sock.close()

    def start(self) -> None:
        """Serve from now on."""
        self._acceptor.start()

    def stop(self, deadline: Deadline) -> None:
        """Close all connections and the socket; in a forked child do nothing."""
        if os.getpid() != self._pid:
            return
        self._is_stopping = True
        self._stopped.set()
        close_socket(self._listener)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        with self._lock:
            threads = dict(self._threads)
        for sock in threads.values():
            close_socket(sock)
        for thread in (*threads, self._acceptor):
            if thread.is_alive():
                thread.join(max(0.1, deadline.left_s()))

    @property
    def num_sessions(self) -> int:
        """Clients that are connected."""
        return len(self._sessions)

    def _accept(self) -> None:
        while not self._is_stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_stopping:
                    return
                self._node.state.counters.add("accept_errors")  # such as no descriptors left
                self._stopped.wait(ACCEPT_PAUSE_S)
                continue
            if not self._take(sock):
                self._node.state.counters.add("connections_refused")
                close_socket(sock)

    def _take(self, sock: socket.socket) -> bool:
        """A thread for a connection; False if there are too many."""
        thread = threading.Thread(
            target=self._serve, args=(sock,), name="store-client", daemon=True
        )
        with self._lock:
            if self._is_stopping or len(self._threads) >= MOST_CONNECTIONS:
                return False
            self._threads[thread] = sock
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            with self._lock:
                del self._threads[thread]
            return False
        return True

    def _serve(self, sock: socket.socket) -> None:
        session, holder, reply = None, 0, None
        try:
            session, holder = self._greet(sock)
            while True:
                request = recv_frame(
                    sock, messages.Request, Deadline.after(IDLE_S), max_bytes=MOST_BYTES
                )
                reply = self._answer(request, holder)
                if reply is not None:
                    send_frame(sock, reply, Deadline.after(REPLY_S), max_bytes=MOST_BYTES)
        except ClosedError:
            pass
        except StoreError as error:
            # Reset instead of closed: the last answer was not read, so nobody knows of its lease.
            self._take_back(reply, holder)
            if not self._is_stopping:
                self._node.state.counters.add("connections_broken")
                _log.info("client connection ended", detail=str(error))
        finally:
            close_socket(sock)
            with self._lock:
                self._threads.pop(threading.current_thread(), None)
            if session is not None:
                self._leave(session)

    def _take_back(self, reply: Any, holder: Holder) -> None:
        match reply:
            case messages.Offer(lease_id=lease_id) if lease_id:
                self._node.release(lease_id, holder)
            case messages.Room(reservation_id=reservation_id) if reservation_id:
                self._node.abort(reservation_id, holder)
            case _:
                return
        self._node.state.counters.add("answers_unread")

    def _greet(self, sock: socket.socket) -> tuple[bytes, Holder]:
        deadline = Deadline.after(GREETING_S)
        hello = recv_frame(sock, messages.Hello, deadline)
        if hello.version != messages.VERSION:
            reason = f"this server speaks version {messages.VERSION}, found {hello.version}"
            send_frame(sock, messages.Failed(reason), deadline)
            raise StoreError(f"a client of version {hello.version}")
        with self._lock:
            holder, count = self._sessions.get(hello.session, (0, 0))
            holder = holder or self._node.new_holder()
            self._sessions[hello.session] = (holder, count + 1)
        node = self._node
        welcome = messages.Welcome(
            os.fspath(node.arena.path), node.config.node, node.state.incarnation
        )
        try:
            send_frame(sock, welcome, deadline)
        except StoreError:
            self._leave(hello.session)
            raise
        return hello.session, holder

    def _leave(self, session: bytes) -> None:
        with self._lock:
            holder, count = self._sessions[session]
            if count > 1:
                self._sessions[session] = (holder, count - 1)
                return
            del self._sessions[session]
        self._node.leave(holder)

    def _answer(self, request: messages.Request, holder: Holder) -> Any:
        try:
            return self._dispatch(request, holder)
        except StoreError as error:
            return messages.Failed(str(error))
        except Exception as error:  # a fault of ours must not end the client's session
            self._node.state.counters.add("requests_failed")
            _log.exception("request failed", request=type(request).__name__)
            if isinstance(request, messages.Release | messages.Abort | messages.Doubt):
                return None
            return messages.Failed(f"{type(error).__name__} in the server")

    def _dispatch(self, request: messages.Request, holder: Holder) -> Any:
        node = self._node
        match request:
            case messages.Lookup():
                return messages.Count(node.lookup(parted(request.keys)))
            case messages.Load():
                if len(request.tenant) not in TENANT_SIZES:
                    return messages.Failed("a tenant's tag has 0 or 16 bytes")
                offer = node.load(
                    parted(request.keys),
                    holder=holder,
                    deadline=Deadline.after(request.left_s),
                    category=request.category,
                    is_checked=request.is_checked,
                    tenant=request.tenant,
                )
                blocks = [(room.slot, room.generation, room.info) for room in offer.rooms]
                return messages.Offer(0 if offer.lease is None else offer.lease.lease_id, blocks)
            case messages.Release():
                node.release(request.lease_id, holder)
                return None
            case messages.Doubt():
                node.doubt(request.key)
                return None
            case messages.Reserve():
                return self._reserve(request, holder)
            case messages.Commit():
                return messages.Count(
                    node.commit(
                        request.reservation_id,
                        request.checksums,
                        holder=holder,
                        deadline=Deadline.after(request.left_s),
                        is_durable=request.is_durable,
                    )
                )
            case messages.Abort():
                node.abort(request.reservation_id, holder)
                return None
            case messages.Flush():
                return messages.Count(int(node.flush(Deadline.after(request.left_s))))
            case messages.Stats():
                return messages.Text(json.dumps(node_stats(node)))
        assert_never(request)

    def _reserve(
        self, request: messages.Reserve, holder: Holder
    ) -> messages.Room | messages.Failed:
        keys = parted(request.keys)
        if len(request.tenant) not in TENANT_SIZES:
            return messages.Failed("a tenant's tag has 0 or 16 bytes")
        if request.first + len(request.lengths) != len(keys):
            return messages.Failed("as many lengths as keys behind the first are needed")
        found = self._node.reserve(
            keys,
            request.lengths,
            first=request.first,
            tenant=request.tenant,
            holder=holder,
            is_durable=request.is_durable,
        )
        slots = [room.slot for room in found.rooms]
        return messages.Room(found.reservation_id, found.start, slots, found.reason)


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > 100:
        raise StoreSetupError(f"{path}: the path of a unix socket must be at most 100 bytes long")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise StoreSetupError(f"{path}: is there and is not a socket")
            sock.settimeout(PROBE_S)
            try:
                sock.connect(os.fspath(path))
            except (TimeoutError, BlockingIOError):  # it listens, and is too busy to say so
                raise StoreSetupError(f"{path}: another server listens there") from None
            except OSError:
                path.unlink()  # nobody listens: a server that was killed left it
                sock.close()
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            else:
                raise StoreSetupError(f"{path}: another server listens there")
        path.parent.mkdir(parents=True, exist_ok=True)
        mask = os.umask(0o177)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(mask)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise StoreSetupError(f"{path}: {error.strerror or error}") from error
    except StoreSetupError:
        sock.close()
        raise
    return sock
