"""Moves planes and tables beside the computation; widths change at step boundaries only.

A step of the engine:

    orders = mover.boundary(step)     poll copies and fences, commit, publish tables, start copies
    ... build the step and enqueue its kernels; they read mover.tables (or the device's mirror) ...
    mover.step_built(step)            record a fence behind them
    mover.plan(orders, step=step + 1) whenever the planner has spoken

Nothing here waits for a copy or a kernel. Which planes move and when is decided by
policies/weight_page_table.py; the bytes come from runtime/page_parent.py. A drop moves no bytes:
the host has them. All calls come from the engine's one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies.orders import PrecisionOrders
from policies.weight_page_history import Event
from policies.weight_page_orders import PageOrders, PartCopies, PartList
from policies.weight_page_table import MovementRules, WeightPageTable
from runtime.page_arena import ArenaUse, PageArena
from runtime.page_devices import CopyDevice, CopyJob, Fence, JobEnd
from runtime.page_parent import HostParent
from runtime.page_tables import PageTables

DEFAULT_JOB_BYTES: Final = 4 << 20

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MovementReport:
    """What has moved and what has gone wrong since the start.

    Attributes:
        moved_bytes: Bytes copied to the device and taken into use or ready for it.
        wasted_bytes: Bytes of copies that failed or were not wanted any more.
        freed_bytes: Bytes that have really gone back to the arena, in whole pages.
        drops, raises: Blocks whose committed width went down, up.
        wanted_again: Planes and tables that a raise found still on the device.
        jobs: Copies put together for the device.
        blocks_by_reason: How many blocks met each reason (see policies/weight_page_faults.py).
        errors: The last few errors of the device, in its words.
        pinned: Blocks that move no more after failures.
        arena: Who holds the arena now.
    """

    moved_bytes: int
    wasted_bytes: int
    freed_bytes: int
    drops: int
    raises: int
    wanted_again: int
    jobs: int
    blocks_by_reason: dict[str, int]
    errors: tuple[str, ...]
    pinned: tuple[int, ...]
    arena: ArenaUse


class PageMover:
    """Joins the weight page table, the arena, the host parent and a device.

    Attributes:
        table: The state machine (the same as in the twin).
        tables: What kernels read, on the host.
    """

    def __init__(
        self,
        parent: HostParent,
        arena: PageArena,
        device: CopyDevice,
        bits: Ints,
        *,
        lowest: Ints | None = None,
        highest: Ints | None = None,
        rules: MovementRules | None = None,
        job_bytes: int = DEFAULT_JOB_BYTES,
        history: Callable[[Event], None] | None = None,
    ) -> None:
        """Reserve pages, fill them, publish the tables; waits until the weights are in place.

        Args:
            parent: All blocks, stored.
            arena: With the page size of the parent.
            device: Holds the arena.
            bits: [n], first widths.
            lowest, highest: [n], qmin and qmax; the parent's range if None.
            rules: See MovementRules.
            job_bytes: Neighbouring parts are gathered into copies of about this size.
            history: See WeightPageTable; give the arena the same one.

        Raises:
            ValueError: If the weights do not fit, or sizes do not match.
        """
        if parent.page_bytes != arena.page_bytes:
            raise ValueError(
                f"the parent's pages have {parent.page_bytes} bytes, the arena's {arena.page_bytes}"
            )
        self._parent, self._arena, self._device = parent, arena, device
        self._job_pages = max(1, min(job_bytes, device.largest_job_bytes) // arena.page_bytes)
        self.table = WeightPageTable(
            parent.parts,
            bits,
            ledger=arena.ledger,
            lowest=lowest,
            highest=highest,
            rules=rules,
            checksum=parent.checksum,
            host_address=parent.first_page * parent.page_bytes,
            history=history,
        )
        planes, tables = np.split(parent.parts.pages, [parent.parts.parent_bits], axis=1)
        self.tables = PageTables.empty(
            parent.parts.num_blocks,
            parent_bits=parent.parts.parent_bits,
            min_bits=parent.parts.min_bits,
            plane_pages=int(planes.max()),
            table_pages=int(tables.max()),
            page_bytes=arena.page_bytes,
        )
        self._queue: deque[CopyJob] = deque()
        self._under_way: dict[int, CopyJob] = {}
        self._fences: list[tuple[int, Fence]] = []
        self._next_job_id = 0
        self._moved_bytes = self._wasted_bytes = 0
        self._errors: deque[str] = deque(maxlen=8)
        self._load()

    def plan(self, orders: PrecisionOrders, *, step: int) -> None:
        """Carry out a planner's orders: drops commit at the next boundary, raises are copied.

        Args:
            orders: Nothing happens if both lists are empty.
            step: Step that is built next.

        Raises:
            ValueError: See WeightPageTable.open_plan.
        """
        blocks = np.concatenate([orders.drops.blocks, orders.raises.blocks])
        bits = np.concatenate([orders.drops.bits, orders.raises.bits])
        if len(blocks):
            self._carry_out(self.table.open_plan(orders.plan_id, blocks, bits, step=step), step)

    def cancel_raises(self, *, step: int, reason: str = "pressure") -> None:
        """Give up every raise under way, because memory is needed elsewhere."""
        self._carry_out(self.table.cancel(reason=reason, step=step), step)

    def boundary(self, step: int) -> PageOrders:
        """Between two steps; see the module text.

        Args:
            step: The step that is built next.

        Returns:
            What has just been carried out: blocks with new widths, pages freed.

        Raises:
            RuntimeError: If boundaries go backwards.
        """
        for end in self._device.ended():
            self._report_end(end, step)
        self._poll_fences()
        orders = self.table.boundary(step)
        self._carry_out(orders, step)
        return orders

    def step_built(self, step: int, *, blocks: Ints | None = None) -> None:
        """The kernels of a step are enqueued.

        Args:
            step: Above every earlier one.
            blocks: Blocks they read, for the history; all if None.
        """
        read = self.tables.bits if blocks is None else self.tables.bits[blocks]
        self.table.step_built(step, blocks=blocks, bits=read.astype(np.int64))
        self._fences.append((step, self._device.fence()))

    @property
    def at_rest(self) -> bool:
        """Whether no plan is open, nothing is copied and nothing waits for its release."""
        return self.table.at_rest and not self._queue and not self._under_way

    def report(self) -> MovementReport:
        """Bytes moved and freed, failures by reason."""
        table = self.table
        return MovementReport(
            moved_bytes=self._moved_bytes,
            wasted_bytes=self._wasted_bytes,
            freed_bytes=table.states.freed_pages * self._arena.page_bytes,
            drops=table.widths.drops,
            raises=table.widths.raises,
            wanted_again=table.states.parts_wanted_again,
            jobs=self._next_job_id,
            blocks_by_reason={name: n for name, n in table.faults.counts.items() if n},
            errors=tuple(self._errors),
            pinned=tuple(np.flatnonzero(table.faults.pinned).tolist()),
            arena=self._arena.use(),
        )

    @property
    def device(self) -> CopyDevice:
        """What copies the pages."""
        return self._device

    def close(self) -> None:
        """Stop the device."""
        self._device.close()

    # --- orders ---

    def _load(self) -> None:
        self._device.attach(self._parent.pages, self.tables)
        resident = self.table.resident_copies()
        for job in self._jobs_of(resident):
            self._device.copy_now(job)
        self._next_job_id = 0
        self.tables.write_parts(resident)
        self.tables.bits[:] = self.table.bits
        self._device.publish(np.arange(self.tables.num_blocks))

    def _carry_out(self, orders: PageOrders, step: int) -> None:
        self._publish(orders)
        self._cancel(orders.cancels, step)
        self.table.copies_queued(orders.copies.blocks, orders.copies.parts)
        self._queue.extend(self._jobs_of(orders.copies))
        while self._queue and self._device.start(self._queue[0]):
            job = self._queue.popleft()
            self._under_way[job.job_id] = job
            self.table.copies_enqueued(job.blocks, job.parts, step=step)

    def _publish(self, orders: PageOrders) -> None:
        if not len(orders.blocks) and not len(orders.freed):
            return
        self.tables.clear_parts(orders.freed)
        if self.table.rules.tables == "all":  # the lists of a drop are there already
            renewed = orders.blocks[orders.bits > self.tables.bits[orders.blocks]]
        else:
            renewed = orders.blocks
        self.tables.write_parts(self.table.committed_copies(renewed))
        self.tables.bits[orders.blocks] = orders.bits
        self._device.publish(np.union1d(orders.blocks, orders.freed.blocks))

    def _cancel(self, cancels: PartList, step: int) -> None:
        """Drop unwanted copies that still wait here; ask the device to drop whole jobs."""
        if not len(cancels):
            return
        draining = self.table.states.draining
        queued, self._queue = self._queue, deque()
        for job in queued:
            unwanted = draining[job.blocks, job.parts]
            self.table.copies_failed(job.blocks[unwanted], job.parts[unwanted], step=step)
            if not unwanted.all():
                self._queue.append(self._without(job, unwanted))
        for job in self._under_way.values():
            if draining[job.blocks, job.parts].all():
                self._device.cancel(job)

    def _report_end(self, end: JobEnd, step: int) -> None:
        job = self._under_way.pop(end.job.job_id)
        if end.error is None:
            landed = self.table.copies_landed(
                job.blocks, job.parts, step=step, checksums=end.checksums
            )
        else:
            if not self.table.states.draining[job.blocks, job.parts].all():
                self._errors.append(f"copy {job.job_id}: {end.error}")
            self.table.copies_failed(job.blocks, job.parts, step=step)
            landed = np.zeros(len(job.blocks), np.bool_)
        self._moved_bytes += int(job.stream_bytes[landed].sum())
        self._wasted_bytes += int(job.stream_bytes[~landed].sum())

    def _poll_fences(self) -> None:
        waiting = []
        for step, fence in self._fences:
            if fence.passed():
                self.table.step_finished(step)
            else:
                waiting.append((step, fence))
        self._fences = waiting

    # --- jobs ---

    def _jobs_of(self, copies: PartCopies) -> Iterator[CopyJob]:
        """Parts gathered, in order, into jobs of at most job_bytes (or of one part)."""
        counts = np.diff(copies.first)
        begin, pages = 0, 0
        for part, count in enumerate(counts.tolist()):
            if part > begin and pages + count > self._job_pages:
                yield self._job(copies, np.arange(begin, part))
                begin, pages = part, 0
            pages += count
        if begin < len(copies):
            yield self._job(copies, np.arange(begin, len(copies)))

    def _job(self, copies: PartCopies, chosen: Ints) -> CopyJob:
        """One job, its parts in the order of the host's pages."""
        host_page = self._parent.first_page[copies.blocks[chosen], copies.parts[chosen]]
        chosen = chosen[np.argsort(host_page, kind="stable")]
        blocks, parts = copies.blocks[chosen], copies.parts[chosen]
        counts = np.diff(copies.first)[chosen]
        first = np.concatenate([[0], np.cumsum(counts)])
        within = np.arange(first[-1]) - np.repeat(first[:-1], counts)
        job = CopyJob(
            job_id=self._next_job_id,
            blocks=blocks,
            parts=parts,
            stream_bytes=self._parent.stream_bytes[blocks, parts],
            first=first,
            host_pages=within + np.repeat(self._parent.first_page[blocks, parts], counts),
            arena_pages=copies.pages[within + np.repeat(copies.first[chosen], counts)],
        )
        self._next_job_id += 1
        return job

    def _without(self, job: CopyJob, unwanted: NDArray[np.bool_]) -> CopyJob:
        """A job that still waits, less some of its parts."""
        rest = PartCopies(job.blocks, job.parts, job.first, job.arena_pages)
        return self._job(rest, np.flatnonzero(~unwanted))
