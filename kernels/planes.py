"""Bit planes of integer codes: the canonical layout every other layout is a permutation of.

A weight's code has ``parent_bits`` bits. Plane p holds bit ``parent_bits - 1 - p`` of every code,
so the first q planes are the q-bit codes. Element (row, k) is bit k % 32, counted from the least
significant, of word k // 32; columns are padded with code 0 up to a whole word.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 32
MAX_BITS = 8

CodeArray = NDArray[np.uint8]
PlaneArray = NDArray[np.uint32]


def plane_words(columns: int) -> int:
    """32-bit words in one row of one plane of ``columns`` weights."""
    return -(-columns // WORD_BITS)


def pack_planes(codes: CodeArray, parent_bits: int) -> PlaneArray:
    """Planes of a matrix of codes, most significant bit first.

    Args:
        codes: [N, K], uint8, every value < 2**parent_bits; N and K >= 1.
        parent_bits: Bits of a code, 1..8.

    Returns:
        [parent_bits, N, ceil(K/32)], uint32.

    Raises:
        ValueError: If the dtype, shape or a value is outside these bounds.
    """
    _check_bits("parent_bits", parent_bits, lowest=1)
    if codes.dtype != np.uint8 or codes.ndim != 2 or 0 in codes.shape:
        raise ValueError(
            f"codes must be uint8 [N >= 1, K >= 1], found {codes.dtype} {list(codes.shape)}"
        )
    largest = int(codes.max())
    if largest >= 1 << parent_bits:
        raise ValueError(f"codes of {parent_bits} bits must be < {1 << parent_bits}: {largest}")
    rows, columns = codes.shape
    words = plane_words(columns)
    planes = np.zeros((parent_bits, rows, words * 4), dtype=np.uint8)
    used_bytes = -(-columns // 8)
    for plane in range(parent_bits):
        bit = (codes >> (parent_bits - 1 - plane)) & 1
        planes[plane, :, :used_bytes] = np.packbits(bit, axis=1, bitorder="little")
    return _native(planes.view("<u4"))


def unpack_codes(planes: PlaneArray, columns: int) -> CodeArray:
    """Codes of as many bits as there are planes.

    Args:
        planes: [q, N, ceil(columns/32)], uint32, q in 1..8: the first q planes of a matrix.
        columns: K >= 1, weights in a row.

    Returns:
        [N, K], uint8, values < 2**q.

    Raises:
        ValueError: If the dtype or shape does not fit ``columns``.
    """
    check_planes(planes, planes.shape[0] if planes.ndim else 0, columns, lowest_bits=1)
    little = np.ascontiguousarray(planes, dtype="<u4").view(np.uint8)
    codes = np.zeros((planes.shape[1], columns), dtype=np.uint8)
    for plane in little:
        codes <<= 1
        codes |= np.unpackbits(plane, axis=1, count=columns, bitorder="little")
    return codes


def check_planes(planes: PlaneArray, bits: int, columns: int, *, lowest_bits: int = 2) -> None:
    """Refuse planes that cannot hold ``bits``-bit codes of ``columns`` weights a row.

    Args:
        planes: [>= bits, N >= 1, ceil(columns/32)], uint32.
        bits: Planes that will be read, lowest_bits..8.
        columns: K >= 1.
        lowest_bits: The least width allowed.

    Raises:
        ValueError: Naming what was found and what is allowed.
    """
    _check_bits("bits", bits, lowest=lowest_bits)
    if columns < 1:
        raise ValueError(f"columns must be >= 1, found {columns}")
    if planes.dtype != np.uint32 or planes.ndim != 3:
        raise ValueError(
            f"planes must be uint32 [bits, N, words], found {planes.dtype} {list(planes.shape)}"
        )
    words = plane_words(columns)
    if planes.shape[0] < bits or planes.shape[1] < 1 or planes.shape[2] != words:
        raise ValueError(
            f"planes of {bits} bits and {columns} columns must be [>= {bits}, N >= 1, {words}], "
            f"found {list(planes.shape)}"
        )


def _check_bits(name: str, bits: int, *, lowest: int) -> None:
    if not lowest <= bits <= MAX_BITS:
        raise ValueError(f"{name} must be {lowest}..{MAX_BITS}, found {bits}")


def _native(words: NDArray[np.uint32]) -> PlaneArray:
    return words if sys.byteorder == "little" else words.astype(np.uint32)
