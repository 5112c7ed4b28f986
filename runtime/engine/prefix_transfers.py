"""One load or one save of a sequence's blocks, to be given up between any two of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine.prefix_guard import StoreGuard
from runtime.engine.prefix_pages import BlockCopies
from runtime.model.kv_cache import PageHold
from runtime.store.deadline import Deadline
from runtime.store.found import Found

PageTable = NDArray[np.int32]


class Transfer:
    """What load and save have in common.

    Attributes:
        sequence: Number of the sequence.
        first: Position of its first block.
        pages: [blocks, pages of a block] int32 ids.
        hold: Keeps them in the arena.
        reason: Why not all blocks; empty if all.
        done: Leading blocks that are where they were ordered to, checked.
        is_over: Whether it has ended by itself.
        is_given_up: Whether it touches no page any more though it has not ended by itself.
    """

    def __init__(
        self,
        sequence: int,
        keys: tuple[bytes, ...],
        first: int,
        *,
        pages: PageTable,
        hold: PageHold | None,
        tenant: bytes,
        deadline_s: float,
    ) -> None:
        """Order blocks ``first`` to ``len(keys) - 1``.

        Args:
            sequence: Its number.
            keys: The chain, root first, up to the last block.
            first: Position of the first block.
            pages: Of the blocks.
            hold: Of the pages; None: the caller keeps them.
            tenant: Tag of the tenant.
            deadline_s: Seconds from now until it is given up.
        """
        self.sequence, self.first, self.pages, self.hold = sequence, first, pages, hold
        self.reason = ""
        self.done = 0
        self.is_over = False
        self._keys, self._tenant = keys, tenant
        self._start_s = time.monotonic()
        self._end_s: float | None = None
        self._deadline = Deadline.after(deadline_s)
        self._lock = threading.Lock()
        self.is_given_up = False

    @property
    def blocks(self) -> int:
        """Blocks ordered."""
        return len(self.pages)

    @property
    def taken_s(self) -> float:
        """Seconds from its order to its end, or until now."""
        return (self._end_s or time.monotonic()) - self._start_s

    def is_late(self, grace_s: float) -> bool:
        """Whether its deadline was that long ago and it has not ended by itself."""
        return not self.is_over and time.monotonic() > self._deadline.at_s + grace_s

    def give_up(self, reason: str) -> None:
        """Have no page touched any more; returns when that is so."""
        with self._lock:
            if not self.is_over and not self.is_given_up:
                self.is_given_up, self.reason = True, reason

    def run(self, guard: StoreGuard, copies: BlockCopies) -> None:
        """Do it, on whatever thread; never raises."""
        try:
            self._run(guard, copies)
        except Exception as error:  # a fault of ours costs blocks, not the thread
            guard.fail("move blocks", type(error).__name__)
            self._fall_short("unavailable")
        finally:
            with self._lock:
                if self.done < self.blocks and not self.reason:
                    self.reason = "unavailable"  # the guard has kept the error
                self._end_s = time.monotonic()
                self.is_over = True

    def _run(self, guard: StoreGuard, copies: BlockCopies) -> None:
        raise NotImplementedError

    def _fall_short(self, reason: str) -> None:
        with self._lock:
            if not self.is_given_up:
                self.reason = reason

    def _may_go_on(self) -> bool:
        """Asked under the lock, before every block."""
        if not self.is_given_up and self._deadline.is_over:
            self.reason = "late"
        return not self.is_given_up and not self._deadline.is_over


class BlockLoad(Transfer):
    """Stored blocks into pages."""

    def __init__(self, *args: Any, category: int = 0, **options: Any) -> None:
        """See ``Transfer``; ``category``: kind of request, for the store's eviction."""
        super().__init__(*args, **options)
        self._category = category

    def _run(self, guard: StoreGuard, copies: BlockCopies) -> None:
        with self._lock:
            if not self._may_go_on():
                return
        found: Found | None = None
        with guard.call("load") as store:
            if store is None:
                self._fall_short("paused")
                return
            found = store.load(
                self._keys[self.first :],
                deadline_s=self._deadline.left_s(),
                category=self._category,
                tenant=self._tenant,
                is_checked=False,  # the copies are
            )
        if found is None or (not found.leading and guard.is_paused):
            self._fall_short("unavailable")
            return
        with found:

            def copy(position: int, view: memoryview) -> int | None:
                with self._lock:
                    if position >= self.blocks or not self._may_go_on():
                        return None
                    self.done = position  # the copies before were found right
                    if view.nbytes != self.pages.shape[1] * copies.page_bytes:
                        return None
                    return copies.write(view, self.pages[position])

            whole = found.copy_each(copy)
            with self._lock:
                if not self.is_given_up:
                    self.done = whole
                    if whole < self.blocks and not self.reason:
                        self.reason = "missing" if whole == found.leading else "broken"


class BlockSave(Transfer):
    """Pages into the store.

    Attributes:
        stored: Blocks that were new to the store.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """See ``Transfer``."""
        super().__init__(*args, **options)
        self.stored = 0

    def _run(self, guard: StoreGuard, copies: BlockCopies) -> None:
        with self._lock:
            if not self._may_go_on():  # it has waited too long, which is no fault of the store
                return
        block_bytes = self.pages.shape[1] * copies.page_bytes
        stop = len(self._keys)
        at = self.first
        with guard.call("save") as store:
            if store is None:
                self._fall_short("paused")
            while store is not None and at < stop:  # once, unless blocks amidst are known
                with store.reserve(
                    self._keys,
                    [block_bytes] * (stop - at),
                    first=at,
                    tenant=self._tenant,
                    deadline_s=self._deadline.left_s(),
                ) as room:
                    sums = self._fill(room.buffers, room.start - self.first, copies)
                    count = room.commit(sums, deadline_s=self._deadline.left_s()) if sums else 0
                    self.stored += count
                    if room.buffers or room.reason == "exists":
                        at = room.start + count
                        self._reach(min(at, stop))
                    if count < len(room.buffers):
                        self._fall_short("unavailable" if room.is_unavailable else "late")
                        return
                    if room.reason and at < stop:
                        self._fall_short(room.reason)
                        return

    def _fill(self, buffers: Any, offset: int, copies: BlockCopies) -> list[int]:
        sums: list[int] = []
        for position, buffer in enumerate(buffers, offset):
            with self._lock:
                if not self._may_go_on():
                    break
                sums.append(copies.read(self.pages[position], buffer))
        return sums

    def _reach(self, position: int) -> None:
        with self._lock:
            if not self.is_given_up:
                self.done = position - self.first
