"""Frames on a stream socket: four bytes of length, a msgpack message, perhaps raw bytes behind it.

Both ends of the store's sockets speak this: clients over a unix socket, nodes over TCP. The length
is an unsigned 32-bit integer, big endian. Raw bytes behind a frame are never copied here: they are
sent from the buffers given and received into them. Every call ends by its deadline. After any error
the stream is no longer in step and the socket is to be closed.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import UnionType
from typing import Any, Final, TypeVar, overload

import msgspec

from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreError, StoreUnavailableError

DEFAULT_MAX_BYTES: Final = 4 << 20
# Bytes taken from the socket at once. A checksum over a piece of this size finds it in the cache
# of the core that received it, which makes the check nearly free.
PIECE_BYTES: Final = 256 << 10
_IOV_MAX: Final = 512
_LENGTH: Final = struct.Struct("!I")
_TIMEVAL: Final = struct.Struct("@ll")

Message = TypeVar("Message")
Bytes = bytes | bytearray | memoryview


class FrameError(StoreError):
    """What arrived is not a frame of this protocol, or larger than allowed."""


class ClosedError(StoreUnavailableError):
    """The other end closed the connection between two frames."""


_encode = msgspec.msgpack.Encoder().encode


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def send_frame(
    sock: socket.socket,
    message: Any,
    deadline: Deadline,
    buffers: Sequence[Bytes] = (),
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> None:
    """Sends one message, and raw buffers behind it without copying them.

    Args:
        sock: A connected stream socket.
        message: What msgspec can encode.
        deadline: When to give up.
        buffers: Contiguous buffers of bytes; the receiver has to know their sizes.
        max_bytes: Largest message, in bytes, buffers not counted.

    Raises:
        FrameError: If the message is larger than max_bytes; nothing was sent.
        DeadlineError: If time ran out.
        StoreUnavailableError: If the connection broke.
    """
    body = _encode(message)
    if len(body) > max_bytes:
        raise FrameError(f"a message of {len(body)} bytes, at most {max_bytes} are allowed")
    send_buffers(sock, [_LENGTH.pack(len(body)) + body, *buffers], deadline)


def send_buffers(sock: socket.socket, buffers: Sequence[Bytes], deadline: Deadline) -> None:
    """Sends buffers back to back, gathered by the kernel.

    Raises:
        DeadlineError: If time ran out.
        StoreUnavailableError: If the connection broke.
    """
    views = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
    first = 0
    while first < len(views):
        sent = _send_some(sock, views[first : first + _IOV_MAX], deadline)
        while sent:
            if sent < views[first].nbytes:
                views[first] = views[first][sent:]
                break
            sent -= views[first].nbytes
            first += 1


@overload
def recv_frame(
    sock: socket.socket, kind: type[Message], deadline: Deadline, max_bytes: int = ...
) -> Message: ...


@overload
def recv_frame(
    sock: socket.socket, kind: UnionType, deadline: Deadline, max_bytes: int = ...
) -> Any: ...


def recv_frame(
    sock: socket.socket, kind: Any, deadline: Deadline, max_bytes: int = DEFAULT_MAX_BYTES
) -> Any:
    """Receives one message.

    Args:
        sock: A connected stream socket.
        kind: What to decode to: a msgspec Struct, or a union of tagged ones.
        deadline: When to give up.
        max_bytes: Largest message accepted; nothing larger is allocated.

    Raises:
        ClosedError: If the other end closed the connection before the first byte.
        FrameError: If the message is empty, too large or not of this kind.
        DeadlineError: If time ran out.
        StoreUnavailableError: If the connection broke.
    """
    head = bytearray(_LENGTH.size)
    if not recv_exactly(sock, memoryview(head), deadline, may_end=True):
        raise ClosedError("the other end closed the connection")
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= max_bytes:
        raise FrameError(f"a frame of {length} bytes, 1 to {max_bytes} are allowed")
    body = bytearray(length)
    recv_exactly(sock, memoryview(body), deadline)
    try:
        return _decoder(kind).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # Only the kind of error: its text could carry bytes of keys.
        raise FrameError(
            f"a frame that is none of this protocol ({type(error).__name__})"
        ) from None


def recv_exactly(
    sock: socket.socket,
    view: memoryview,
    deadline: Deadline,
    *,
    may_end: bool = False,
    on_piece: Callable[[memoryview], object] | None = None,
) -> bool:
    """Fills a buffer from the socket.

    Args:
        sock: A connected stream socket.
        view: Writable and contiguous.
        deadline: When to give up.
        may_end: Whether the other end may close before the first byte.
        on_piece: Called with each piece as it has arrived, in order; pieces are at most
            PIECE_BYTES, while the kernel goes on receiving what follows.

    Returns:
        True, or False if the other end closed before the first byte and may_end.

    Raises:
        DeadlineError: If time ran out.
        StoreUnavailableError: If the connection broke or closed.
    """
    view = view.cast("B")
    start, total = 0, view.nbytes
    while start < total:
        piece = view[start : start + PIECE_BYTES]
        count = _recv_some(sock, piece, deadline)
        if count == 0:
            if may_end and start == 0:
                return False
            raise StoreUnavailableError("the other end closed the connection within a message")
        if on_piece is not None:
            on_piece(piece[:count])
        start += count
    return True


def close_socket(sock: socket.socket) -> None:
    """Closes a socket and wakes whoever is waiting on it; does nothing if it is closed."""
    with suppress(OSError):  # it may not be connected any more
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _send_some(sock: socket.socket, views: Sequence[memoryview], deadline: Deadline) -> int:
    try:
        _limit_next_call(sock, socket.SO_SNDTIMEO, deadline.require("sending"))
        return sock.sendmsg(views)
    except BlockingIOError:
        raise DeadlineError("out of time while sending") from None
    except (OSError, ValueError) as error:
        raise StoreUnavailableError(f"sending: {error}") from error


def _recv_some(sock: socket.socket, view: memoryview, deadline: Deadline) -> int:
    try:
        _limit_next_call(sock, socket.SO_RCVTIMEO, deadline.require("receiving"))
        return sock.recv_into(view, flags=socket.MSG_WAITALL)
    except BlockingIOError:
        raise DeadlineError("out of time while receiving") from None
    except (OSError, ValueError) as error:
        raise StoreUnavailableError(f"receiving: {error}") from error


def _limit_next_call(sock: socket.socket, option: int, left_s: float) -> None:
    """Has the kernel end the next call after that time, all its waiting together.

    A timeout of Python's would instead make the socket non-blocking: two more system calls for
    each part that happens to be there, a fifth of the throughput.
    """
    sock.settimeout(None)
    # Nought would be no limit at all.
    seconds, fraction = divmod(max(left_s, 1e-6), 1)
    sock.setsockopt(
        socket.SOL_SOCKET,
        option,
        _TIMEVAL.pack(
            int(seconds), max(1, int(fraction * 1e6)) if seconds == 0 else int(fraction * 1e6)
        ),
    )
