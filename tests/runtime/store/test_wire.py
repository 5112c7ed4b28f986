"""Frames: what is sent arrives, nothing is believed of a stranger, nothing waits for ever."""

import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreError, StoreUnavailableError
from runtime.store.wire import (
    ClosedError,
    FrameError,
    close_socket,
    recv_exactly,
    recv_frame,
    send_buffers,
    send_frame,
)


class Question(msgspec.Struct, tag=True, array_like=True):
    text: str
    numbers: list[int]


class Answer(msgspec.Struct, tag=True, array_like=True):
    data: bytes


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    yield left, right
    close_socket(left)
    close_socket(right)


def soon() -> Deadline:
    return Deadline.after(10)


def test_messages_of_a_union_come_back_as_what_they_were(pair: Pair) -> None:
    left, right = pair
    sent = [Question("how", [1, 2, 2**40]), Answer(b"\x00\xff"), Question("", [])]
    for message in sent:
        send_frame(left, message, soon())
    assert [recv_frame(right, Question | Answer, soon()) for _ in sent] == sent


def test_a_frame_is_its_length_big_endian_and_plain_msgpack(pair: Pair) -> None:
    left, right = pair
    send_frame(left, {"a": 1}, soon())
    # From the msgpack specification: fixmap of one, fixstr of one, positive fixint.
    assert right.recv(100) == b"\x00\x00\x00\x04" + b"\x81\xa1a\x01"


def test_raw_buffers_behind_a_frame_arrive_in_pieces_and_in_order(pair: Pair) -> None:
    left, right = pair
    rng = np.random.default_rng(1)
    # More buffers than one system call takes, sizes that straddle pieces, an empty one.
    sizes = [0, 1, 3_000_000, *rng.integers(0, 5000, 1500).tolist()]
    buffers = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    sender = threading.Thread(
        target=send_frame, args=(left, Answer(b""), soon(), [memoryview(b) for b in buffers])
    )
    sender.start()
    recv_frame(right, Answer, soon())
    got = bytearray(sum(sizes))
    pieces: list[bytes] = []
    recv_exactly(right, memoryview(got), soon(), on_piece=lambda piece: pieces.append(bytes(piece)))
    sender.join()
    assert bytes(got) == b"".join(b.tobytes() for b in buffers) == b"".join(pieces)


def test_a_frame_over_the_limit_is_refused_before_its_bytes_are_awaited(pair: Pair) -> None:
    left, right = pair
    left.sendall(struct.pack("!I", 0xFFFF_FFFF))
    with pytest.raises(FrameError, match="4294967295 bytes"):
        recv_frame(right, Answer, soon(), max_bytes=1000)


def test_a_message_over_the_limit_is_not_sent(pair: Pair) -> None:
    left, right = pair
    with pytest.raises(FrameError, match="at most 10"):
        send_frame(left, Answer(b"x" * 100), soon(), max_bytes=10)
    send_frame(left, Answer(b"y"), soon())
    assert recv_frame(right, Answer, soon()) == Answer(b"y")


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_any_bytes_give_a_message_or_a_clear_error(data: bytes) -> None:
    left, right = socket.socketpair()
    try:
        left.sendall(struct.pack("!I", len(data)) + data)
        try:
            message = recv_frame(right, Question | Answer, soon())
        except FrameError:
            return
        assert isinstance(message, Question | Answer)
    finally:
        left.close()
        right.close()


def test_an_error_does_not_repeat_the_bytes_it_got(pair: Pair) -> None:
    left, right = pair
    send_frame(left, ["Question", "secret-tokens", "secret-list"], soon())
    with pytest.raises(FrameError) as caught:
        recv_frame(right, Question, soon())
    assert "secret" not in str(caught.value)


def test_an_end_between_frames_differs_from_an_end_within_one(pair: Pair) -> None:
    left, right = pair
    left.sendall(struct.pack("!I", 5) + b"ab")
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(StoreUnavailableError, match="within"):
        recv_frame(right, Answer, soon())
    with pytest.raises(ClosedError):
        recv_frame(right, Answer, soon())


def test_silence_ends_by_the_deadline(pair: Pair) -> None:
    with pytest.raises(DeadlineError):
        recv_frame(pair[1], Answer, Deadline.after(0.05))


def test_a_trickle_does_not_stretch_the_deadline(pair: Pair) -> None:
    left, right = pair
    stop = threading.Event()

    def trickle() -> None:
        left.sendall(struct.pack("!I", 100_000))
        while not stop.wait(0.02):
            left.sendall(b"x")

    dripping = threading.Thread(target=trickle)
    dripping.start()
    began_s = time.monotonic()
    with pytest.raises(DeadlineError):
        recv_frame(right, Answer, Deadline.after(0.3))
    waited_s = time.monotonic() - began_s
    stop.set()
    dripping.join()
    assert waited_s < 5  # a deadline per read would wait for 2000 s


def test_a_reader_that_does_not_read_ends_the_sender_by_the_deadline(pair: Pair) -> None:
    with pytest.raises(DeadlineError):
        send_buffers(pair[0], [bytes(64 << 20)], Deadline.after(0.1))


def test_a_closed_socket_is_an_error_of_the_store(pair: Pair) -> None:
    left, right = pair
    close_socket(right)
    close_socket(right)
    with pytest.raises(StoreError):
        send_buffers(left, [bytes(1 << 20)], soon())
    with pytest.raises(StoreUnavailableError):
        recv_frame(right, Answer, soon())


def test_closing_wakes_a_waiting_reader(pair: Pair) -> None:
    errors: list[Exception] = []

    def read() -> None:
        try:
            recv_frame(pair[1], Answer, Deadline.after(60))
        except StoreError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.05)
    close_socket(pair[1])
    reader.join(10)
    assert not reader.is_alive()
    assert len(errors) == 1
