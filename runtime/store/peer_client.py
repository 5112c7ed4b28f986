"""Asks the other nodes: blocks from many owners at once, room for a region.

A fetch never fails: blocks that are absent, late, damaged on the way or at a node that cannot be
reached are misses. A node that failed or was late is a suspect and left alone for a while
(peer_suspects.py). A block counts as fetched only after its checksum was found right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from runtime.store.blocks import KEY_BYTES, BlockInfo
from runtime.store.deadline import Deadline
from runtime.store.peer_answers import receive_block
from runtime.store.peer_connections import Connection
from runtime.store.peer_identity import Incarnations, NodeIdentity
from runtime.store.peer_messages import (
    MAX_BLOCKS,
    MAX_REQUEST_S,
    Blocks,
    Failed,
    Fetch,
    Put,
    Room,
    Stored,
    check_info,
)
from runtime.store.peer_requests import FailedError, PeerRequests, first_reply
from runtime.store.peer_suspects import Suspects
from runtime.store.wire import FrameError, recv_frame, send_buffers

FETCH_THREADS: Final = 32
Wanted = tuple[Sequence[bytes], Sequence[memoryview]]


class Peers(PeerRequests):
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
        super().__init__(identity, incarnations=incarnations, suspects=suspects)
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="peer-fetch")

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

    def close(self) -> None:
        """Ends requests under way and waits for the threads."""
        super().close()
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
