"""Frames on a stream socket: four bytes of length, then a msgpack record."""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

from runtime.engine.frames import FromEngine, ToEngine

LENGTH: Final = struct.Struct(">I")
MAX_FRAME_BYTES: Final = 1 << 28
START_FAILED: Final = -1  # number of the ControlDone that says why an engine did not start

to_engine_decoder: Final = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: Final = msgspec.msgpack.Decoder(FromEngine)
_encoder: Final = msgspec.msgpack.Encoder()


class WireError(RuntimeError):
    """The other side sent something that is no frame, or ended in the middle of one."""


def packed(message: ToEngine | FromEngine) -> bytes:
    """A message with its length in front.

    Raises:
        WireError: If it is larger than a frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a frame may have {MAX_FRAME_BYTES:,} bytes, found {len(body):,}")
    return LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """Bytes of the frame behind a head.

    Raises:
        WireError: If they are more than a frame may have.
    """
    (length,) = LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame may have {MAX_FRAME_BYTES:,} bytes, found {length:,}")
    return int(length)


def receive(connection: socket.socket) -> bytes | None:
    """The next frame's body; None at the end of the stream.

    Raises:
        WireError: If the stream ends within a frame.
        OSError: As the socket does.
    """
    head = _exactly(connection, LENGTH.size, at_start=True)
    return None if head is None else _exactly(connection, length_of(head), at_start=False)


def _exactly(connection: socket.socket, count: int, *, at_start: bool) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        piece = connection.recv(min(count - len(parts), 1 << 20))
        if not piece:
            if at_start and not parts:
                return None
            raise WireError("the stream ended within a frame")
        parts += piece
    return bytes(parts)
