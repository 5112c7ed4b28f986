"""One load: stored blocks into the engine's pages, to be given up between any two of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.store.deadline import Deadline
from runtime.store.kv_blocks import KvBlocks
from runtime.store.tensor_staging import StagingPool
from runtime.store.vllm_guard import GuardedStore
from runtime.store.vllm_orders import Pages

TRANSFER_BYTES = 16 << 20


class BlockWriter:
    """Writes stored blocks into pages; made on the engine's thread, used on another.

    On a device the copies run on the staging device's own stream, after what the engine had queued
    when the writer was made: kernels that still read the pages' former contents come first.

    Args:
        blocks: The engine's pages.
        staging: Pinned buffers of the pages' device.
    """

    def __init__(self, blocks: KvBlocks, staging: StagingPool) -> None:
        self._blocks = blocks
        self._staging = staging
        self._queued: Any = None
        if not blocks.is_host:
            import torch

            event: Any = torch.cuda.Event  # untyped in torch
            self._queued = event()
            self._queued.record(torch.cuda.current_stream(blocks.device))

    @property
    def block_bytes(self) -> int:
        """Bytes of a store block."""
        return self._blocks.block_bytes

    @property
    def chunk_blocks(self) -> int:
        """Blocks to write at once: one where that is a copy, more where it is a transfer."""
        return 1 if self._blocks.is_host else max(1, TRANSFER_BYTES // self.block_bytes)

    def write(
        self, views: Sequence[memoryview], blocks: Sequence[Pages], deadline: Deadline
    ) -> None:
        """Write some blocks, and return once they are there."""
        if self._blocks.is_host:
            for view, pages in zip(views, blocks, strict=True):
                self._blocks.scatter(view, pages)
            return
        import torch

        size = self.block_bytes
        page_ids = [page_id for pages in blocks for page_id in pages]
        loan = self._staging.take(len(blocks) * size, deadline)
        try:
            for i, view in enumerate(views):
                loan.view[i * size : (i + 1) * size] = np.frombuffer(view, np.uint8)
            stream = self._staging.device.stream  # type: ignore[attr-defined]
            with torch.cuda.stream(stream):
                self._queued.wait(stream)
                rows = torch.from_numpy(loan.view).to(self._blocks.device, non_blocking=True)
                self._blocks.scatter_on_device(
                    rows.view(len(page_ids), self._blocks.page_bytes), page_ids
                )
            stream.synchronize()
        finally:
            self._staging.give_back(loan)


class BlockLoad:
    """Loads the blocks of some keys into pages.

    Args:
        keys: Of the blocks.
        pages: Of each block.
        deadline: Of the whole load.
        writer: Writes blocks.
        tenant: Tag of the tenant that reads.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Pages],
        deadline: Deadline,
        writer: BlockWriter,
        tenant: bytes = b"",
    ) -> None:
        self._tenant = tenant
        self.pages = pages
        self._keys = keys
        self._deadline = deadline
        self._writer = writer
        self._lock = threading.Lock()
        self._done = 0
        self._is_given_up = False
        self._start_s = time.monotonic()
        self._end_s: float | None = None

    def run(self, store: GuardedStore) -> None:
        """Copy leading blocks until one is missing, is not whole, or time is over."""
        if self._is_given_up or self._deadline.is_over or len(self._keys) < len(self.pages):
            return
        step = self._writer.chunk_blocks
        left_s = self._deadline.left_s()
        with store.load(self._keys, left_s, tenant=self._tenant) as found:
            if found is None:
                return
            views = found.views
            whole = [view for view in views if view.nbytes == self._writer.block_bytes]
            count = min(len(whole) if len(whole) == len(views) else 0, len(self.pages))
            for start in range(0, count, step):
                end = min(start + step, count)
                with self._lock:
                    if self._is_given_up or self._deadline.is_over:
                        return
                    self._writer.write(views[start:end], self.pages[start:end], self._deadline)
                    self._done = end
            with self._lock:
                # Held longer than the store waits for a reader, a block may be another by now.
                self._done = min(self._done, found.still_valid())

    def end(self) -> None:
        """Nothing more will be written."""
        self._end_s = time.monotonic()

    def give_up(self) -> int:
        """Have nothing more written, and tell how many leading blocks are there."""
        with self._lock:
            self._is_given_up = True
            return self._done

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written, by itself."""
        return self._end_s is not None

    def is_late(self, grace_s: float) -> bool:
        """Whether its deadline is over, and that long ago."""
        return self._deadline.at_s + grace_s <= time.monotonic()

    @property
    def taken_s(self) -> float:
        """Seconds from its order to its end, or until now."""
        return (self._end_s or time.monotonic()) - self._start_s
