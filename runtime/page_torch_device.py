"""A GPU as the device: copies on a side stream through a pinned ring, polled events.

    host parent --memcpy, copy thread--> pinned slot --H2D, side stream--> staging slot
                                                       --scatter, side stream--> arena pages

With a pinned parent the first arrow is left out and contiguous runs of host pages go straight to
the staging slot. The side stream waits for the computation enqueued before the copy, so pages that
kernels have just finished with may be written at once; the compute streams never wait. To verify,
the side stream gathers the pages back and copies them to the host, and the copy thread takes
their checksums. Events are polled; nobody waits for them but ``copy_now``, before the first step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.page_arena import PageArena
from runtime.page_devices import CopyJob, JobEnd, checksums_of, copy_pages
from runtime.page_tables import PageTables

_LOG = logging.getLogger(__name__)


class StreamEvent(Protocol):
    """An event on a stream."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Wait for it (only before the first step)."""


class Streams(Protocol):
    """The streams of one device."""

    def on_copy_stream(self) -> AbstractContextManager[Any]:
        """Work enqueued inside goes to the side stream."""

    def compute_events(self) -> Sequence[StreamEvent]:
        """Events behind the work enqueued so far on every compute stream."""

    def copy_after(self, events: Sequence[StreamEvent]) -> None:
        """The side stream's further work starts after these events."""

    def copy_event(self) -> StreamEvent:
        """An event behind the work enqueued so far on the side stream."""


class CudaStreams:
    """Streams of a CUDA device: a side stream of low priority beside the compute streams."""

    def __init__(self, device: str, compute: Sequence[torch.cuda.Stream] = ()) -> None:
        """Use the device's current stream for computation if none is named."""
        self._copy = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        self._compute = tuple(compute) or (torch.cuda.current_stream(device),)

    def on_copy_stream(self) -> AbstractContextManager[Any]:
        """Enter the side stream."""
        return torch.cuda.stream(self._copy)

    def compute_events(self) -> Sequence[StreamEvent]:
        """One event per compute stream."""
        return [stream.record_event() for stream in self._compute]

    def copy_after(self, events: Sequence[StreamEvent]) -> None:
        """Order the side stream behind events of compute streams."""
        for event in events:
            if isinstance(event, torch.cuda.Event):
                self._copy.wait_event(event)

    def copy_event(self) -> StreamEvent:
        """Record on the side stream."""
        event: StreamEvent = self._copy.record_event()
        return event


@dataclass(frozen=True, slots=True)
class EventFence:
    """A fence over one event per compute stream."""

    events: Sequence[StreamEvent]

    def passed(self) -> bool:
        """Whether all have happened; asks, never waits."""
        return all(event.query() for event in self.events)


@dataclass(slots=True, eq=False)
class DeviceTables:
    """Mirror of PageTables on the device: same shapes and dtypes, fixed addresses."""

    bits: torch.Tensor
    plane_pages: torch.Tensor
    table_pages: torch.Tensor


@dataclass(slots=True, eq=False)
class _Slot:
    """One place of the ring: a pinned buffer on the host and a staging buffer on the device."""

    host: torch.Tensor
    staging: torch.Tensor


@dataclass(slots=True, eq=False)
class _Copy:
    """A job in its slot; the event is known once its last copy is enqueued."""

    job: CopyJob
    slot: _Slot
    after: Sequence[StreamEvent]
    event: StreamEvent | None = None
    error: str | None = None
    checksums: NDArray[np.uint32] | None = None


