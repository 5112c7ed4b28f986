"""Connections to other nodes, kept open between requests.

A connection belongs to one request at a time; it is closed after any error, since its stream is
out of step then, and otherwise kept for the next request of the same use. A request that finds all
connections of its use taken waits for one until its deadline.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreError, StoreUnavailableError
from runtime.store.peer_counters import PeerCounters
from runtime.store.peer_faults import Seldom
from runtime.store.peer_identity import Incarnations, NodeIdentity, RefusedError, greet
from runtime.store.peer_messages import Use
from runtime.store.wire import close_socket

_log = structlog.get_logger(__name__)
MOST_PER_USE: Final[Mapping[Use, int]] = {"fetch": 4, "put": 2, "control": 3}
CONNECT_S: Final = 2.0


class NoConnectionError(StoreError):
    """All connections of this use are taken by other requests; says nothing about the node."""


@dataclass(slots=True, eq=False)
class Connection:
    """A connection after its handshake.

    Attributes:
        sock: The socket.
        node: Who is at the other end.
        incarnation: Of that node.
        is_used: Whether it served a request before, so that it may have been closed meanwhile.
    """

    sock: socket.socket
    node: str
    incarnation: int
    is_used: bool = False


@dataclass(slots=True)
class _Lane:
    idle: list[Connection] = field(default_factory=list)
    busy: list[Connection] = field(default_factory=list)
    opening: int = 0


class PeerConnections:
    """All connections that this node opened.

    Args:
        identity: Who this node is.
        incarnations: Shared with the other parts of the node.
        counters: Where handshakes that failed are counted.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        incarnations: Incarnations,
        counters: PeerCounters | None = None,
    ) -> None:
        self._identity = identity
        self._counters = counters or PeerCounters()
        self._seldom = Seldom()
        self._incarnations = incarnations
        self._lanes: dict[tuple[str, Use], _Lane] = {}
        # Host and port as told, and the address last looked up.
        self._addresses: dict[str, tuple[str, int, tuple[str, int] | None]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        incarnations.when_newer(self._close_older)

    def add(self, node: str, host: str, port: int) -> None:
        """Sets or changes a node's address and looks its host up, which may take seconds."""
        with self._changed:
            known = self._addresses.get(node)
            if known is not None and known[:2] == (host, port) and known[2] is not None:
                return
            self._addresses[node] = (host, port, None)
        self.look_up(node)

    def look_up(self, node: str) -> None:
        """Looks a node's host up again; may take seconds, so requests never do."""
        with self._changed:
            known = self._addresses.get(node)
        if known is None:
            return
        host, port, _ = known
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        except OSError:
            return
        with self._changed:
            if self._addresses.get(node, ("", 0))[:2] == (host, port):
                self._addresses[node] = (host, port, (str(found[0]), int(found[1])))

    def drop(self, node: str) -> None:
        """Forgets a node's address and closes its idle connections.

        A request that is under way keeps its connection until its own deadline.
        """
        with self._changed:
            self._addresses.pop(node, None)
            for (name, _), lane in self._lanes.items():
                if name == node:
                    while lane.idle:
                        close_socket(lane.idle.pop().sock)

    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes with an address, as they came."""
        with self._changed:
            return tuple(self._addresses)

    @contextmanager
    def lease(self, node: str, use: Use, deadline: Deadline) -> Iterator[Connection]:
        """A connection for one request.

        Raises:
            NoConnectionError: If all are taken until the deadline.
            RefusedError: If either side refuses the other.
            FrameError: If the other end speaks something else.
            DeadlineError: If time ran out while connecting.
            StoreUnavailableError: If the node is unknown or cannot be reached.
        """
        lane, connection = self._take(node, use, deadline)
        is_in_step = False
        try:
            yield connection
            is_in_step = True
        finally:
            with self._changed:
                lane.busy.remove(connection)
                is_current = connection.incarnation == self._incarnations.newest(node)
                if is_in_step and is_current and not self._is_closed and node in self._addresses:
                    connection.is_used = True
                    lane.idle.append(connection)
                else:
                    close_socket(connection.sock)
                self._changed.notify_all()

    def close(self) -> None:
        """Closes everything; requests under way fail."""
        with self._changed:
            self._is_closed = True
            for lane in self._lanes.values():
                while lane.idle:
                    close_socket(lane.idle.pop().sock)
                for connection in lane.busy:
                    _wake(connection)
            self._changed.notify_all()

    def _take(self, node: str, use: Use, deadline: Deadline) -> tuple[_Lane, Connection]:
        with self._changed:
            lane = self._lanes.setdefault((node, use), _Lane())
            while True:
                if self._is_closed:
                    raise StoreUnavailableError("this node is closing")
                address = self._addresses.get(node)
                if address is None:
                    raise StoreUnavailableError(f"no address of node {node!r}")
                while lane.idle:
                    connection = lane.idle.pop()
                    if _is_quiet(connection.sock):
                        lane.busy.append(connection)
                        return lane, connection
                    close_socket(connection.sock)
                if len(lane.busy) + lane.opening < MOST_PER_USE[use]:
                    lane.opening += 1
                    break
                left_s = deadline.left_s()
                if left_s == 0 or not self._changed.wait(left_s):
                    raise NoConnectionError(f"all {use} connections to node {node!r} are taken")
        connection_or_none: Connection | None = None
        try:
            connection_or_none = self._connect(node, use, address[2], deadline)
        finally:
            with self._changed:
                lane.opening -= 1
                if connection_or_none is not None:
                    lane.busy.append(connection_or_none)
                self._changed.notify_all()
        return lane, connection_or_none

    def _connect(
        self, node: str, use: Use, address: tuple[str, int] | None, deadline: Deadline
    ) -> Connection:
        if address is None:
            raise StoreUnavailableError(f"the host of node {node!r} has no known address")
        deadline = deadline.earlier(CONNECT_S)
        try:
            sock = socket.create_connection(address, deadline.require("connecting"))
        except TimeoutError:
            raise DeadlineError(f"out of time while connecting to node {node!r}") from None
        except OSError as error:
            raise StoreUnavailableError(f"cannot reach node {node!r}: {error}") from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            incarnation = greet(sock, self._identity, node, use, self._incarnations, deadline)
        except OSError as error:
            close_socket(sock)
            raise StoreUnavailableError(f"cannot reach node {node!r}: {error}") from error
        except RefusedError as error:
            close_socket(sock)
            self._counters.add("handshakes_refused")
            self._say(node, address, str(error))
            raise
        except StoreError:
            close_socket(sock)
            raise
        return Connection(sock, node, incarnation)

    def _say(self, node: str, address: tuple[str, int], reason: str) -> None:
        place = f"{address[0]}:{address[1]}"
        if self._seldom.may_say(f"{node} {place} {reason}", now=time.monotonic()):
            _log.warning("peer refuses or is refused", node=node, address=place, reason=reason)

    def _close_older(self, node: str, incarnation: int) -> None:
        with self._changed:
            for (name, _), lane in self._lanes.items():
                if name != node:
                    continue
                for connection in [c for c in lane.idle if c.incarnation < incarnation]:
                    lane.idle.remove(connection)
                    close_socket(connection.sock)
                for connection in lane.busy:
                    if connection.incarnation < incarnation:
                        _wake(connection)
            self._changed.notify_all()


def _wake(connection: Connection) -> None:
    # The request that has it closes it: a number closed here could be another file by then.
    with suppress(OSError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def _is_quiet(sock: socket.socket) -> bool:
    """Whether an idle connection is open and silent, as it has to be between requests."""
    try:
        sock.settimeout(0)
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
