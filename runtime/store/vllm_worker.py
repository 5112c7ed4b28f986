"""The workers' half: moves blocks between the engine's pages and the store.

Loads run on threads of their own and copy block by block; each can be given up between two blocks,
so a store that hangs never writes into pages that the engine uses for something else by then. Saves
copy out of the pages before the step ends, and the store is spoken to later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError
from runtime.store.kv_blocks import ABSENT, KvBlocks
from runtime.store.tensor_staging import CopyEvent, Staging, StagingPool
from runtime.store.vllm_counts import Counts
from runtime.store.vllm_guard import GuardedStore
from runtime.store.vllm_load import BlockLoad, BlockWriter
from runtime.store.vllm_orders import LoadOrder, Pages, RankIdentity, SaveOrder, StepOrders
from runtime.store.vllm_settings import ConnectorSettings

logger = logging.getLogger("vllm.ptstore")

IDLE_WAIT_S = 0.001
LATE_GRACE_S = 0.1  # for a store that keeps its deadlines, to end a load itself
CHUNKS = 4  # of the staging pool, so that one save is copied while another is stored
LOAD_THREADS = 4
# Why a save that fell short is not tried again for a request.
FINAL_REASONS = ("full", "quota", "orphan", "size")


@dataclass(slots=True, eq=False)
class _Request:
    """What a worker knows of a request.

    Attributes:
        keys: Of its blocks.
        tenant: Tag of its salt.
        pages: Of blocks that were ordered to be saved, by position.
        unsaved: First block that was ordered and not kept; None: none.
        is_given_up: Whether nothing more of it is saved.
    """

    keys: list[bytes] = field(default_factory=list)
    tenant: bytes = b""
    pages: dict[int, Pages] = field(default_factory=dict)
    unsaved: int | None = None
    is_given_up: bool = False


class StoreWorker:
    """Carries out the scheduler's orders on one worker.

    Args:
        settings: Of the connector.
        store: Where blocks come from and go to.
        counts: Told what happens.
        blocks: The engine's pages.
        staging: Buffers for saves, and for loads of a device.
        identity: What this worker holds.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        store: GuardedStore,
        counts: Counts,
        *,
        blocks: KvBlocks,
        staging: StagingPool,
        identity: RankIdentity,
    ) -> None:
        self._settings = settings
        self._store = store
        self._counts = counts
        self._blocks = blocks
        self._staging = staging
        self._identity = identity
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, BlockLoad] = {}
        self._failed_pages: set[int] = set()
        self._sent: set[str] = set()
        self._changed = threading.Condition()
        self._loader = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="ptstore-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="ptstore-save")

    def start_loads(self, orders: StepOrders) -> None:
        """Take in the step's keys and start its loads."""
        if self._identity in orders.identities:
            part = orders.identities.index(self._identity)
            for chain in orders.chains:
                request = self._requests.setdefault(chain.request_id, _Request())
                request.keys[chain.start :] = chain.keys[part]
                request.tenant = chain.tenant
        writer = BlockWriter(self._blocks, self._staging) if orders.loads else None
        for order in orders.loads:
            assert writer is not None
            self._start_load(order, writer)

    def save(self, orders: StepOrders) -> None:
        """Copy the step's full blocks out of their pages, and have them stored."""
        for order in orders.saves:
            request = self._requests.get(order.request_id)
            if request is not None:
                self._save(request, order)
            if order.is_last:
                self._sent.add(order.request_id)

    def poll(self, finished: Iterable[str], *, is_idle: bool) -> tuple[set[str], set[str]]:
        """Requests whose pages are no longer read, and requests whose load ended.

        Args:
            finished: Requests that ended on the engine.
            is_idle: Whether a short wait for a load costs nobody a step.
        """
        if is_idle and self._loads:
            with self._changed:
                if not any(load.is_over for load in self._loads.values()):
                    self._changed.wait(IDLE_WAIT_S)
        received = set()
        for request_id, load in list(self._loads.items()):
            if load.is_over or load.is_late(LATE_GRACE_S):
                del self._loads[request_id]
                received.add(request_id)
                self._end_load(load)
        for request_id in finished:
            self._requests.pop(request_id, None)
        sent, self._sent = self._sent, set()
        return sent, received

    def take_failed_pages(self) -> set[int]:
        """Pages that a load promised and did not fill, since the last call."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def drain(self) -> None:
        """Wait until what was copied out so far was handed to the store."""
        self._saver.submit(lambda: None).result()

    def close(self) -> None:
        """Let running copies end, store what was copied, start nothing more."""
        for load in self._loads.values():
            load.give_up()
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._saver.shutdown(wait=True, cancel_futures=self._store.is_suspended)

    def _start_load(self, order: LoadOrder, writer: BlockWriter) -> None:
        request = self._requests.get(order.request_id, _Request())
        keys = tuple(request.keys[order.first : order.first + len(order.pages)])
        deadline = Deadline.after(self._settings.deadline_s)
        load = BlockLoad(keys, order.pages, deadline, writer, request.tenant)
        self._loads[order.request_id] = load
        self._counts.add("loads")
        self._loader.submit(self._run_load, load).add_done_callback(self._note_fault)

    def _run_load(self, load: BlockLoad) -> None:
        try:
            load.run(self._store)
        finally:
            load.end()
            with self._changed:
                self._changed.notify_all()

    def _end_load(self, load: BlockLoad) -> None:
        if not load.is_over:
            self._counts.add("loads_late")
            self._store.suspend("load", "out of time")
        done = load.give_up()
        failed = load.pages[done:]
        self._failed_pages.update(p for pages in failed for p in pages if p != ABSENT)
        self._counts.add("loaded_blocks", done)
        self._counts.add("loaded_bytes", done * self._blocks.block_bytes)
        self._counts.add("load_seconds", load.taken_s)
        self._counts.add("load_failed_blocks", len(failed))

    def _save(self, request: _Request, order: SaveOrder) -> None:
        if order.is_fresh:
            request.pages.clear()
            request.unsaved, request.is_given_up = None, False
        request.pages.update(enumerate(order.pages, order.first))
        end = order.first + len(order.pages)
        if request.is_given_up or end > len(request.keys):
            return
        first = order.first if request.unsaved is None else request.unsaved
        if self._store.is_suspended:
            request.unsaved = first
            self._counts.add("unsaved_error", len(order.pages))
            return
        request.unsaved = None
        most = max(1, self._staging.capacity_bytes // CHUNKS // self._blocks.block_bytes)
        while first < end:
            count = min(most, end - first)
            if not self._copy_out(request, first, count):
                request.unsaved = first
                self._counts.add("unsaved_staging", end - first)
                return
            first += count

    def _copy_out(self, request: _Request, first: int, count: int) -> bool:
        """Copy blocks out and have them stored; False if there is no buffer for them."""
        page_ids = [p for b in range(first, first + count) for p in request.pages[b]]
        try:
            loan = self._staging.take(count * self._blocks.block_bytes, Deadline.after(0))
        except StoreError:
            return False
        event: CopyEvent | None = None
        if self._blocks.is_host:
            self._blocks.gather(page_ids, loan.view)
        else:
            # On the engine's stream: the pages may be overwritten as soon as it goes on.
            rows = self._blocks.gather_on_device(page_ids)
            event = self._staging.device.to_host(rows, loan.view)
        keys = tuple(request.keys[: first + count])
        task = self._saver.submit(self._store_blocks, request, keys, first, loan, event)
        task.add_done_callback(self._note_fault)
        return True

    def _note_fault(self, task: Future[None]) -> None:
        """A thread's fault is a miss for the engine, and a line for its operator."""
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._counts.add("store_errors")
            logger.error("prefix store: %s while moving blocks", type(fault).__name__)

    def _store_blocks(
        self,
        request: _Request,
        keys: Sequence[bytes],
        first: int,
        loan: Staging,
        event: CopyEvent | None,
    ) -> None:
        deadline = Deadline.after(self._settings.deadline_s)
        size = self._blocks.block_bytes
        try:
            if event is not None:
                event.wait()
            views = _cut(loan.view, size, len(keys) - first)
            stored, reason = self._store.put(
                keys, views, first=first, deadline_s=deadline.left_s(), tenant=request.tenant
            )
        finally:
            self._staging.give_back(loan)
        self._counts.add("saved_blocks", stored)
        self._counts.add("saved_bytes", stored * size)
        self._counts.add("save_seconds", self._settings.deadline_s - deadline.left_s())
        short = len(keys) - first - stored
        if short and reason != "exists":
            name = f"unsaved_{reason}"
            self._counts.add(name if reason in SHORT_REASONS else "unsaved_error", short)
            if reason == "orphan" and request.unsaved is not None:
                pass  # of blocks that are going to be saved again
            elif reason in FINAL_REASONS:
                request.is_given_up = True
            elif reason != "busy":
                earlier = request.unsaved
                request.unsaved = first + stored if earlier is None else min(earlier, first)


SHORT_REASONS = ("busy", "full", "late", "quota", "orphan", "size")


def _cut(buffer: NDArray[np.uint8], size: int, count: int) -> list[Any]:
    """Consecutive pieces of one size."""
    return [buffer[i * size : (i + 1) * size].data for i in range(count)]
