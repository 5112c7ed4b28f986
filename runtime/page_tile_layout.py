"""The arena layout of the tensor-core kernels: tiles of 16 rows x 128 columns, int8 tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.cuda.decode_tables import device_table, device_table_bytes
from kernels.cuda.tile_layout import TileShape, tile_planes, untile_planes
from runtime.page_layout import BlockShape


class TileLayout:
    """Planes in the order of kernels/cuda/tile_layout.py, tables as kernels/cuda/decode_tables.py.

    The planes are a permutation and come back exactly. Tables are rounded to int8 (two of them
    from 6 bits on) with a scale per row, as the kernels multiply by them.
    """

    def plane_bytes(self, shape: BlockShape) -> int:
        """256 for each started tile."""
        return _tiles(shape).plane_bytes

    def table_bytes(self, shape: BlockShape, bits: int) -> int:
        """Entries and scales of all row tiles."""
        return device_table_bytes(_tiles(shape), bits)

    def plane_stream(
        self, words: NDArray[np.uint32], plane: int, shape: BlockShape
    ) -> NDArray[np.uint8]:
        """Tiles of one canonical plane [N, ceil(K / 32)]."""
        tiled = tile_planes(words[None], _tiles(shape), first_plane=plane)
        stream: NDArray[np.uint8] = tiled[0].astype("<u4", copy=False).view(np.uint8)
        return stream

    def plane_words(
        self, stream: NDArray[np.uint8], plane: int, shape: BlockShape
    ) -> NDArray[np.uint32]:
        """The canonical plane of a stream."""
        words = np.array(stream).view("<u4").astype(np.uint32, copy=False)
        plane_words: NDArray[np.uint32] = untile_planes(
            words[None], _tiles(shape), first_plane=plane
        )[0]
        return plane_words

    def table_stream(
        self, table: NDArray[np.float16], bits: int, shape: BlockShape
    ) -> NDArray[np.uint8]:
        """Whole numbers and scales of a table [N, 2**bits]."""
        return device_table(table, bits, _tiles(shape))


def _tiles(shape: BlockShape) -> TileShape:
    return TileShape(shape.rows, shape.columns, shape.halves)
