"""How a node answers one request of another node."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import crc32c

from runtime.store.blocks import BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreError
from runtime.store.peer_counters import PeerCounters
from runtime.store.peer_handler import PeerHandler, RegionRoom
from runtime.store.peer_messages import (
    Announce,
    AskPage,
    Blocks,
    Close,
    Describe,
    Described,
    Done,
    Failed,
    Fetch,
    Open,
    Opened,
    Page,
    Ping,
    Put,
    Room,
    Stored,
    check_info,
    time_left,
)
from runtime.store.wire import FrameError, recv_exactly, recv_frame, send_frame


class ReadableMemory(Protocol):
    """Memory that other nodes may read one-sided."""

    def describe(self) -> bytes:
        """What the other side's transfer library has to know."""

    def address_of(self, view: memoryview) -> int:
        """Address of a view; 0 if it is not in that memory."""


class AnnouncementReceiver(Protocol):
    """Where announcements and signs of life go."""

    def receive(self, node: str, incarnation: int, announce: Announce) -> None:
        """Changes of a node's holdings, as they come, perhaps with gaps or twice."""

    def heard(self, node: str, incarnation: int, last: int) -> None:
        """A node lives and has announced so many changes."""


class PeerAnswers:
    """Answers requests by asking the node; keeps no state between them.

    Args:
        handler: The node.
        receiver: Takes announcements; without it they are dropped.
        memory: Readable from afar, if any.
        counters: Where faults are counted.
        last_announced: Number of this node's last change announced.
    """

    def __init__(
        self,
        handler: PeerHandler,
        receiver: AnnouncementReceiver | None,
        memory: ReadableMemory | None,
        counters: PeerCounters,
        last_announced: Callable[[], int],
    ) -> None:
        self._handler = handler
        self._receiver = receiver
        self._memory = memory
        self._counters = counters
        self._last_announced = last_announced

    def answer(
        self, sock: socket.socket, node: str, incarnation: int, request: Any, most_s: float
    ) -> None:
        """Answers one request.

        Args:
            sock: The connection it came on.
            node: Who asks.
            incarnation: Of the asker.
            request: One of the Request messages.
            most_s: Longest time an answer may take.

        Raises:
            FrameError: If the request makes no sense.
            DeadlineError: If time ran out.
            StoreUnavailableError: If the connection broke.
        """
        most = Deadline.after(most_s)
        match request:
            case Fetch():
                self._send_blocks(sock, request, time_left(request.left_s).earlier(most_s))
            case Put():
                self._take_region(sock, node, request, time_left(request.left_s).earlier(most_s))
            case Open():
                self._hold_open(sock, request, time_left(request.left_s).earlier(most_s))
            case Announce():
                if self._receiver is not None:
                    self._receiver.receive(node, incarnation, request)
                send_frame(sock, Done(), most)
            case Ping():
                if self._receiver is not None:
                    self._receiver.heard(node, incarnation, request.last)
                send_frame(sock, Done(), most)
            case AskPage():
                last = self._last_announced()  # first: what is announced is in the holdings
                held = list(self._handler.directory_page(request.after, request.limit))
                send_frame(sock, Page(held, last), most)
            case Describe():
                blob = b"" if self._memory is None else self._memory.describe()
                send_frame(sock, Described(blob), most)

    def _send_blocks(self, sock: socket.socket, request: Fetch, deadline: Deadline) -> None:
        if len(request.keys) != len(request.rooms):
            raise FrameError(f"{len(request.keys)} keys with {len(request.rooms)} rooms")
        with ExitStack() as stack:
            try:
                found = stack.enter_context(self._handler.open_blocks(request.keys))
            except StoreError as error:
                send_frame(sock, Failed(str(error)[:200]), deadline)
                return
            infos: list[BlockInfo | None] = []
            views: list[memoryview] = []
            for key, room, block in zip(request.keys, request.rooms, found, strict=True):
                if block is None or not self._is_whole(key, *block) or block[0].length > room:
                    infos.append(None)
                    continue
                infos.append(block[0])
                views.append(block[1])
            # The lease covers the sending: the memory is not reused meanwhile.
            send_frame(sock, Blocks(infos), deadline, views)
            self._counters.add("sent_blocks", len(views))
            self._counters.add("sent_bytes", sum(view.nbytes for view in views))

    def _is_whole(self, key: bytes, info: BlockInfo, view: memoryview) -> bool:
        is_whole = info.key == key and view.nbytes == info.length
        if not is_whole:
            self._counters.add("inconsistent_blocks")
        return is_whole

    def _take_region(
        self, sock: socket.socket, node: str, request: Put, deadline: Deadline
    ) -> None:
        for info in request.infos:
            check_info(info)
        with ExitStack() as stack:
            try:
                region = stack.enter_context(
                    self._handler.receive_region(request.infos, node, request.is_owned, deadline)
                )
            except StoreError as error:
                send_frame(sock, Failed(str(error)[:200]), deadline)
                return
            admitted = self._admitted(request.infos, region)
            send_frame(sock, Room(len(admitted)), deadline)
            if not admitted:
                return
            if not self._receive_all(sock, request.infos, admitted, deadline):
                send_frame(sock, Failed("a block with a wrong checksum"), deadline)
                return
            try:
                count = region.commit()
            except StoreError as error:
                send_frame(sock, Failed(str(error)[:200]), deadline)
                return
            self._counters.add("stored_blocks", count)
            send_frame(sock, Stored(count), deadline)

    def _admitted(self, infos: Sequence[BlockInfo], region: RegionRoom) -> Sequence[memoryview]:
        buffers = region.buffers
        if all(
            info.length == buffer.nbytes for info, buffer in zip(infos, buffers, strict=False)
        ) and len(buffers) <= len(infos):
            return buffers
        self._counters.add("inconsistent_blocks")
        return ()

    def _receive_all(
        self,
        sock: socket.socket,
        infos: Sequence[BlockInfo],
        buffers: Sequence[memoryview],
        deadline: Deadline,
    ) -> bool:
        are_right = True
        for info, buffer in zip(infos, buffers, strict=False):
            if receive_block(sock, buffer, deadline) != info.crc:
                self._counters.add("corrupt_blocks")
                are_right = False
        return are_right

    def _hold_open(self, sock: socket.socket, request: Open, deadline: Deadline) -> None:
        with ExitStack() as stack:
            try:
                found = stack.enter_context(self._handler.open_blocks(request.keys))
            except StoreError as error:
                send_frame(sock, Failed(str(error)[:200]), deadline)
                return
            blocks: list[tuple[BlockInfo, int] | None] = []
            for key, block in zip(request.keys, found, strict=True):
                if block is None or self._memory is None or not self._is_whole(key, *block):
                    blocks.append(None)
                else:
                    blocks.append((block[0], self._memory.address_of(block[1])))
            send_frame(sock, Opened(blocks), deadline)
            # The lease ends with Close, with the connection or with the time, whichever is first.
            try:
                recv_frame(sock, Close, deadline)
            except DeadlineError:
                self._counters.add("leases_expired")
                raise
        send_frame(sock, Done(), deadline)


def receive_block(sock: socket.socket, destination: memoryview, deadline: Deadline) -> int:
    """Receives one block and computes its checksum as it arrives.

    The checksum of each piece is taken while the kernel receives the next ones.

    Returns:
        CRC32C of the bytes received.

    Raises:
        DeadlineError: If time ran out.
        StoreUnavailableError: If the connection broke.
    """
    crc = 0

    def check(piece: memoryview) -> None:
        nonlocal crc
        crc = crc32c.crc32c(piece, crc)

    recv_exactly(sock, destination, deadline, on_piece=check)
    return crc
