"""The link from host to device: copies one after the other, cancelled, or failing now and then."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class CopyLink:
    """First in, first out; a copy takes its start-up and its bytes over the bandwidth.

    A cancelled copy that has not started leaves the queue at once; one under way runs to its end.
    Copies are known by keys (numbers of the caller's choice). What has ended is asked for, so that
    a link costs no simulation events.

    Attributes:
        started_copies: Copies that have been put on the link, for tests and reports.
        busy_s: Seconds it has carried something.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        latency_s: float = 0.0,
        failure_share: float = 0.0,
        rng: np.random.Generator,
    ) -> None:
        """An idle link.

        Raises:
            ValueError: If a number is out of range.
        """
        if not bytes_per_s > 0.0 or latency_s < 0.0 or not 0.0 <= failure_share <= 1.0:
            raise ValueError(
                "need bytes_per_s > 0, latency_s >= 0 and failure_share within [0, 1], "
                f"found {bytes_per_s}, {latency_s}, {failure_share}"
            )
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._failure_share, self._rng = failure_share, rng
        self._keys = np.zeros(0, np.int64)
        self._seconds = np.zeros(0)
        self._given_up = np.zeros(0, np.int64)
        self._head_starts_s = 0.0
        self.started_copies = 0
        self.busy_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a copy is queued or under way."""
        return len(self._keys) > 0

    @property
    def has_news(self) -> bool:
        """Whether there is anything ``ended`` may still tell."""
        return len(self._keys) > 0 or len(self._given_up) > 0

    @property
    def head(self) -> Ints:
        """Key of the copy under way, as a list of at most one."""
        return self._keys[:1]

    def idle_s(self) -> float:
        """When the last copy ends, as things are; the past if nothing is queued."""
        return self._head_starts_s + float(self._seconds.sum())

    def put(self, keys: Ints, num_bytes: Ints, *, now: float) -> None:
        """Queue copies.

        Args:
            keys: [c] not queued yet.
            num_bytes: [c] bytes of each.
            now: Seconds; everything that has ended by then must have been asked for.
        """
        if not len(keys):
            return
        if not len(self._keys):
            self._head_starts_s = now
        self._keys = np.concatenate([self._keys, keys])
        seconds = self._latency_s + num_bytes / self._bytes_per_s
        self._seconds = np.concatenate([self._seconds, seconds])
        self.started_copies += len(keys)

    def cancel(self, keys: Ints) -> None:
        """Take copies out of the queue; the one under way stays."""
        if not len(keys) or not len(self._keys):
            return
        waits = np.isin(self._keys, keys)
        waits[0] = False
        self._given_up = np.concatenate([self._given_up, self._keys[waits]])
        self._keys, self._seconds = self._keys[~waits], self._seconds[~waits]

    def ended(self, now: float) -> tuple[Ints, Ints]:
        """Keys of the copies that have landed, and of those that failed or were given up."""
        given_up, self._given_up = self._given_up, np.zeros(0, np.int64)
        if not len(self._keys):
            return np.zeros(0, np.int64), given_up
        ends = self._head_starts_s + np.cumsum(self._seconds)
        count = int(np.searchsorted(ends, now, side="right"))
        if count == 0:
            return np.zeros(0, np.int64), given_up
        done = self._keys[:count]
        self.busy_s += float(self._seconds[:count].sum())
        self._keys, self._seconds = self._keys[count:], self._seconds[count:]
        self._head_starts_s = float(ends[count - 1])
        if self._failure_share == 0.0:
            return done, given_up
        fails = self._rng.random(count) < self._failure_share
        return done[~fails], np.concatenate([done[fails], given_up])
