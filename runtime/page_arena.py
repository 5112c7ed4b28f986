"""One arena of small pages that expert weights and the KV cache share.

    byte  0         page_bytes   2 * page_bytes              num_pages * page_bytes
          | page 0  | page 1     | ...                       |

A page freed by weights becomes a KV page without a copy, a map or an allocation. KV blocks and
planes are lists of pages, so nothing needs to be contiguous beyond one page and nothing is ever
compacted. Which page is whose is kept by policies/weight_page_ledger.py, the same in the twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_history import Event
from policies.weight_page_ledger import PageLedger

DEFAULT_PAGE_BYTES: Final = 32 * 1024
ALIGNMENT_BYTES: Final = 64


class PageBuffer(Protocol):
    """The bytes of an arena on some device."""

    @property
    def array(self) -> Any:
        """[num_pages, page_bytes] uint8: a numpy array or a torch tensor; its address is fixed."""

    @property
    def address(self) -> int:
        """Address of page 0 on the device."""


class HostBuffer:
    """Arena in host memory, aligned to 64 bytes."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        raw = np.zeros(num_pages * page_bytes + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        self._pages = raw[start : start + num_pages * page_bytes].reshape(num_pages, page_bytes)

    @property
    def array(self) -> NDArray[np.uint8]:
        """[num_pages, page_bytes] uint8."""
        return self._pages

    @property
    def address(self) -> int:
        """Address of page 0."""
        return self._pages.ctypes.data


class TorchBuffer:
    """Arena in device memory, held as one torch tensor.

    CuPy and raw kernels use the same memory through ``address``.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: str) -> None:
        import torch

        self._pages = torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)

    @property
    def array(self) -> Any:
        """[num_pages, page_bytes] uint8, on the device."""
        return self._pages

    @property
    def address(self) -> int:
        """Address of page 0 on the device."""
        return int(self._pages.data_ptr())


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """Who holds the arena.

    Attributes:
        page_bytes: Size of a page.
        num_pages: Pages in all; weights + kv + free.
        weight_pages: Pages of planes and tables, copies under way included.
        kv_pages: Pages of KV blocks.
        free_pages: Pages nobody holds.
        refused_kv: KV reservations that found too few free pages.
        most_kv_pages: The highest kv_pages so far.
    """

    page_bytes: int
    num_pages: int
    weight_pages: int
    kv_pages: int
    free_pages: int
    refused_kv: int
    most_kv_pages: int


class PageArena:
    """A page buffer with its ledger.

    Attributes:
        page_bytes: A power of two, >= 1 KiB.
        buffer: The bytes.
        ledger: Holders of the pages; the weight page table takes and gives here.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        page_bytes: int = DEFAULT_PAGE_BYTES,
        device: str = "cpu",
        history: Callable[[Event], None] | None = None,
    ) -> None:
        """Reserve the memory of all pages at once.

        Args:
            num_pages: >= 1.
            page_bytes: A power of two, >= 1024.
            device: "cpu", or a torch device such as "cuda:0".
            history: See PageLedger.

        Raises:
            ValueError: If a size is out of range.
        """
        if page_bytes < 1024 or page_bytes & (page_bytes - 1):
            raise ValueError(f"page_bytes must be a power of two >= 1024, not {page_bytes}")
        self.ledger = PageLedger(num_pages, history=history)
        self.page_bytes = page_bytes
        self.buffer: PageBuffer = (
            HostBuffer(num_pages, page_bytes)
            if device == "cpu"
            else TorchBuffer(num_pages, page_bytes, device)
        )
        self._most_kv_pages = 0

    @property
    def num_pages(self) -> int:
        """Size in pages."""
        return self.ledger.num_pages

    def pages_of(self, num_bytes: int) -> int:
        """Pages that hold ``num_bytes``, the last one padded."""
        return -(-num_bytes // self.page_bytes)

    def take_kv(self, num_blocks: int, block_bytes: int) -> NDArray[np.int32] | None:
        """Reserve KV blocks, all of them or none.

        Args:
            num_blocks: Blocks, >= 0.
            block_bytes: Bytes of one block; it gets whole pages.

        Returns:
            [num_blocks, pages per block] int32 page ids, or None (nothing has changed) if too few
            pages are free.

        Raises:
            ValueError: If block_bytes is not positive or num_blocks is negative.
        """
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be >= 1, not {block_bytes}")
        block_pages = self.pages_of(block_bytes)
        pages = self.ledger.take(num_blocks * block_pages, "kv")
        if pages is None:
            return None
        self._most_kv_pages = max(self._most_kv_pages, self.ledger.held_pages("kv"))
        return pages.reshape(num_blocks, block_pages)

    def give_kv(self, pages: NDArray[np.int32]) -> None:
        """Return pages of KV blocks, in any shape.

        Kernels already launched may still read them: what is written there next must be ordered
        behind those kernels. Devices of runtime/page_devices.py order their copies so.

        Raises:
            RuntimeError: If a page is not held by the KV cache.
        """
        self.ledger.give(pages.ravel(), "kv")

    def use(self) -> ArenaUse:
        """Who holds what now."""
        return ArenaUse(
            page_bytes=self.page_bytes,
            num_pages=self.num_pages,
            weight_pages=self.ledger.held_pages("weights"),
            kv_pages=self.ledger.held_pages("kv"),
            free_pages=self.ledger.free_pages,
            refused_kv=self.ledger.refused["kv"],
            most_kv_pages=self._most_kv_pages,
        )

    def check(self) -> None:
        """Recount every page.

        Raises:
            RuntimeError: If a page is lost, doubled or held by two.
        """
        self.ledger.check()
