"""Blocks between the arena's pages and buffers of the store, with the checksum of what arrived."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.model.kv_cache import LEFT_BEHIND
from runtime.page_arena import HostBuffer, PageArena
from runtime.store.blocks import checksum

# Pieces are checked while they are still in the processor's cache. Runs of neighbouring pages are
# copied as they lie, from so many bytes a run on; what is scattered more finely goes all at once,
# which is slower by the byte and saves a call for each page.
PIECE_BYTES = 128 << 10
SCATTER_BYTES = 512 << 10
LEAST_RUN_BYTES = 16 << 10

PageIds = NDArray[np.int32]


class BlockCopies(Protocol):
    """Copies whole pages, in the order of their ids; used by one thread at a time.

    Attributes:
        page_bytes: Bytes of a page.
    """

    page_bytes: int

    def order(self) -> None:
        """Called on the engine's thread: later copies come after what its device has queued."""

    def write(self, source: memoryview, page_ids: PageIds) -> int:
        """Fill pages; CRC32C of the pages as they are then.

        Args:
            source: ``len(page_ids) * page_bytes`` bytes.
            page_ids: [n]; a page that is ``LEFT_BEHIND`` is left out, and its bytes are checked
                where they lie.
        """

    def read(self, page_ids: PageIds, destination: memoryview) -> int:
        """Copy pages, none left behind, into a buffer; CRC32C of the buffer."""


def block_copies(arena: PageArena) -> BlockCopies:
    """Copies for an arena in host memory or on a device."""
    if isinstance(arena.buffer, HostBuffer):
        return HostCopies(arena.buffer.array)
    return DeviceCopies(arena.buffer.array)


class HostCopies:
    """Pages in host memory: one copy each way, no buffer between."""

    def __init__(self, pages: NDArray[np.uint8]) -> None:
        """Copy from and to ``pages``: [num_pages, page_bytes] uint8."""
        self._pages, self.page_bytes = pages, pages.shape[1]
        self._piece = max(1, PIECE_BYTES // self.page_bytes)
        self._scatter = max(1, SCATTER_BYTES // self.page_bytes)

    def order(self) -> None:
        """Nothing to wait for: the engine's writes are done when it orders a copy."""

    def write(self, source: memoryview, page_ids: PageIds) -> int:
        """See ``BlockCopies``."""
        rows = _rows(source, len(page_ids))
        if (page_ids == LEFT_BEHIND).any():
            return self._write_present(rows, page_ids)
        runs = _neighbours(page_ids)
        if len(runs) * LEAST_RUN_BYTES > len(page_ids) * self.page_bytes:
            return self._write_scattered(rows, page_ids)
        total = at = 0
        for first, stop in runs:
            for start in range(first, stop, self._piece):
                part = self._pages[start : min(start + self._piece, stop)]
                part[:] = rows[at : at + len(part)]
                at += len(part)
                total = checksum(part, total)
        return total

    def read(self, page_ids: PageIds, destination: memoryview) -> int:
        """See ``BlockCopies``."""
        rows = _rows(destination, len(page_ids))
        total = 0
        for start in range(0, len(page_ids), self._scatter):
            part = rows[start : start + self._scatter]
            # "clip": with "raise", numpy copies through a buffer of its own.
            np.take(self._pages, page_ids[start : start + self._scatter], 0, out=part, mode="clip")
            total = checksum(part, total)
        return total

    def _write_scattered(self, rows: NDArray[np.uint8], page_ids: PageIds) -> int:
        total = 0
        for start in range(0, len(page_ids), self._scatter):
            ids = page_ids[start : start + self._scatter]
            self._pages[ids] = rows[start : start + self._scatter]
            for first, stop in _neighbours(ids):
                total = checksum(self._pages[first:stop], total)
        return total

    def _write_present(self, rows: NDArray[np.uint8], page_ids: PageIds) -> int:
        total = 0
        for row, page_id in zip(rows, page_ids.tolist(), strict=True):
            arrived = row
            if page_id != LEFT_BEHIND:
                arrived = self._pages[page_id]
                arrived[:] = row
            total = checksum(arrived, total)
        return total


class DeviceCopies:
    """Pages in a device's memory, through one pinned buffer and on a stream of their own.

    The checksum is that of the pinned buffer: a bus that changes bytes is the driver's to report.
    """

    def __init__(self, pages: Any) -> None:
        """Copy from and to ``pages``: [num_pages, page_bytes] uint8, a torch tensor."""
        import torch

        self._torch, self._pages, self.page_bytes = torch, pages, int(pages.shape[1])
        self._is_cuda = pages.device.type == "cuda"
        new_stream: Any = torch.cuda.Stream  # untyped in torch
        self._stream: Any = new_stream(pages.device) if self._is_cuda else None
        self._staging: Any = None

    def order(self) -> None:
        """See ``BlockCopies``."""
        if self._is_cuda:
            current = self._torch.cuda.current_stream(self._pages.device)
            self._stream.wait_stream(current)

    def write(self, source: memoryview, page_ids: PageIds) -> int:
        """See ``BlockCopies``; returns when the pages are there."""
        rows = self._rows(len(page_ids))
        rows.numpy()[:] = _rows(source, len(page_ids))
        total = checksum(rows.numpy())
        kept = np.flatnonzero(page_ids != LEFT_BEHIND)
        with self._queue():
            moved = rows.to(self._pages.device, non_blocking=True)
            if len(kept) < len(page_ids):
                moved = moved.index_select(0, self._index(kept))
            self._pages.index_copy_(0, self._index(page_ids[kept]), moved)
        return total

    def read(self, page_ids: PageIds, destination: memoryview) -> int:
        """See ``BlockCopies``."""
        rows = self._rows(len(page_ids))
        with self._queue():
            taken = self._pages.index_select(0, self._index(page_ids))
            rows.copy_(taken, non_blocking=True)
        _rows(destination, len(page_ids))[:] = rows.numpy()
        return checksum(destination)

    def _rows(self, count: int) -> Any:
        if self._staging is None or len(self._staging) < count:
            self._staging = self._torch.empty(
                (count, self.page_bytes),
                dtype=self._torch.uint8,
                pin_memory=self._is_cuda,
            )
        return self._staging[:count]

    def _index(self, page_ids: NDArray[Any]) -> Any:
        return self._torch.from_numpy(page_ids.astype(np.int64)).to(self._pages.device)

    def _queue(self) -> Any:
        return _Queue(self._torch, self._stream)


class _Queue:
    """Work on a stream, waited for at the end; without a stream, work that is done at once."""

    def __init__(self, torch: Any, stream: Any) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream) if stream is not None else None

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)
            self._stream.synchronize()


def _rows(buffer: memoryview, count: int) -> NDArray[np.uint8]:
    """A buffer as [count, page_bytes]."""
    return np.frombuffer(buffer, np.uint8).reshape(count, -1)


def _neighbours(page_ids: PageIds) -> list[tuple[int, int]]:
    """Runs of pages that lie one after the other: (first page, page after the last)."""
    firsts = [0, *(np.flatnonzero(np.diff(page_ids) != 1) + 1).tolist()]
    ids = page_ids.tolist()
    lengths = np.diff([*firsts, len(ids)]).tolist()
    return [(ids[at], ids[at] + length) for at, length in zip(firsts, lengths, strict=True)]