class TorchDevice:
    """Copies into an arena that is a torch tensor.

    Attributes:
        tables: What kernels read; None before ``attach``.
    """

    def __init__(
        self,
        arena: PageArena,
        streams: Streams,
        *,
        slots: int = 3,
        slot_bytes: int = 16 << 20,
        verify: bool = False,
    ) -> None:
        """Reserve the ring and start the copy thread.

        Args:
            arena: On the device.
            streams: Of the same device.
            slots: Jobs under way at once, 2 to 4.
            slot_bytes: Size of a slot, at least that of the largest plane or table.
            verify: Read every copy back and report its checksum.

        Raises:
            ValueError: If a size is out of range.
        """
        if not 2 <= slots <= 4 or slot_bytes < arena.page_bytes:
            raise ValueError(
                f"need 2..4 slots of at least one page, not {slots} of {slot_bytes} bytes"
            )
        self._pages: torch.Tensor = arena.buffer.array.view(torch.int64)
        self._device = self._pages.device
        self._streams, self._verify = streams, verify
        self._page_bytes = arena.page_bytes
        self._slot_pages = slot_bytes // arena.page_bytes
        self._source = np.zeros((0, arena.page_bytes), np.uint8)
        self._pinned_source: torch.Tensor | None = None
        self._free = deque(self._new_slot() for _ in range(slots))
        self._work: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._enqueued: deque[_Copy] = deque()  # filled by the copy thread
        self._summed: deque[_Copy] = deque()  # filled by the copy thread
        self._cancelled: set[int] = set()
        self._host_tables: PageTables | None = None
        self.tables: DeviceTables | None = None
        self._thread = threading.Thread(target=self._copy, name="page copies", daemon=True)
        self._thread.start()

    @property
    def largest_job_bytes(self) -> int:
        """A slot."""
        return self._slot_pages * self._page_bytes

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Pinned memory; pageable memory, with a warning, if that cannot be had."""
        try:
            pinned = self._host_tensor(num_bytes)
        except RuntimeError as error:
            _LOG.warning("the host parent is pageable and copied through the ring: %s", error)
            return np.empty(num_bytes, np.uint8)
        self._pinned_source = pinned
        memory: NDArray[np.uint8] = pinned.numpy()
        return memory

    def attach(self, host_pages: NDArray[np.uint8], tables: PageTables) -> None:
        """Remember the source, and mirror the tables.

        Raises:
            ValueError: If a plane or table is larger than a slot.
        """
        largest = max(tables.plane_pages.shape[2], tables.table_pages.shape[2])
        if largest > self._slot_pages:
            raise ValueError(
                f"slot_bytes must hold the largest plane or table, {largest * self._page_bytes} "
                f"bytes, not {self._slot_pages * self._page_bytes}"
            )
        self._source = host_pages
        pinned = self._pinned_source
        if pinned is None or pinned.data_ptr() != host_pages.ctypes.data:
            self._pinned_source = None  # the parent lies elsewhere: go through the ring
        self._host_tables = tables
        self.tables = DeviceTables(
            *(
                torch.from_numpy(array).to(self._device, copy=True)
                for array in (tables.bits, tables.plane_pages, tables.table_pages)
            )
        )

    def copy_now(self, job: CopyJob) -> None:
        """Copy in this thread, in pieces that fit a slot, and wait."""
        slot = self._free[0]
        for begin in range(0, len(job.host_pages), self._slot_pages):
            piece = slice(begin, begin + self._slot_pages)
            self._enqueue(slot, job.host_pages[piece], job.arena_pages[piece]).synchronize()

    def start(self, job: CopyJob) -> bool:
        """Hand the job to the copy thread, behind the computation enqueued so far.

        Raises:
            ValueError: If the job is larger than a slot.
        """
        if len(job.host_pages) > self._slot_pages:
            raise ValueError(
                f"a copy of {len(job.host_pages)} pages does not fit a slot of {self._slot_pages}"
            )
        if not self._free:
            return False
        self._work.put(_Copy(job, self._free.popleft(), self._streams.compute_events()))
        return True

    def cancel(self, job: CopyJob) -> None:
        """Skip the job if its turn has not come."""
        self._cancelled.add(job.job_id)

    def ended(self) -> list[JobEnd]:
        """Jobs whose events have happened and whose checksums, if wanted, are there."""
        ends = []
        for _ in range(len(self._enqueued)):
            copy = self._enqueued.popleft()
            if copy.event is not None and not copy.event.query():
                self._enqueued.append(copy)
            elif self._verify and copy.error is None:
                self._work.put(copy)
            else:
                ends.append(self._end(copy))
        ends += [self._end(self._summed.popleft()) for _ in range(len(self._summed))]
        return ends

    def _end(self, copy: _Copy) -> JobEnd:
        self._free.append(copy.slot)
        self._cancelled.discard(copy.job.job_id)
        return JobEnd(copy.job, copy.error, copy.checksums)

    def fence(self) -> EventFence:
        """Events behind the kernels enqueued so far."""
        return EventFence(self._streams.compute_events())

    def publish(self, blocks: NDArray[np.int64]) -> None:
        """Write changed rows into the mirror, in order with the current compute stream."""
        if self.tables is None or self._host_tables is None:
            raise RuntimeError("publish before attach")
        host, mirror = self._host_tables, self.tables
        rows = self._to_device(blocks)
        mirror.bits.index_copy_(0, rows, self._to_device(host.bits[blocks]))
        mirror.plane_pages.index_copy_(0, rows, self._to_device(host.plane_pages[blocks]))
        mirror.table_pages.index_copy_(0, rows, self._to_device(host.table_pages[blocks]))

    def close(self) -> None:
        """End the thread."""
        self._work.put(None)
        self._thread.join()

    # --- the copy thread ---

    def _copy(self) -> None:
        while (copy := self._work.get()) is not None:
            if copy.event is None and copy.error is None:
                self._begin(copy)
                self._enqueued.append(copy)
            else:
                self._sum(copy)
                self._summed.append(copy)

    def _begin(self, copy: _Copy) -> None:
        """Enqueue a copy; if that fails, what was enqueued before still ends first."""
        if copy.job.job_id in self._cancelled:
            copy.error = "cancelled before its turn"
            return
        try:
            with self._streams.on_copy_stream():
                self._streams.copy_after(copy.after)
            copy.event = self._enqueue(copy.slot, copy.job.host_pages, copy.job.arena_pages)
            if self._verify:
                copy.event = self._read_back(copy.slot, copy.job.arena_pages)
        except Exception as error:  # the engine's thread reports it; this one must live on
            copy.error = f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):
                copy.event = self._streams.copy_event()

    def _sum(self, copy: _Copy) -> None:
        read_back = copy.slot.host.numpy().reshape(-1, self._page_bytes)
        places = np.arange(len(copy.job.arena_pages))
        copy.checksums = checksums_of(read_back, places, copy.job)

    def _enqueue(
        self, slot: _Slot, host_pages: NDArray[np.int64], arena_pages: NDArray[np.int32]
    ) -> StreamEvent:
        """Host pages to the staging slot, and from there to their pages."""
        count = len(host_pages)
        staging = slot.staging[: count * self._page_bytes]
        if self._pinned_source is None:
            gathered = slot.host.numpy().reshape(-1, self._page_bytes)
            copy_pages(gathered, np.arange(count), self._source, host_pages)
        with self._streams.on_copy_stream():
            if self._pinned_source is None:
                staging.copy_(slot.host[: count * self._page_bytes], non_blocking=True)
            else:
                self._stage_runs(self._pinned_source, staging, host_pages)
            rows = self._to_device(arena_pages.astype(np.int64))
            staged = staging.view(torch.int64).view(count, -1)
            self._pages.index_copy_(0, rows, staged)
            return self._streams.copy_event()

    def _stage_runs(
        self, source: torch.Tensor, staging: torch.Tensor, host_pages: NDArray[np.int64]
    ) -> None:
        cuts = np.flatnonzero(np.diff(host_pages) != 1) + 1
        for run in np.split(np.arange(len(host_pages)), cuts):
            begin, size = int(run[0]) * self._page_bytes, len(run) * self._page_bytes
            first = int(host_pages[run[0]]) * self._page_bytes
            staging[begin : begin + size].copy_(source[first : first + size], non_blocking=True)

    def _read_back(self, slot: _Slot, arena_pages: NDArray[np.int32]) -> StreamEvent:
        count = len(arena_pages)
        staged = slot.staging[: count * self._page_bytes].view(torch.int64).view(count, -1)
        with self._streams.on_copy_stream():
            rows = self._to_device(arena_pages.astype(np.int64))
            torch.index_select(self._pages, 0, rows, out=staged)
            host = slot.host[: count * self._page_bytes]
            host.copy_(staged.view(-1).view(torch.uint8), non_blocking=True)
            return self._streams.copy_event()

    # --- memory ---

    def _new_slot(self) -> _Slot:
        num_bytes = self._slot_pages * self._page_bytes
        staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return _Slot(self._host_tensor(num_bytes), staging)

    def _host_tensor(self, num_bytes: int) -> torch.Tensor:
        pinned = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)
