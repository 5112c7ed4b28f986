"""Requests between their arrival and a slot: prefill, the line, and those that lost their slot."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RequestTable:
    """All requests of a run, in the order in which they ask for a slot.

    Row numbers are that order; ``by_arrival`` brings a column back to the order of arrival. Times
    are NaN until they happen.

    Args:
        arrival_s: [n], never decreasing.
        prompt_tokens: [n].
        output_tokens: [n].
        prefill_base_s: Delay before a slot is asked for.
        prefill_s_per_token: Further delay for each prompt token.

    Attributes:
        ready_s: [n] when the request asks for a slot.
        admitted_s: [n] when it got its first slot.
        first_token_s: [n].
        last_token_s: [n].
        worker: [n] where it is or was last; -1 before admission.
        retries: [n] how often it lost its worker.
        lost_s: Row -> when it last lost its worker, which is when its last token came.
    """

    def __init__(
        self,
        arrival_s: NDArray[np.float64],
        prompt_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
        *,
        prefill_base_s: float,
        prefill_s_per_token: float,
    ) -> None:
        n = len(arrival_s)
        ready_s = arrival_s + (prefill_base_s + prefill_s_per_token * prompt_tokens)
        self._order = np.argsort(ready_s, kind="stable")
        self._prefill_base_s = prefill_base_s
        self._prefill_s_per_token = prefill_s_per_token
        self.prompts_array = prompt_tokens[self._order]
        self.arrival_s: list[float] = arrival_s[self._order].tolist()
        self.ready_s: list[float] = ready_s[self._order].tolist()
        self.prompt_tokens: list[int] = self.prompts_array.tolist()
        self.output_tokens: list[int] = output_tokens[self._order].tolist()
        self.admitted_s = np.full(n, math.nan)
        self.first_token_s = np.full(n, math.nan)
        self.last_token_s = [math.nan] * n
        self.worker = [-1] * n
        self.retries = [0] * n
        self.lost_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self.ready_s)

    def prefill_s(self, prompt_tokens: int) -> float:
        """Delay before a request with that prompt asks for a slot."""
        return self._prefill_base_s + self._prefill_s_per_token * prompt_tokens

    def by_arrival(self, column: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """A column of times in the order of arrival."""
        back = np.empty(len(self))
        back[self._order] = column
        return back

    def counts_by_arrival(self, column: Sequence[int]) -> NDArray[np.int64]:
        """A column of whole numbers in the order of arrival."""
        back = np.empty(len(self), dtype=np.int64)
        back[self._order] = column
        return back


class Returned(NamedTuple):
    """A request that lost its worker, ordered by when it asks for a slot again.

    ``prompt_tokens`` counts what it had, prompt and generated; ``to_come`` what is still to do.
    """

    ready_s: float
    row: int
    prompt_tokens: int
    to_come: int


class AdmissionLine:
    """First come, first served; requests that lost their worker stand in front."""

    def __init__(self, table: RequestTable) -> None:
        self._ready_s = table.ready_s
        self._first = 0
        self._end = 0
        self._returning: list[Returned] = []
        self._returned: deque[Returned] = deque()

    def __len__(self) -> int:
        """Requests that wait for a slot, as of the last ``open_until``."""
        return self._end - self._first + len(self._returned)

    @property
    def num_preparing(self) -> int:
        """Requests that lost their worker and are in prefill again."""
        return len(self._returning)

    @property
    def num_opened(self) -> int:
        """Requests, lost ones aside, that have asked for a slot."""
        return self._end

    def open_until(self, now: float) -> int:
        """Let in who asks up to ``now``; how many wait then."""
        ready_s = self._ready_s
        if self._end < len(ready_s) and ready_s[self._end] <= now:
            self._end = bisect_right(ready_s, now, self._end)
        while self._returning and self._returning[0].ready_s <= now:
            self._returned.append(heapq.heappop(self._returning))
        return len(self)

    def next_ready_s(self) -> float:
        """When the next request asks that has not yet; infinity for never."""
        fresh_s = self._ready_s[self._end] if self._end < len(self._ready_s) else math.inf
        return min(fresh_s, self._returning[0].ready_s) if self._returning else fresh_s

    def take(self, count: int) -> tuple[list[Returned], range]:
        """The first ``count`` in line: returned ones, then rows of the table."""
        returned = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
        first = self._first
        self._first = first + count - len(returned)
        return returned, range(first, self._first)

    def come_back(self, request: Returned) -> None:
        """Queue a request that lost its worker."""
        heapq.heappush(self._returning, request)
