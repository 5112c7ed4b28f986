"""Launchers of gather.cu: streams of bytes to arena pages and back, many pages in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.cuda.load import KernelModule

SOURCE: Final = Path(__file__).with_name("gather.cu")
_THREADS: Final = 256
_BYTES_A_BLOCK: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class PagePieces:
    """Which part of a stream buffer lies in which page, one entry a page.

    Attributes:
        page_ids: [n] int32; entries below 0 are skipped.
        stream_offset: [n] int64, first byte of the piece in the stream buffer.
        piece_bytes: [n] int32, 1..page_bytes.
        stream_bytes: Size of the whole stream buffer.
    """

    page_ids: NDArray[np.int32]
    stream_offset: NDArray[np.int64]
    piece_bytes: NDArray[np.int32]
    stream_bytes: int


def cut_streams(
    streams: Sequence[tuple[NDArray[np.int32], int]], page_bytes: int, *, align_bytes: int = 16
) -> PagePieces:
    """Lay streams one behind the other in a buffer and cut each into its own pages.

    Args:
        streams: Page list and size in bytes of each; pages in order.
        page_bytes: A power of two.
        align_bytes: Every stream starts at a multiple of this in the buffer.

    Raises:
        ValueError: If a list has other than ceil(size / page_bytes) pages, or the size is < 1.
    """
    ids, offsets, sizes = [], [], []
    start = 0
    for number, (pages, stream_bytes) in enumerate(streams):
        if stream_bytes < 1 or len(pages) != -(-stream_bytes // page_bytes):
            raise ValueError(
                f"stream {number} of {stream_bytes} bytes needs {-(-stream_bytes // page_bytes)} "
                f"pages of {page_bytes}, found {len(pages)}"
            )
        at = np.arange(len(pages), dtype=np.int64) * page_bytes
        ids.append(np.asarray(pages, np.int32))
        offsets.append(start + at)
        sizes.append(np.minimum(page_bytes, stream_bytes - at).astype(np.int32))
        start += -(-stream_bytes // align_bytes) * align_bytes
    if not streams:
        return PagePieces(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32), 0)
    return PagePieces(np.concatenate(ids), np.concatenate(offsets), np.concatenate(sizes), start)


def _launch(kernel: Any, xp: Any, first: Any, second: Any, p: PagePieces, page_bytes: int) -> None:
    if page_bytes < 16 or page_bytes & (page_bytes - 1):
        raise ValueError(f"page_bytes must be a power of two >= 16: {page_bytes}")
    if not len(p.page_ids):
        return
    grid = (len(p.page_ids), -(-page_bytes // _BYTES_A_BLOCK))
    lists = (xp.asarray(p.page_ids), xp.asarray(p.stream_offset), xp.asarray(p.piece_bytes))
    kernel(grid, (_THREADS,), (first, second, *lists, np.int32(page_bytes)))


def gather_pages(
    module: KernelModule, xp: Any, arena: Any, stream: Any, pieces: PagePieces, page_bytes: int
) -> None:
    """Copy pages of the arena into the stream buffer.

    Args:
        module: Kernels of `SOURCE`.
        xp: numpy under emulation, cupy on a GPU.
        arena: uint8 on the target, page i at byte i * page_bytes, aligned to 16.
        stream: uint8 on the target, at least `pieces.stream_bytes`, written.
        pieces: From `cut_streams`.
        page_bytes: A power of two >= 16.

    Raises:
        ValueError: If the buffer is too small or the page size is no power of two.
    """
    _check_stream(stream, pieces)
    kernel = module.get_function("gather_pages")
    _launch(kernel, xp, arena, stream, pieces, page_bytes)


def scatter_pages(
    module: KernelModule, xp: Any, arena: Any, stream: Any, pieces: PagePieces, page_bytes: int
) -> None:
    """Copy the stream buffer into pages of the arena; the rest of a stream's last page is zeroed.

    Args:
        module: Kernels of `SOURCE`.
        xp: numpy under emulation, cupy on a GPU.
        arena: uint8 on the target, written at the pages of `pieces` alone.
        stream: uint8 on the target, at least `pieces.stream_bytes`.
        pieces: From `cut_streams`; no page twice.
        page_bytes: A power of two >= 16.

    Raises:
        ValueError: If the buffer is too small, a page comes twice or the page size is no power
            of two.
    """
    _check_stream(stream, pieces)
    written = pieces.page_ids[pieces.page_ids >= 0]
    if len(np.unique(written)) != len(written):
        raise ValueError("a page is written twice in one scatter")
    kernel = module.get_function("scatter_pages")
    _launch(kernel, xp, arena, stream, pieces, page_bytes)


def _check_stream(stream: Any, pieces: PagePieces) -> None:
    if stream.nbytes < pieces.stream_bytes:
        raise ValueError(f"stream of {stream.nbytes} bytes: {pieces.stream_bytes} are needed")
