"""Tells the other nodes what this one holds, best effort, without ever holding up a request.

Each change has a number. Per other node there is a bounded queue and a thread that empties it; a
node that is slow or away for long loses what no longer fits, sees the gap in the numbers, and asks
for pages of the holdings instead (peer_sync.py). What waits in a queue is sent as one net change.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError
from runtime.store.peer_counters import PeerCounters
from runtime.store.peer_messages import MAX_CHANGES, Announce, Announcement, Removal

DEFAULT_MOST_WAITING: Final = 1 << 17
SEND_S: Final = 2.0
RETRY_S: Final = 0.5
Send = Callable[[str, Announce, Deadline], None]


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    changes: tuple[Announcement | Removal, ...]


@dataclass(slots=True)
class _Queue:
    waiting: deque[_Batch] = field(default_factory=deque)
    num_changes: int = 0
    is_dropped: bool = False
    thread: threading.Thread | None = None


class Announcer:
    """Numbers changes and sends them to every node added.

    Args:
        send: Tells one node and returns once it has heard, or raises StoreError.
        counters: Where losses are counted.
        most_waiting: Most changes that wait for one node.
    """

    def __init__(
        self,
        send: Send,
        counters: PeerCounters,
        *,
        most_waiting: int = DEFAULT_MOST_WAITING,
    ) -> None:
        self._send = send
        self._counters = counters
        self._most_waiting = most_waiting
        self._last = 0
        self._queues: dict[str, _Queue] = {}
        self._ended: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def last(self) -> int:
        """Number of the last change announced; 0 before the first."""
        return self._last

    def add_node(self, node: str) -> None:
        """Announces to this node from now on; what was before it has to ask for."""
        with self._changed:
            if self._is_closed or node in self._queues:
                return
            queue = self._queues[node] = _Queue()
            queue.thread = threading.Thread(
                target=self._empty, args=(node, queue), name="peer-announce", daemon=True
            )
            queue.thread.start()

    def drop_node(self, node: str) -> None:
        """Announces to this node no longer."""
        with self._changed:
            queue = self._queues.pop(node, None)
            if queue is not None and queue.thread is not None:
                queue.is_dropped = True
                self._ended = [thread for thread in self._ended if thread.is_alive()]
                self._ended.append(queue.thread)
                self._changed.notify_all()

    def announce(self, added: Sequence[Announcement] = (), removed: Sequence[Removal] = ()) -> None:
        """Queues changes for all nodes and returns at once.

        The holdings that the node gives out as pages have changed before.

        Args:
            added: Copies this node holds now.
            removed: Copies it no longer holds; of a copy in both lists it is gone.
        """
        changes: tuple[Announcement | Removal, ...] = (*added, *removed)
        with self._changed:
            for start in range(0, len(changes), MAX_CHANGES):
                self._last += 1
                batch = _Batch(self._last, changes[start : start + MAX_CHANGES])
                for queue in self._queues.values():
                    queue.waiting.append(batch)
                    queue.num_changes += len(batch.changes)
                    # The newest stays in any case: it is what shows the gap.
                    while queue.num_changes > self._most_waiting and len(queue.waiting) > 1:
                        queue.num_changes -= len(queue.waiting.popleft().changes)
                        self._counters.add("announcements_dropped")
            self._changed.notify_all()

    def close(self, deadline: Deadline) -> bool:
        """Stops announcing; what waits is dropped.

        Returns:
            Whether all threads ended in time.
        """
        with self._changed:
            self._is_closed = True
            threads = [queue.thread for queue in self._queues.values() if queue.thread is not None]
            threads += self._ended
            self._changed.notify_all()
        for thread in threads:
            thread.join(deadline.left_s())
        return not any(thread.is_alive() for thread in threads)

    def _empty(self, node: str, queue: _Queue) -> None:
        while True:
            with self._changed:
                while not (queue.waiting or queue.is_dropped or self._is_closed):
                    self._changed.wait()
                if queue.is_dropped or self._is_closed:
                    return
                batches = _leading(queue.waiting)
            try:
                self._send(node, _net(batches), Deadline.after(SEND_S))
            except StoreError:
                self._counters.add("announcements_retried")
                with self._changed:
                    self._changed.wait_for(
                        lambda: queue.is_dropped or self._is_closed, timeout=RETRY_S
                    )
                continue
            with self._changed:
                while queue.waiting and queue.waiting[0].number <= batches[-1].number:
                    queue.num_changes -= len(queue.waiting.popleft().changes)


def _leading(waiting: deque[_Batch]) -> list[_Batch]:
    total, count = 0, 0
    for batch in waiting:
        total += len(batch.changes)
        if count and total > MAX_CHANGES:
            break
        count += 1
    return list(islice(waiting, count))


def _net(batches: Sequence[_Batch]) -> Announce:
    """Of several changes to one copy only the last matters."""
    last: dict[tuple[bytes, str], Announcement | Removal] = {}
    for batch in batches:
        for change in batch.changes:
            last[change.key, change.tier] = change
    return Announce(
        batches[0].number,
        batches[-1].number,
        [change for change in last.values() if isinstance(change, Announcement)],
        [change for change in last.values() if isinstance(change, Removal)],
    )
