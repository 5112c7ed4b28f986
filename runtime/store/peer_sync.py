"""Keeps in step with what other nodes announce, and reads their holdings where it is not.

Changes are numbered by their node. As long as the numbers follow each other they are passed on as
they come. A gap, a node seen for the first time and a node that started anew lead to a reading of
all its holdings, page by page, while its announcements go on:

    announced    --|--A--|--R--|--A--|-->      added or removed during the reading: decides
    pages        ==|==p1==|==p2==|==p3==|      everything else: what the pages say
    afterwards                           keep only what the pages and the announcements named

Nothing is forgotten before its absence is known, so hits do not vanish during a reading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError
from runtime.store.peer_counters import PeerCounters
from runtime.store.peer_faults import Seldom, what_failed
from runtime.store.peer_handler import PeerHandler
from runtime.store.peer_messages import Announce, Page

_log = structlog.get_logger(__name__)
PAGE_KEYS: Final = 4096
PAGE_S: Final = 2.0
RETRY_S: Final = 1.0
MOST_HELD: Final = 1 << 23  # copies of one node; no node is believed beyond that
ReadPage = Callable[[str, bytes, int, Deadline], tuple[int, Page]]


@dataclass(slots=True)
class _Reading:
    kept: dict[tuple[bytes, str], None] = field(default_factory=dict)
    removed: dict[tuple[bytes, str], None] = field(default_factory=dict)


@dataclass(slots=True)
class _Stream:
    incarnation: int
    last: int = 0
    behind_since: int = -1
    is_out_of_step: bool = True
    due_s: float = 0.0
    reading: _Reading | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class DirectorySync:
    """Takes announcements of all nodes; one thread reads holdings where that is needed.

    Args:
        handler: Is told of changes, in order per node.
        read_page: Asks a node for a page of its holdings.
        counters: Where gaps and readings are counted.
    """

    def __init__(self, handler: PeerHandler, read_page: ReadPage, counters: PeerCounters) -> None:
        self._handler = handler
        self._read_page = read_page
        self._counters = counters
        self._streams: dict[str, _Stream] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._seldom = Seldom()
        self._thread = threading.Thread(target=self._run, name="peer-sync", daemon=True)

    def start(self) -> None:
        """Starts reading."""
        self._thread.start()

    def close(self, deadline: Deadline) -> bool:
        """Stops reading.

        Returns:
            Whether the thread ended in time.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(deadline.left_s())
        return not self._thread.is_alive()

    def joined(self, node: str, incarnation: int) -> None:
        """A node appeared, or appeared again: all its holdings are to be read."""
        stream = self._stream(node, incarnation)
        if stream is not None:
            with stream.lock:
                stream.is_out_of_step = True
                stream.due_s = 0.0
            self._wake()

    def left(self, node: str) -> None:
        """A node is gone; nothing of it is read until it joins again."""
        with self._changed:
            self._streams.pop(node, None)

    def is_in_step(self, node: str) -> bool:
        """Whether all that this node announced is known."""
        stream = self._streams.get(node)
        return stream is not None and not stream.is_out_of_step and stream.reading is None

    def receive(self, node: str, incarnation: int, announce: Announce) -> None:
        """Changes of a node's holdings, as they come, perhaps with gaps or twice."""
        stream = self._stream(node, incarnation)
        if stream is None:
            return
        with stream.lock:
            if announce.last <= stream.last:
                return
            if announce.first > stream.last + 1 and not stream.is_out_of_step:
                self._counters.add("announcement_gaps")
                stream.is_out_of_step = True
            stream.last = announce.last
            stream.behind_since = -1
            if stream.reading is not None:
                for added in announce.added:
                    stream.reading.kept[added.key, added.tier] = None
                    stream.reading.removed.pop((added.key, added.tier), None)
                for removed in announce.removed:
                    stream.reading.kept.pop((removed.key, removed.tier), None)
                    stream.reading.removed[removed.key, removed.tier] = None
            self._handler.announced(node, incarnation, announce.added, announce.removed)
            is_due = stream.is_out_of_step
        if is_due:
            self._wake()

    def heard(self, node: str, incarnation: int, last: int) -> None:
        """A node lives and has announced so many changes.

        Twice behind the same number without an announcement between means that one is lost.
        """
        stream = self._stream(node, incarnation)
        if stream is None:
            return
        with stream.lock:
            if last <= stream.last:
                stream.behind_since = -1
                return
            if stream.behind_since < 0:
                stream.behind_since = stream.last
                return
            self._counters.add("announcement_gaps")
            stream.last = last
            stream.behind_since = -1
            stream.is_out_of_step = True
        self._wake()

    def _stream(self, node: str, incarnation: int) -> _Stream | None:
        with self._changed:
            stream = self._streams.get(node)
            if stream is None or stream.incarnation < incarnation:
                stream = self._streams[node] = _Stream(incarnation)
                self._changed.notify_all()
            return stream if stream.incarnation == incarnation else None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = time.monotonic()
                waits = {
                    node: stream.due_s - now
                    for node, stream in self._streams.items()
                    if stream.is_out_of_step
                }
                node = min(waits, key=waits.__getitem__, default=None)
                if node is None or waits[node] > 0:
                    self._changed.wait(None if node is None else waits[node])
                    continue
                stream = self._streams[node]
            try:
                self._read(node, stream)
            except StoreError as error:
                reason = str(error)
            except Exception as error:
                reason = str(what_failed(error))
            else:
                reason = ""
            if reason:
                self._counters.add("directory_readings_broken")
                if self._seldom.may_say(node + reason, now=time.monotonic()):
                    _log.info("holdings not read", node=node, reason=reason)
                with stream.lock:
                    stream.reading = None
                    stream.is_out_of_step = True
                    stream.due_s = time.monotonic() + RETRY_S

    def _read(self, node: str, stream: _Stream) -> None:
        with stream.lock:
            reading = stream.reading = _Reading()
            stream.is_out_of_step = False
        after, num_held = b"", 0
        while not self._is_closed:
            incarnation, page = self._read_page(node, after, PAGE_KEYS, Deadline.after(PAGE_S))
            held = page.held
            if incarnation != stream.incarnation or self._streams.get(node) is not stream:
                stream.reading = None
                return
            num_held += len(held)
            if num_held > MOST_HELD:
                raise StoreError(f"node {node!r} claims more than {MOST_HELD} copies")
            with stream.lock:
                if after == b"":
                    # Changes up to this one were made before the page was read.
                    stream.last = max(stream.last, page.last)
                if not held:
                    self._handler.retained(node, incarnation, reading.kept.keys())
                    stream.reading = None
                    self._counters.add("directories_read")
                    return
                current = [one for one in held if (one.key, one.tier) not in reading.removed]
                reading.kept.update(((one.key, one.tier), None) for one in current)
                self._handler.announced(node, incarnation, current, ())
            after = held[-1].key
