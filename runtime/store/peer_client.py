"""Asks the other nodes: blocks from many owners at once, room for a region, pages of directories.

A fetch never fails: blocks that are absent, late, damaged on the way or at a node that cannot be
reached are misses. A node that failed or was late is a suspect and left alone for a while
(peer_suspects.py). A block counts as fetched only after its checksum was found right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from runtime.store.blocks import KEY_BYTES, BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreError, StoreUnavailableError
from runtime.store.peer_answers import receive_block
from runtime.store.peer_connections import (
    MOST_PER_USE,
    Connection,
    NoConnectionError,
    PeerConnections,
)
from runtime.store.peer_counters import PeerCounters
from runtime.store.peer_identity import Incarnations, NodeIdentity
from runtime.store.peer_messages import (
    MAX_BLOCKS,
    MAX_REQUEST_S,
    Announce,
    AskPage,
    Blocks,
    Done,
    Failed,
    Fetch,
    Page,
    Ping,
    Put,
    Room,
    Stored,
    Use,
    check_info,
)
from runtime.store.peer_suspects import Suspects
from runtime.store.wire import (
    FrameError,
    recv_frame,
    send_buffers,
    send_frame,
)

_log = structlog.get_logger(__name__)
FETCH_THREADS: Final = 32
Result = TypeVar("Result")
Wanted = tuple[Sequence[bytes], Sequence[memoryview]]


class FailedError(StoreError):
    """The other node answered that it cannot do what was asked; it is well otherwise."""


class StaleError(StoreUnavailableError):
    """The connection had been closed while it lay idle."""


class Peers:
    """The other nodes, as seen from this one; safe for threads.

    Args:
        identity: Who this node is.
        incarnations: Shared with the other parts of the node.
        suspects: How long to leave a failed node alone.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        *,
        incarnations: Incarnations | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        self.counters = PeerCounters()
        self.suspects = suspects or Suspects()
        self.incarnations = incarnations or Incarnations()
        self.connections = PeerConnections(identity, self.incarnations)
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="peer-fetch")
        self.incarnations.when_newer(lambda node, _: self.suspects.clear(node))

    def add(self, node: str, host: str, port: int) -> None:
        """Sets or changes a node's address and looks its host up, which may take seconds."""
        self.connections.add(node, host, port)

    def drop(self, node: str) -> None:
        """Forgets a node's address."""
        self.connections.drop(node)
        self.suspects.clear(node)

    def fetch(
        self,
        node: str,
        keys: Sequence[bytes],
        destinations: Sequence[memoryview],
        deadline: Deadline,
    ) -> list[BlockInfo | None]:
        """Fetches blocks of one node straight into the buffers given.

        Args:
            node: Whom to ask.
            keys: Of the blocks.
            destinations: Writable, one per key, each at least as long as its block.
            deadline: When to give up; what has arrived by then counts.

        Returns:
            Per key what was received and verified, or None: a miss, whose buffer holds anything.
        """
        if len(keys) != len(destinations):
            raise ValueError(f"{len(keys)} keys with {len(destinations)} destinations")
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"a key that is not {KEY_BYTES} bytes long")
        views = [destination.cast("B") for destination in destinations]
        got: list[BlockInfo | None] = []
        while len(got) < len(keys):
            start, end = len(got), min(len(got) + MAX_BLOCKS, len(keys))
            part: list[BlockInfo | None] = [None] * (end - start)
            work = partial(self._fetch, node, keys[start:end], views[start:end], part, deadline)
            is_done = self.try_node(node, deadline, work)
            got += part
            if not is_done:
                got += [None] * (len(keys) - len(got))
        num_found = sum(info is not None for info in got)
        self.counters.add("fetched_blocks", num_found)
        self.counters.add("fetched_bytes", sum(info.length for info in got if info is not None))
        self.counters.add("missed_blocks", len(got) - num_found)
        return got

    def fetch_many(
        self, wanted: Mapping[str, Wanted], deadline: Deadline
    ) -> dict[str, list[BlockInfo | None]]:
        """Fetches from several nodes at the same time, one request each.

        Args:
            wanted: Keys and destinations by node.
            deadline: When to give up.

        Returns:
            By node what fetch() returns. No buffer is written to any more.
        """
        jobs: dict[str, Future[list[BlockInfo | None]]] = {}
        names = list(wanted)
        for node in names[1:]:
            try:
                jobs[node] = self._pool.submit(self.fetch, node, *wanted[node], deadline)
            except RuntimeError:  # closed meanwhile
                break
        got = {names[0]: self.fetch(names[0], *wanted[names[0]], deadline)} if names else {}
        for node in names[1:]:
            job = jobs.get(node)
            if job is None:
                got[node] = [None] * len(wanted[node][0])
                continue
            if deadline.is_over and job.cancel():
                self.counters.add("fetches_not_started")
                got[node] = [None] * len(wanted[node][0])
                continue
            # Not left before it ends, since it writes into the caller's buffers; every step of it
            # ends by the deadline, and one that waits for a thread ends at once after it.
            got[node] = job.result()
        return got

    def put(
        self,
        node: str,
        infos: Sequence[BlockInfo],
        buffers: Sequence[memoryview | bytes | bytearray],
        is_owned: bool,
        deadline: Deadline,
    ) -> int:
        """Stores a region at another node.

        Args:
            node: Where.
            infos: Of the blocks of the region, at most MAX_BLOCKS.
            buffers: Their bytes.
            is_owned: Whether that node becomes responsible for them.
            deadline: When to give up.

        Returns:
            How many leading blocks are stored and visible there; 0 after any failure.
        """
        if [info.length for info in infos] != [memoryview(buffer).nbytes for buffer in buffers]:
            raise ValueError("buffers that are not of the lengths of their blocks")
        if len(infos) > MAX_BLOCKS:
            raise ValueError(f"{len(infos)} blocks, at most {MAX_BLOCKS} are allowed")
        stored = 0

        def work() -> None:
            nonlocal stored
            stored = self._put(node, infos, buffers, is_owned, deadline)

        if infos:
            self.try_node(node, deadline, work)
        self.counters.add("put_blocks", stored)
        return stored

    def ping(self, node: str, deadline: Deadline, last: int = 0) -> int:
        """Asks for a sign of life, suspect or not.

        Args:
            node: Whom.
            deadline: When to give up.
            last: How many changes of holdings this node has announced.

        Returns:
            The node's incarnation.

        Raises:
            StoreError: If there was none.
        """
        return self.ask(node, "control", Ping(last), Done, deadline)[1]

    def send_announcement(self, node: str, announce: Announce, deadline: Deadline) -> None:
        """Tells one node of changes and waits until it has heard.

        Raises:
            StoreError: If it may not have.
        """
        self.ask(node, "control", announce, Done, deadline)

    def page(self, node: str, after: bytes, limit: int, deadline: Deadline) -> tuple[int, Page]:
        """One page of what another node holds.

        Returns:
            The node's incarnation and the page.

        Raises:
            StoreError: If the node does not answer.
        """
        reply, incarnation = self.ask(node, "control", AskPage(after, limit), Page, deadline)
        page: Page = reply
        if any(one.key <= after for one in page.held):
            raise FrameError(f"node {node!r} sends a page that does not go on")
        return incarnation, page

    def ask(
        self, node: str, use: Use, request: Any, kind: Any, deadline: Deadline
    ) -> tuple[Any, int]:
        """One question, one answer without raw bytes.

        Args:
            node: Whom to ask.
            use: Which connections to use.
            request: One of the Request messages.
            kind: Message expected.
            deadline: When to give up.

        Returns:
            The answer and the incarnation that gave it.

        Raises:
            StoreError: If there is none, or the node says why it fails.
        """
        reply, incarnation = self.exchange(
            node, use, deadline, lambda link: (first_reply(link, request, kind, deadline),
                                               link.incarnation)
        )  # fmt: skip
        if isinstance(reply, Failed):
            raise FailedError(f"node {node!r}: {reply.reason}")
        return reply, incarnation

    def exchange(
        self, node: str, use: Use, deadline: Deadline, work: Callable[[Connection], Result]
    ) -> Result:
        """Lets one request have a connection; again with another if it had been closed meanwhile.

        Raises:
            StoreError: What the connection or the request raises.
        """
        for _ in range(MOST_PER_USE[use]):
            try:
                with self.connections.lease(node, use, deadline) as connection:
                    return work(connection)
            except StaleError:
                continue
        with self.connections.lease(node, use, deadline) as connection:
            return work(connection)

    def try_node(self, node: str, deadline: Deadline, work: Callable[[], object]) -> bool:
        """Does something with a node unless it is a suspect; a failure makes it one.

        Returns:
            Whether it was done without an error.
        """
        if deadline.is_over:
            self.counters.add("requests_out_of_time")
            return False
        if not self.suspects.may_try(node, now=time.monotonic()):
            self.counters.add("suspects_skipped")
            return False
        try:
            work()
        except NoConnectionError:
            self.counters.add("connections_taken")
            return False
        except FailedError:
            self.counters.add("requests_failed_there")
            return False
        except StoreError as error:
            self.counters.add(
                "requests_late" if isinstance(error, DeadlineError) else "requests_broken"
            )
            self.suspects.failed(node, now=time.monotonic())
            _log.warning("node suspected", node=node, reason=str(error))
            return False
        self.suspects.clear(node)
        return True

    def close(self) -> None:
        """Ends requests under way and waits for the threads."""
        self.connections.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(
        self,
        node: str,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        got: list[BlockInfo | None],
        deadline: Deadline,
    ) -> None:
        def work(connection: Connection) -> Blocks | Failed:
            left_s = min(deadline.require("fetching"), MAX_REQUEST_S)
            request = Fetch(list(keys), [view.nbytes for view in views], left_s)
            reply: Blocks | Failed = first_reply(connection, request, Blocks, deadline)
            if isinstance(reply, Failed):
                return reply
            if len(reply.infos) != len(keys):
                raise FrameError(f"{len(reply.infos)} answers to {len(keys)} keys")
            for key, view, info in zip(keys, views, reply.infos, strict=True):
                if info is not None:
                    check_info(info)
                    if info.key != key or info.length > view.nbytes:
                        raise FrameError("a block that was not asked for")
            for index, info in enumerate(reply.infos):
                if info is None:
                    continue
                if (
                    receive_block(connection.sock, views[index][: info.length], deadline)
                    == info.crc
                ):
                    got[index] = info
                else:
                    self.counters.add("corrupt_blocks")
            return reply

        reply = self.exchange(node, "fetch", deadline, work)
        if isinstance(reply, Failed):
            raise FailedError(f"node {node!r}: {reply.reason}")

    def _put(
        self,
        node: str,
        infos: Sequence[BlockInfo],
        buffers: Sequence[memoryview | bytes | bytearray],
        is_owned: bool,
        deadline: Deadline,
    ) -> int:
        def work(connection: Connection) -> Stored | Failed:
            left_s = min(deadline.require("storing"), MAX_REQUEST_S)
            room: Room | Failed = first_reply(
                connection, Put(list(infos), is_owned, left_s), Room, deadline
            )
            if isinstance(room, Failed):
                return room
            if room.count > len(infos):
                raise FrameError(f"room for {room.count} of {len(infos)} blocks")
            if room.count == 0:
                return Stored(0)
            send_buffers(connection.sock, buffers[: room.count], deadline)
            stored: Stored | Failed = recv_frame(connection.sock, Stored | Failed, deadline)
            return stored

        stored = self.exchange(node, "put", deadline, work)
        if isinstance(stored, Failed):
            raise FailedError(f"node {node!r}: {stored.reason}")
        return min(stored.count, len(infos))


def first_reply(connection: Connection, request: Any, kind: Any, deadline: Deadline) -> Any:
    """Sends a request and receives the first answer to it, or Failed.

    Raises:
        StaleError: If the connection had been closed while it lay idle.
        StoreError: Otherwise as send_frame and recv_frame.
    """
    try:
        send_frame(connection.sock, request, deadline)
        return recv_frame(connection.sock, kind | Failed, deadline)
    except StoreUnavailableError as error:
        if connection.is_used and not deadline.is_over:
            raise StaleError(str(error)) from error
        raise
