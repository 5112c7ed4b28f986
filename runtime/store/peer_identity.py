"""Who a node is, and how two nodes make sure of each other.

Every connection opens with a challenge both ways: each side proves by HMAC-SHA-256 over both
names, both incarnations, the cluster, the use and both fresh nonces that it knows the cluster's
secret. The proofs of the two sides differ by a word, so neither can be sent back as the other.
Without a secret the empty one is used: mistakes are refused then, strangers are not. What follows
on the connection is neither encrypted nor authenticated; that is left to the network.

An incarnation is a number that grows with each start of a node. The largest one seen of a node is
the only one that is spoken to.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import msgspec

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError, StoreSetupError
from runtime.store.peer_messages import (
    HANDSHAKE_MAX_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Proof,
    Refused,
    Use,
    Welcome,
)
from runtime.store.wire import FrameError, recv_frame, send_frame

MAX_NODES: Final = 4096
_NONCE_BYTES: Final = 16
_Frame = TypeVar("_Frame")
_HandshakeFrame = Hello | Challenge | Proof | Welcome | Refused


class RefusedError(StoreError):
    """The other node does not speak to this one, or is not the one expected."""


def new_incarnation(previous: int = 0) -> int:
    """A number for this start of a node, larger than the one before.

    Args:
        previous: Of the last start, if it is known; guards against a clock set back.
    """
    return max(time.time_ns(), previous + 1)


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """This node, as it presents itself.

    Attributes:
        name: Unique in the cluster; 1 to 128 printable ASCII characters, no blanks.
        incarnation: Larger on each start.
        cluster: Nodes of another cluster are refused.
        secret: Shared by all nodes; empty: everyone who reaches the port is trusted.
    """

    name: str
    incarnation: int
    cluster: str = "default"
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        """Checks.

        Raises:
            StoreSetupError: If a field is out of its range.
        """
        check_node_name(self.name)
        if not 0 < self.incarnation < 2**63:
            raise StoreSetupError(f"incarnation {self.incarnation}, 1 to 2^63 - 1 is allowed")
        if len(self.cluster) > 128:
            raise StoreSetupError(f"cluster name of {len(self.cluster)} characters, at most 128")


def check_node_name(name: str) -> None:
    """Checks the name of a node.

    Raises:
        StoreSetupError: If it is empty, long, or has blanks or signs outside of ASCII.
    """
    if not (0 < len(name) <= 128 and name.isascii() and name.isprintable() and " " not in name):
        raise StoreSetupError(
            f"node name {name[:40]!r}: 1 to 128 printable ASCII characters without blanks"
        )


class Incarnations:
    """The newest incarnation seen of each node; safe for threads."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._lock = threading.Lock()
        self._on_newer: list[Callable[[str, int], None]] = []

    def when_newer(self, callback: Callable[[str, int], None]) -> None:
        """Has a callback told (node, incarnation) of each start seen for the first time."""
        self._on_newer.append(callback)

    def newest(self, node: str) -> int:
        """Largest incarnation seen; 0 for a node never seen."""
        return self._newest.get(node, 0)

    def see(self, node: str, incarnation: int) -> bool:
        """Notes an incarnation.

        Returns:
            Whether it is the newest; an older one, or one node too many, is to be refused.
        """
        with self._lock:
            known = self._newest.get(node, 0)
            if incarnation < known or (known == 0 and len(self._newest) >= MAX_NODES):
                return False
            is_newer = incarnation > known
            self._newest[node] = incarnation
        if is_newer:
            for callback in self._on_newer:
                callback(node, incarnation)
        return True


