"""All planes and tables of a model on the host, cut into pages and ready to be copied.

Weights never change, so a dropped plane needs no copy back: it is here already. Every stream is
padded to whole pages. The parts of one block stand in the order in which raises need them,

    plane 0 .. plane m-1 | table m | plane m | table m+1 | plane m+1 | table m+2 | ...

so that a raise from any width to any other is one contiguous run of host pages.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_parts import BlockParts
from runtime.page_layout import BlockLayout, BlockShape, part_bytes, parts_in_pages


class ParentBlock(Protocol):
    """A quantized block, as a checkpoint gives it."""

    @property
    def planes(self) -> NDArray[np.uint32]:
        """[B, N, ceil(K / 32)] uint32, canonical."""

    @property
    def tables(self) -> Mapping[int, NDArray[np.float16]]:
        """By width m..B: [N, 2**q] float16."""


class HostParent:
    """The host copy of all blocks.

    Attributes:
        parts: Pages of every part.
        shapes: Shape of every block.
        layout: Order of bytes in the streams.
        pages: [host pages, page_bytes] uint8.
        first_page: [n, S] int64, host page at which a part starts.
        stream_bytes: [n, S] int64, bytes of a part without its padding.
        checksum: [n, S] uint32, CRC-32 of each stream.
    """

    def __init__(
        self,
        shapes: Sequence[BlockShape],
        layout: BlockLayout,
        *,
        page_bytes: int,
        parent_bits: int = 8,
        min_bits: int = 2,
        allocate: Callable[[int], NDArray[np.uint8]] | None = None,
    ) -> None:
        """Reserve host memory for all parts; fill it with ``store`` or ``store_all``.

        Args:
            shapes: Of every block, in block order.
            layout: Order of bytes in the streams.
            page_bytes: Page size of the arena.
            parent_bits: B.
            min_bits: m.
            allocate: Gives host memory of so many bytes, pinned where a device can (see
                CopyDevice.host_memory); pageable memory if None.
        """
        self.shapes, self.layout = tuple(shapes), layout
        sizes = {
            shape: part_bytes(layout, shape, parent_bits=parent_bits, min_bits=min_bits)
            for shape in set(self.shapes)
        }
        self.stream_bytes = np.stack([sizes[shape] for shape in self.shapes])
        self.parts: BlockParts = parts_in_pages(
            self.stream_bytes, page_bytes=page_bytes, parent_bits=parent_bits, min_bits=min_bits
        )
        order = np.array(_order(parent_bits, min_bits))
        counts = self.parts.pages[:, order].astype(np.int64).ravel()
        starts = np.cumsum(counts) - counts
        self.first_page = np.empty(self.parts.pages.shape, np.int64)
        self.first_page[:, order] = starts.reshape(self.parts.pages.shape)
        num_bytes = int(counts.sum()) * page_bytes
        memory = np.empty(num_bytes, np.uint8) if allocate is None else allocate(num_bytes)
        self.pages = memory.reshape(-1, page_bytes)
        self.checksum = np.zeros(self.parts.pages.shape, np.uint32)

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        return int(self.pages.shape[1])

    def store(self, block: int, parent: ParentBlock) -> None:
        """Take over one block.

        Raises:
            ValueError: If planes or tables do not have the block's shape.
        """
        shape = self.shapes[block]
        words = (self.parts.parent_bits, shape.rows, -(-shape.columns // 32))
        if parent.planes.shape != words or parent.planes.dtype != np.uint32:
            raise ValueError(
                f"block {block}: planes must be uint32 {list(words)}, not "
                f"{parent.planes.dtype} {list(parent.planes.shape)}"
            )
        for plane in range(self.parts.parent_bits):
            stream = self.layout.plane_stream(parent.planes[plane], plane, shape)
            self._write(block, plane, stream)
        for bits in range(self.parts.min_bits, self.parts.parent_bits + 1):
            table = parent.tables.get(bits)
            if table is None or table.shape != (shape.rows, 1 << bits):
                found = "none" if table is None else list(table.shape)
                raise ValueError(
                    f"block {block}: table {bits} must be {[shape.rows, 1 << bits]}, not {found}"
                )
            stream = self.layout.table_stream(table, bits, shape)
            self._write(block, self.parts.number(("table", bits)), stream)

    def store_all(self, blocks: Iterable[ParentBlock]) -> None:
        """Take over all blocks in order.

        Raises:
            ValueError: If one does not fit, or there are more or fewer blocks than shapes.
        """
        for block, parent in zip(range(len(self.shapes)), blocks, strict=True):
            self.store(block, parent)

    def stream(self, block: int, part: int) -> NDArray[np.uint8]:
        """Bytes of one part, without padding (a view)."""
        first = int(self.first_page[block, part])
        pages = self.pages[first : first + int(self.parts.pages[block, part])]
        view: NDArray[np.uint8] = pages.reshape(-1)[: self.stream_bytes[block, part]]
        return view

    def _write(self, block: int, part: int, stream: NDArray[np.uint8]) -> None:
        size = int(self.stream_bytes[block, part])
        if len(stream) != size:
            raise ValueError(f"block {block} part {part}: {len(stream)} bytes, expected {size}")
        first = int(self.first_page[block, part])
        pages = self.pages[first : first + int(self.parts.pages[block, part])].reshape(-1)
        pages[:size] = stream
        pages[size:] = 0
        self.checksum[block, part] = zlib.crc32(pages[:size].data)


def _order(parent_bits: int, min_bits: int) -> list[int]:
    """Parts of a block in the order in which raises need them."""
    order = list(range(min_bits))
    for bits in range(min_bits, parent_bits + 1):
        order.append(parent_bits + bits - min_bits)
        if bits < parent_bits:
            order.append(bits)
    return order
