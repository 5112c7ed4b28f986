"""Where pages are copied to: the contract of a device, and the CPU with its copy thread."""

from __future__ import annotations

import queue
import threading
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.page_arena import PageArena
from runtime.page_tables import PageTables


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """Host pages to arena pages, enqueued and finished as one.

    Attributes:
        job_id: Rising.
        blocks, parts: [c] int64, what is copied.
        stream_bytes: [c] int64, bytes of each part (for its checksum).
        first: [c + 1] int64, where each part starts in the page lists.
        host_pages: [pages] int64, in HostParent.pages.
        arena_pages: [pages] int32.
    """

    job_id: int
    blocks: NDArray[np.int64]
    parts: NDArray[np.int64]
    stream_bytes: NDArray[np.int64]
    first: NDArray[np.int64]
    host_pages: NDArray[np.int64]
    arena_pages: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class JobEnd:
    """A job has ended: the device will not write to its pages any more.

    Attributes:
        job: The job.
        error: None if every byte was copied, else what went wrong, in words.
        checksums: [c] uint32, CRC-32 of each part as read back from the arena; None if the device
            does not verify.
    """

    job: CopyJob
    error: str | None
    checksums: NDArray[np.uint32] | None


class Fence(Protocol):
    """A moment in the work given to a device so far."""

    def passed(self) -> bool:
        """Whether all of that work is done; never waits."""


class CopyDevice(Protocol):
    """Copies beside the computation. No call but ``copy_now`` and ``close`` waits for a copy."""

    @property
    def largest_job_bytes(self) -> int:
        """A job may have this many bytes of pages."""

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory for the host parent, pinned if the device can."""

    def attach(self, host_pages: NDArray[np.uint8], tables: PageTables) -> None:
        """Tell the device its source and the tables that its kernels read; once, at the start.

        Raises:
            ValueError: If a plane or table is larger than a job may be.
        """

    def copy_now(self, job: CopyJob) -> None:
        """Copy and wait, before the first step."""

    def start(self, job: CopyJob) -> bool:
        """Enqueue a copy behind the computation given so far; False while there is no room."""

    def cancel(self, job: CopyJob) -> None:
        """The job is not wanted any more; it still ends once."""

    def ended(self) -> list[JobEnd]:
        """Jobs that have ended since the last call."""

    def fence(self) -> Fence:
        """The computation enqueued so far, on every compute stream."""

    def publish(self, blocks: NDArray[np.int64]) -> None:
        """Rows of these blocks have changed in the host's tables: kernels enqueued from now on see
        them, kernels enqueued before do not."""

    def close(self) -> None:
        """Stop threads; jobs under way end first."""


def checksums_of(
    memory: NDArray[np.uint8], pages: NDArray[np.integer], job: CopyJob
) -> NDArray[np.uint32]:
    """[c] uint32: CRC-32 of a job's parts, read page by page where they are.

    Args:
        memory: [any, page_bytes] uint8.
        pages: Where the job's pages are in ``memory``, in their order.
        job: Tells where parts start and how many bytes they have.
    """
    page_bytes = memory.shape[1]
    sums = np.zeros(len(job.parts), np.uint32)
    for part, num_bytes in enumerate(job.stream_bytes.tolist()):
        crc = 0
        for page in pages[job.first[part] : job.first[part + 1]].tolist():
            crc = zlib.crc32(memory[page, :num_bytes].data, crc)
            num_bytes -= page_bytes
        sums[part] = crc
    return sums


def copy_pages(
    target: NDArray[np.uint8],
    target_pages: NDArray[np.integer],
    source: NDArray[np.uint8],
    source_pages: NDArray[np.integer],
) -> None:
    """Copy pages, runs that are contiguous on both sides in one piece (without the interpreter)."""
    steps = (np.diff(target_pages) != 1) | (np.diff(source_pages) != 1)
    starts = np.concatenate([[0], np.flatnonzero(steps) + 1, [len(target_pages)]])
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if begin < end:
            to, of = int(target_pages[begin]), int(source_pages[begin])
            np.copyto(target[to : to + end - begin], source[of : of + end - begin])


class PassedFence:
    """A fence behind work that was done before it was asked for."""

    def passed(self) -> bool:
        """True."""
        return True


class CpuDevice:
    """Host memory as the device; one thread copies.

    Kernels are ordinary calls that return when they are done, so a fence has passed as soon as it
    exists, and the host's tables are the ones that kernels read.
    """

    def __init__(self, arena: PageArena, *, verify: bool = True, queued_jobs: int = 64) -> None:
        """Start the copy thread.

        Args:
            arena: In host memory.
            verify: Read every copy back and report its checksum.
            queued_jobs: Jobs accepted and not yet ended, >= 1.
        """
        self._arena: NDArray[np.uint8] = arena.buffer.array
        self._host_pages = np.zeros((0, arena.page_bytes), np.uint8)
        self._verify = verify
        self._room = queued_jobs
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._ended: deque[JobEnd] = deque()
        self._cancelled: set[int] = set()
        self._thread = threading.Thread(target=self._copy, name="page copies", daemon=True)
        self._thread.start()

    @property
    def largest_job_bytes(self) -> int:
        """As large as memory."""
        return self._arena.nbytes

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Pageable memory."""
        return np.empty(num_bytes, np.uint8)

    def attach(self, host_pages: NDArray[np.uint8], tables: PageTables) -> None:
        """Remember the source."""
        self._host_pages = host_pages

    def copy_now(self, job: CopyJob) -> None:
        """Copy in this thread."""
        copy_pages(self._arena, job.arena_pages, self._host_pages, job.host_pages)

    def start(self, job: CopyJob) -> bool:
        """Queue the job."""
        if self._room == 0:
            return False
        self._room -= 1
        self._jobs.put(job)
        return True

    def cancel(self, job: CopyJob) -> None:
        """Skip the job if its turn has not come."""
        self._cancelled.add(job.job_id)

    def ended(self) -> list[JobEnd]:
        """Jobs the thread is done with."""
        ends = [self._ended.popleft() for _ in range(len(self._ended))]
        self._room += len(ends)
        for end in ends:
            self._cancelled.discard(end.job.job_id)
        return ends

    def fence(self) -> PassedFence:
        """Calls have returned: nothing is under way."""
        return PassedFence()

    def publish(self, blocks: NDArray[np.int64]) -> None:
        """Kernels read the host's tables themselves."""

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _copy(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._ended.append(self._end_of(job))

    def _end_of(self, job: CopyJob) -> JobEnd:
        if job.job_id in self._cancelled:
            return JobEnd(job, "cancelled before its turn", None)
        try:
            self.copy_now(job)
            if not self._verify:
                return JobEnd(job, None, None)
            return JobEnd(job, None, checksums_of(self._arena, job.arena_pages, job))
        except Exception as error:  # the engine's thread reports it; this one must live on
            return JobEnd(job, f"{type(error).__name__}: {error}", None)