def greet(
    sock: socket.socket,
    me: NodeIdentity,
    node: str,
    use: Use,
    incarnations: Incarnations,
    deadline: Deadline,
) -> int:
    """Opener's side of the handshake.

    Args:
        sock: Freshly connected.
        me: This node.
        node: Whom to find at the other end.
        use: What the connection is for.
        incarnations: What is known of other nodes' starts.
        deadline: When to give up.

    Returns:
        The other node's incarnation.

    Raises:
        RefusedError: If either side refuses the other.
        FrameError: If the other end speaks something else.
        DeadlineError: If time ran out.
        StoreUnavailableError: If the connection broke.
    """
    hello = Hello(
        PROTOCOL_VERSION, me.cluster, me.name, me.incarnation, use, os.urandom(_NONCE_BYTES)
    )
    send_frame(sock, hello, deadline)
    challenge = _expect(sock, Challenge, deadline)
    if not hmac.compare_digest(challenge.proof, _proof("server", me.secret, hello, challenge)):
        with suppress(StoreError):  # so that the other side can say so as well
            send_frame(sock, Refused("another secret"), deadline)
        raise RefusedError(f"node {node!r} does not know this cluster's secret")
    if challenge.node != node:
        raise RefusedError(f"node {challenge.node!r} answers at the address of {node!r}")
    send_frame(sock, Proof(_proof("client", me.secret, hello, challenge)), deadline)
    _expect(sock, Welcome, deadline)
    if not incarnations.see(node, challenge.incarnation):
        raise RefusedError(f"an older incarnation of node {node!r}")
    return challenge.incarnation


def receive_greeting(
    sock: socket.socket, me: NodeIdentity, incarnations: Incarnations, deadline: Deadline
) -> Hello:
    """Other side of the handshake.

    Returns:
        Who opened the connection, for what.

    Raises:
        RefusedError: If the opener was refused; it was told so.
        FrameError: If the opener speaks something else.
        DeadlineError: If time ran out.
        StoreUnavailableError: If the connection broke.
    """
    hello = _expect(sock, Hello, deadline)
    if hello.version != PROTOCOL_VERSION:
        reason = f"protocol {hello.version}, this node speaks {PROTOCOL_VERSION}"
        _refuse(sock, hello, reason, deadline)
    if hello.cluster != me.cluster:
        _refuse(sock, hello, "another cluster", deadline)
    if hello.node == me.name:
        _refuse(sock, hello, "the name of this node", deadline)
    challenge = Challenge(me.name, me.incarnation, os.urandom(_NONCE_BYTES), bytes(32))
    challenge.proof = _proof("server", me.secret, hello, challenge)
    send_frame(sock, challenge, deadline)
    try:
        proof = _expect(sock, Proof, deadline)
    except RefusedError as error:
        raise RefusedError(f"node {hello.node[:40]!r}: {error}") from None
    if not hmac.compare_digest(proof.proof, _proof("client", me.secret, hello, challenge)):
        _refuse(sock, hello, "another secret", deadline)
    if not incarnations.see(hello.node, hello.incarnation):
        _refuse(sock, hello, "an older incarnation", deadline)
    send_frame(sock, Welcome(), deadline)
    return hello


def _expect(sock: socket.socket, kind: type[_Frame], deadline: Deadline) -> _Frame:
    frame = recv_frame(sock, _HandshakeFrame, deadline, HANDSHAKE_MAX_BYTES)
    if isinstance(frame, Refused):
        raise RefusedError(f"refused: {frame.reason[:80]}")
    if not isinstance(frame, kind):
        raise FrameError(f"{type(frame).__name__} where {kind.__name__} is due")
    return frame


def _refuse(sock: socket.socket, hello: Hello, reason: str, deadline: Deadline) -> None:
    send_frame(sock, Refused(reason), deadline)
    raise RefusedError(f"node {hello.node[:40]!r}: {reason}")


def _proof(
    side: Literal["server", "client"], secret: bytes, hello: Hello, challenge: Challenge
) -> bytes:
    said = msgspec.msgpack.encode(
        ["ptstore-peer-v1", side, hello, challenge.node, challenge.incarnation, challenge.nonce]
    )
    return hmac.new(secret, said, hashlib.sha256).digest()
