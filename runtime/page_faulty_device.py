"""A device in host memory that delays, fails, reorders, corrupts and loses copies by a schedule.

For fault injection: everything that may go wrong on a link does so here, drawn from a generator
that is passed in, and time passes only when it is asked for (``tick``). It is as unkind as a real
device may be: a copy is written piece by piece, some bytes of it before the end and in any order;
a copy that is cancelled goes on writing for a while, and it may still end well; a lost one ends
only after it has been cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.page_arena import PageArena
from runtime.page_devices import CopyJob, JobEnd, checksums_of, copy_pages
from runtime.page_tables import PageTables


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """How often a copy goes wrong, as shares of all copies, and how long things take.

    Attributes:
        fails: Ends with an error after some of its bytes.
        corrupts: Ends well with one byte wrong.
        loses: Never ends by itself.
        delay_ticks: A copy takes 1 to this many ticks, drawn anew for each: they overtake.
        fence_ticks: Kernels take 1 to this many ticks.
        slots: Copies under way at once.
    """

    fails: float = 0.0
    corrupts: float = 0.0
    loses: float = 0.0
    delay_ticks: int = 1
    fence_ticks: int = 1
    slots: int = 4

    def __post_init__(self) -> None:
        rates = (self.fails, self.corrupts, self.loses)
        if min(rates) < 0 or sum(rates) > 1:
            raise ValueError(f"fails, corrupts and loses must be >= 0 and sum to <= 1: {rates}")
        if min(self.delay_ticks, self.fence_ticks, self.slots) < 1:
            raise ValueError("delay_ticks, fence_ticks and slots must be >= 1")


@dataclass(slots=True, eq=False)
class _Copy:
    job: CopyJob
    fate: str
    left: int | None  # ticks to its end; None: lost
    written: NDArray[np.bool_] = field(repr=False)


@dataclass(slots=True, eq=False)
class TickFence:
    """A fence that passes after some ticks."""

    left: int

    def passed(self) -> bool:
        """Whether the ticks are over."""
        return self.left <= 0


class FaultyDevice:
    """See the module text.

    Attributes:
        fates: How many copies were given each fate: "lands", "fails", "corrupts", "loses".
    """

    def __init__(self, arena: PageArena, chance: np.random.Generator, rates: FaultRates) -> None:
        self._arena: NDArray[np.uint8] = arena.buffer.array
        self._chance, self._rates = chance, rates
        self._source = np.zeros((0, arena.page_bytes), np.uint8)
        self._copies: list[_Copy] = []
        self._fences: list[TickFence] = []
        self._ends: list[JobEnd] = []
        self.fates = dict.fromkeys(("lands", "fails", "corrupts", "loses"), 0)

    @property
    def largest_job_bytes(self) -> int:
        """As large as memory."""
        return self._arena.nbytes

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Pageable memory."""
        return np.empty(num_bytes, np.uint8)

    def attach(self, host_pages: NDArray[np.uint8], tables: PageTables) -> None:
        """Remember the source."""
        self._source = host_pages

    def copy_now(self, job: CopyJob) -> None:
        """Without faults."""
        copy_pages(self._arena, job.arena_pages, self._source, job.host_pages)

    def start(self, job: CopyJob) -> bool:
        """Draw a fate and a duration."""
        if len(self._copies) >= self._rates.slots:
            return False
        rates = self._rates
        draw = self._chance.random()
        fate = "lands"
        for name, rate in (
            ("fails", rates.fails),
            ("corrupts", rates.corrupts),
            ("loses", rates.loses),
        ):
            if draw < rate:
                fate = name
                break
            draw -= rate
        self.fates[fate] += 1
        left = None if fate == "loses" else int(self._chance.integers(1, rates.delay_ticks + 1))
        written = np.zeros(len(job.arena_pages), np.bool_)
        self._copies.append(_Copy(job, fate, left, written))
        return True

    def cancel(self, job: CopyJob) -> None:
        """It ends some ticks later, and writes until then."""
        for copy in self._copies:
            if copy.job is job and copy.left is None:
                copy.left = int(self._chance.integers(1, self._rates.delay_ticks + 1))

    def tick(self) -> None:
        """Time passes: bytes are written, copies and kernels end."""
        for fence in self._fences:
            fence.left -= 1
        self._fences = [fence for fence in self._fences if fence.left > 0]
        for copy in self._copies:
            self._write(copy, self._chance.random(len(copy.written)) < 0.5)
            if copy.left is not None:
                copy.left -= 1
        done = [copy for copy in self._copies if copy.left == 0]
        self._copies = [copy for copy in self._copies if copy.left != 0]
        self._ends += [self._end(done[place]) for place in self._chance.permutation(len(done))]

    def ended(self) -> list[JobEnd]:
        """Copies that have ended by now, in random order."""
        ends, self._ends = self._ends, []
        return ends

    def fence(self) -> TickFence:
        """Draw a duration; kernels may overtake one another."""
        fence = TickFence(int(self._chance.integers(1, self._rates.fence_ticks + 1)))
        self._fences.append(fence)
        return fence

    def publish(self, blocks: NDArray[np.int64]) -> None:
        """Kernels read the host's tables."""

    def close(self) -> None:
        """Nothing to stop."""

    def _write(self, copy: _Copy, chosen: NDArray[np.bool_]) -> None:
        now = np.flatnonzero(chosen & ~copy.written)
        copy_pages(self._arena, copy.job.arena_pages[now], self._source, copy.job.host_pages[now])
        copy.written[now] = True

    def _end(self, copy: _Copy) -> JobEnd:
        job = copy.job
        if copy.fate in ("fails", "loses"):
            return JobEnd(job, "the link reported an error", None)
        self._write(copy, ~copy.written)
        if copy.fate == "corrupts":
            part = int(self._chance.integers(len(job.parts)))
            byte = int(self._chance.integers(job.stream_bytes[part]))
            page = job.arena_pages[job.first[part] + byte // self._arena.shape[1]]
            self._arena[page, byte % self._arena.shape[1]] ^= 1 << int(self._chance.integers(8))
        return JobEnd(job, None, checksums_of(self._arena, job.arena_pages, job))
