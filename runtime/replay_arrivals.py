"""When each request of a replay is sent: by the clock, after an answer, or as room allows."""

from __future__ import annotations

import heapq
import math

import numpy as np

from runtime.replay_requests import NOBODY, ReplayError, ReplayRequests


class ReplayArrivals:
    """Hands requests out as they fall due.

    Open loop: a request comes at its time, or its think time after the answer that it follows,
    whatever the engine does. Closed loop (``concurrency``): in order, always so many at a time; a
    turn still waits for the answer before it, but nobody thinks.

    Attributes:
        due_s: [n] seconds since the start when each fell due; NaN: not yet.
        num_under_way: Requests taken whose answers have not ended.
        num_left: Requests not taken.
    """

    def __init__(
        self, requests: ReplayRequests, *, speed: float = 1.0, concurrency: int | None = None
    ) -> None:
        """Nothing is due yet.

        Args:
            requests: In order.
            speed: How many times faster than recorded, arrivals and think times alike.
            concurrency: Requests at a time in a closed loop; None: open loop.

        Raises:
            ReplayError: If a number is out of range.
        """
        if not (math.isfinite(speed) and speed > 0):
            raise ReplayError(f"--speed: must be finite and > 0, found {speed!r}")
        if concurrency is not None and concurrency < 1:
            raise ReplayError(f"--concurrency: must be >= 1, found {concurrency}")
        self._concurrency, self.num_under_way = concurrency, 0
        self.due_s = np.full(len(requests), np.nan)
        self._think_s = requests.think_s / speed
        self._followers: dict[int, list[int]] = {}
        self._heap: list[tuple[float, int]] = []
        for i, before in enumerate(requests.follows.tolist()):
            if before == NOBODY:
                at = float(requests.arrival_s[i]) / speed if concurrency is None else 0.0
                self._heap.append((at, i))
            else:
                self._followers.setdefault(before, []).append(i)
        heapq.heapify(self._heap)
        self.num_left = len(requests)

    def take(self, now: float) -> list[int]:
        """Requests that are due and not yet taken."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            if self._concurrency is not None and self.num_under_way >= self._concurrency:
                break
            at, request = heapq.heappop(self._heap)
            self.due_s[request] = at if self._concurrency is None else now
            self.num_under_way += 1
            self.num_left -= 1
            taken.append(request)
        return taken

    def ended(self, request: int, now: float) -> None:
        """An answer is complete, or has failed: those who follow it start to think."""
        self.num_under_way -= 1
        for follower in self._followers.pop(request, ()):
            think_s = float(self._think_s[follower]) if self._concurrency is None else 0.0
            heapq.heappush(self._heap, (now + max(0.0, think_s), follower))

    @property
    def next_s(self) -> float | None:
        """When the next request falls due by the clock; None: after an answer, or never."""
        if not self._heap:
            return None
        if self._concurrency is not None and self.num_under_way >= self._concurrency:
            return None
        return self._heap[0][0]
