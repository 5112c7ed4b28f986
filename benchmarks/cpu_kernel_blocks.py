"""Random expert blocks, contiguous and on the pages of an arena, for the CPU kernel benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.cpu import ContiguousBlock, PagedBlock, PagedWeights

PAGE_BYTES = 32768


def block_bytes(rows: int, columns: int, bits: int) -> int:
    return bits * 4 * rows * -(-columns // 32) + rows * 2 * (1 << bits)


def random_block(rng: np.random.Generator, rows: int, columns: int, bits: int) -> ContiguousBlock:
    words = -(-columns // 32)
    planes = rng.integers(0, 2**32, (bits, rows, words), dtype=np.uint32)
    if columns % 32:
        planes[..., -1] &= np.uint32((1 << columns % 32) - 1)
    table = rng.standard_normal((rows, 1 << bits)) / np.sqrt(columns)
    return ContiguousBlock(planes, table.astype(np.float16), bits, columns)


def paged_copies(blocks: Sequence[ContiguousBlock], rng: np.random.Generator) -> list[PagedBlock]:
    """The same blocks on pages in random order."""
    streams = [[*b.planes, b.table] for b in blocks]
    count = [[-(-s.nbytes // PAGE_BYTES) for s in parts] for parts in streams]
    total = sum(map(sum, count))
    arena = np.zeros((total + 1) * PAGE_BYTES, np.uint8)
    arena = arena[-arena.ctypes.data % PAGE_BYTES :][: total * PAGE_BYTES]
    free = list(rng.permutation(total))
    most = max(map(max, count))
    planes = np.full((len(blocks), 8, most), -1, np.int32)
    tables = np.full((len(blocks), 7, most), -1, np.int32)
    for i, (block, parts) in enumerate(zip(blocks, streams, strict=True)):
        for p, stream in enumerate(parts):
            data = stream.reshape(-1).view(np.uint8)
            row = tables[i, block.bits - 2] if p == block.bits else planes[i, p]
            for n in range(count[i][p]):
                page = free.pop()
                part = data[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]
                arena[page * PAGE_BYTES :][: len(part)] = part
                row[n] = page
    bits = np.array([b.bits for b in blocks], np.int32)
    weights = PagedWeights(arena, PAGE_BYTES, 2, bits, planes, tables)
    return [PagedBlock(weights, i, b.rows, b.columns) for i, b in enumerate(blocks)]
