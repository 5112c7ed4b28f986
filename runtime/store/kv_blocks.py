"""The paged keys and values of an engine as the flat bytes of store blocks.

A store block is all layers, keys and values of a run of tokens of one tensor-parallel slice. In it
the engine's pages follow one another, in each page the layers, in each layer the page as the engine
packed it::

    store block   | page 0                         | page 1                         | ...
    page          | layer 0 | pad | layer 1 | pad  |  pages_per_block of them
    layer         [page dims of the engine], contiguous in their logical order

A page is never cut: some backends interleave tokens inside it, so only whole pages mean the same
everywhere. ``signature`` says how they are packed and belongs into the identity of every key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.store.errors import StoreSetupError

ALIGN_BYTES = 16  # every element type divides it, so a layer's slice can be viewed as its type
ABSENT = -1  # page id of a page that is not to be written


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages.

    Attributes:
        name: Layer name.
        pages: [num_pages, ...page dims], uint8, a view of the engine's memory.
        offset_bytes: Where the layer starts in a page of the store.
        num_bytes: Bytes of one page of this layer.
    """

    name: str
    pages: torch.Tensor
    offset_bytes: int
    num_bytes: int


class KvBlocks:
    """Gathers pages into store blocks and scatters store blocks into pages.

    Args:
        caches: Layer name -> [num_pages x k, ...page dims], any type; k kernel pages make one page
            of the engine's block table. The last dimension must be dense. Order is kept.
        num_pages: Pages of the engine's block table.
        pages_per_block: Pages in one store block, >= 1.

    Raises:
        StoreSetupError: For no layers, pages that cannot be told apart or are not dense.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor], num_pages: int, pages_per_block: int = 1
    ) -> None:
        if not caches or num_pages < 1 or pages_per_block < 1:
            raise StoreSetupError(
                f"{len(caches)} layers, {num_pages} pages, {pages_per_block} pages in a block: "
                "each must be at least 1"
            )
        self.layers: list[LayerPages] = []
        self.signature = f"pages={pages_per_block}"
        offset = 0
        for name, cache in caches.items():
            pages = _as_pages(name, cache, num_pages)
            num_bytes = math.prod(pages.shape[1:])
            self.layers.append(LayerPages(name, pages, offset, num_bytes))
            offset += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
            shape = "x".join(map(str, cache.shape[1:]))
            self.signature += f";{str(cache.dtype).removeprefix('torch.')}[{shape}]"
        self.device = self.layers[0].pages.device
        if any(layer.pages.device != self.device for layer in self.layers):
            raise StoreSetupError("the layers lie on several devices; one is needed")
        self.num_pages = num_pages
        self.pages_per_block = pages_per_block
        self.page_bytes = offset
        self.block_bytes = offset * pages_per_block
        self._arrays = [layer.pages.numpy() for layer in self.layers] if self.is_host else []

    @property
    def is_host(self) -> bool:
        """Whether the pages lie in host memory."""
        return self.device.type == "cpu"

    def gather(self, page_ids: Sequence[int], destination: Any) -> None:
        """Copy pages from host memory to consecutive places of a writable buffer.

        Args:
            page_ids: Pages in the order wanted.
            destination: Writable buffer of at least ``len(page_ids) * page_bytes`` bytes.
        """
        rows = self._rows(destination, len(page_ids))
        for layer, array in zip(self.layers, self._arrays, strict=True):
            slots = rows[:, layer.offset_bytes : layer.offset_bytes + layer.num_bytes]
            shape = array.shape[1:]
            for row, page_id in zip(slots, page_ids, strict=True):
                row.reshape(shape)[...] = array[page_id]

    def scatter(self, source: Any, page_ids: Sequence[int]) -> None:
        """Copy consecutive pages of a buffer into pages in host memory.

        Args:
            source: Readable buffer of at least ``len(page_ids) * page_bytes`` bytes.
            page_ids: Where each goes; `ABSENT` skips one.
        """
        rows = self._rows(source, len(page_ids))
        for layer, array in zip(self.layers, self._arrays, strict=True):
            slots = rows[:, layer.offset_bytes : layer.offset_bytes + layer.num_bytes]
            shape = array.shape[1:]
            for row, page_id in zip(slots, page_ids, strict=True):
                if page_id != ABSENT:
                    array[page_id] = row.reshape(shape)

    def gather_on_device(self, page_ids: Sequence[int]) -> torch.Tensor:
        """Pages gathered into one dense tensor on their own device.

        Work is queued on the current stream, hence after the kernels that wrote the pages.

        Returns:
            [len(page_ids), page_bytes], uint8; padding is zero.
        """
        rows = torch.zeros((len(page_ids), self.page_bytes), dtype=torch.uint8, device=self.device)
        index = torch.tensor(page_ids, dtype=torch.int64).to(self.device)
        for layer in self.layers:
            taken = layer.pages.index_select(0, index).flatten(1)
            rows[:, layer.offset_bytes : layer.offset_bytes + layer.num_bytes] = taken
        return rows

    def scatter_on_device(self, rows: torch.Tensor, page_ids: Sequence[int]) -> None:
        """Write dense pages into their places on the device, on the current stream.

        Args:
            rows: [len(page_ids), page_bytes], uint8, on the device.
            page_ids: Where each goes; `ABSENT` skips one.
        """
        wanted = [i for i, page_id in enumerate(page_ids) if page_id != ABSENT]
        index = torch.tensor([page_ids[i] for i in wanted], dtype=torch.int64).to(self.device)
        if len(wanted) < len(page_ids):
            rows = rows.index_select(0, torch.tensor(wanted, dtype=torch.int64).to(self.device))
        for layer in self.layers:
            part = rows[:, layer.offset_bytes : layer.offset_bytes + layer.num_bytes]
            layer.pages.index_copy_(0, index, part.reshape(-1, *layer.pages.shape[1:]))

    def _rows(self, buffer: Any, num_pages: int) -> NDArray[np.uint8]:
        """A buffer as [num_pages, page_bytes]."""
        flat = np.frombuffer(buffer, dtype=np.uint8, count=num_pages * self.page_bytes)
        return flat.reshape(num_pages, self.page_bytes)


def _as_pages(name: str, cache: torch.Tensor, num_pages: int) -> torch.Tensor:
    """One layer's memory as [num_pages, ...], uint8, without a copy."""
    if cache.dim() < 2 or cache.shape[0] % num_pages or cache.stride(-1) != 1:
        raise StoreSetupError(
            f"{name}: shape {tuple(cache.shape)}, strides {cache.stride()}: expected a multiple of "
            f"{num_pages} pages first and a dense last dimension"
        )
    as_bytes = cache.view(torch.uint8)
    if cache.shape[0] == num_pages:
        return as_bytes
    kernel_pages = cache.shape[0] // num_pages
    step, *strides = as_bytes.stride()
    return as_bytes.as_strided(
        (num_pages, kernel_pages, *as_bytes.shape[1:]),
        (step * kernel_pages, step, *strides),
        as_bytes.storage_offset(),
    )
