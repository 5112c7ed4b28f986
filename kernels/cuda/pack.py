"""Launchers of pack.cu: codes to canonical bit planes and back, on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from kernels.cuda.load import KernelModule

SOURCE: Final = Path(__file__).with_name("pack.cu")
_THREADS: Final = 256
_MOST_BLOCKS: Final = 4096


def _grid(num_words: int) -> tuple[int]:
    return (max(1, min(_MOST_BLOCKS, -(-num_words // (_THREADS // 32)))),)


def _shape(codes: Any, planes: Any, bits: int, name: str) -> tuple[int, int, int]:
    if codes.dtype != np.uint8 or codes.ndim != 2 or 0 in codes.shape:
        raise ValueError(f"codes must be uint8 [N >= 1, K >= 1]: {codes.dtype} {codes.shape}")
    rows, columns = codes.shape
    words = -(-columns // 32)
    enough = planes.ndim == 3 and planes.shape[0] >= bits and planes.shape[1:] == (rows, words)
    if planes.dtype != np.uint32 or not enough:
        want = f"uint32 [>= {bits}, {rows}, {words}]"
        raise ValueError(f"planes must be {want}: {planes.dtype} {planes.shape}")
    if not 1 <= bits <= 8:
        raise ValueError(f"{name} must be 1..8: {bits}")
    return rows, columns, words


def pack_planes(module: KernelModule, codes: Any, planes: Any, parent_bits: int) -> None:
    """Write the planes of all codes, most significant bit first.

    Args:
        module: Kernels of `SOURCE`.
        codes: [N, K], uint8 on the target, values < 2**parent_bits (higher bits are dropped).
        planes: [>= parent_bits, N, ceil(K/32)], uint32 on the target, written.
        parent_bits: 1..8.

    Raises:
        ValueError: If a shape or dtype does not fit.
    """
    rows, columns, words = _shape(codes, planes, parent_bits, "parent_bits")
    sizes = (np.int32(rows), np.int32(columns), np.int32(words), np.int32(parent_bits))
    kernel = module.get_function("pack_planes")
    kernel(_grid(rows * words), (_THREADS,), (codes, planes, *sizes))


def unpack_codes(module: KernelModule, planes: Any, codes: Any, bits: int) -> None:
    """Write the `bits`-bit codes that the first `bits` planes hold.

    Args:
        module: Kernels of `SOURCE`.
        planes: [>= bits, N, ceil(K/32)], uint32 on the target.
        codes: [N, K], uint8 on the target, written.
        bits: 1..8.

    Raises:
        ValueError: If a shape or dtype does not fit.
    """
    rows, columns, words = _shape(codes, planes, bits, "bits")
    sizes = (np.int32(rows), np.int32(columns), np.int32(words), np.int32(bits))
    kernel = module.get_function("unpack_codes")
    kernel(_grid(rows * words), (_THREADS,), (planes, codes, *sizes))
