"""Bytes and pages of one expert matrix stored as nested bit planes with row tables.

A weight block of N rows and K columns at q bits keeps its q most significant bit planes and, per
output row, a table of the 2^q values that a code stands for. Tables are not small: at K = 704 the
table of 8 bits outweighs three planes. So every size here counts them.

Source:
    The overlay of planes and per-row tables is that of Any-Precision LLM (arXiv 2402.10517).
"""

from __future__ import annotations

import operator
from typing import Literal, SupportsIndex, get_args

TableEntry = Literal["fp16", "int8"]
ResidentTables = Literal["active", "all"]

MIN_BITS = 1
MAX_BITS = 8
MIN_PAGE_BYTES = 1024
DEFAULT_MIN_BITS = 2
DEFAULT_PAGE_BYTES = 32 * 1024

WORD_BYTES = 4
WORD_BITS = 32
INT8_SCALE_BYTES = 4


def plane_bytes(rows: int, columns: int) -> int:
    """Bytes of one bit plane: 4 N ceil(K / 32).

    Args:
        rows: N, outputs, >= 1.
        columns: K, inputs, >= 1; the last word of a row is padded.

    Raises:
        TypeError: If a size is no whole number.
        ValueError: If a size is below 1.
    """
    n, k = _size("rows", rows), _size("columns", columns)
    return WORD_BYTES * n * -(-k // WORD_BITS)


def table_bytes(rows: int, bits: int, entry: TableEntry = "fp16") -> int:
    """Bytes of the table of one width: N rows of 2^q entries.

    Args:
        rows: N, outputs, >= 1.
        bits: q, 1..8.
        entry: ``fp16``, 2 bytes; or ``int8``, 1 byte and 4 bytes per row for the scale.

    Raises:
        TypeError: If a size or width is no whole number.
        ValueError: If a size is below 1, the width outside 1..8, or the entry unknown.
    """
    n, q = _size("rows", rows), _bits("bits", bits)
    is_scaled = _choice("entry", entry, TableEntry) == "int8"
    row_bytes = (1 << q) + INT8_SCALE_BYTES if is_scaled else 2 << q
    return n * row_bytes


def resident_table_bits(
    bits: int, *, min_bits: int = DEFAULT_MIN_BITS, tables: ResidentTables = "active"
) -> range:
    """Widths whose tables are on the device while the block is at ``bits``.

    Args:
        bits: q, the committed width, ``min_bits``..8.
        min_bits: The lowest width the block can drop to, >= 1.
        tables: ``active``: the table of q alone; ``all``: those of ``min_bits``..q, so that a drop
            moves no bytes.

    Raises:
        TypeError: If a width is no whole number.
        ValueError: If a width is outside 1..8, ``bits`` is below ``min_bits``, or ``tables`` is
            unknown.
    """
    q, lowest = _bits("bits", bits), _bits("min_bits", min_bits)
    if q < lowest:
        raise ValueError(f"bits must be >= min_bits = {lowest}, found {q}")
    return range(q if _choice("tables", tables, ResidentTables) == "active" else lowest, q + 1)


def block_bytes(
    rows: int,
    columns: int,
    bits: int,
    *,
    min_bits: int = DEFAULT_MIN_BITS,
    tables: ResidentTables = "active",
    entry: TableEntry = "fp16",
) -> int:
    """Bytes of a block at ``bits``: its planes and its resident tables.

    Args:
        rows: N, outputs, >= 1.
        columns: K, inputs, >= 1.
        bits: q, ``min_bits``..8.
        min_bits: The lowest width the block can drop to, >= 1.
        tables: Which tables are resident, see ``resident_table_bits``.
        entry: What a table entry is, see ``table_bytes``.

    Raises:
        TypeError: If a size or width is no whole number.
        ValueError: If a size, width or choice is outside what is allowed.
    """
    resident = resident_table_bits(bits, min_bits=min_bits, tables=tables)
    planes = (resident.stop - 1) * plane_bytes(rows, columns)
    return planes + sum(table_bytes(rows, b, entry) for b in resident)


def effective_bits(
    rows: int,
    columns: int,
    bits: int,
    *,
    min_bits: int = DEFAULT_MIN_BITS,
    tables: ResidentTables = "active",
    entry: TableEntry = "fp16",
) -> float:
    """Bits per weight of a block, tables and the padding of its rows included.

    Arguments and errors are those of ``block_bytes``.
    """
    size = block_bytes(rows, columns, bits, min_bits=min_bits, tables=tables, entry=entry)
    return 8 * size / (rows * columns)


def pages_of(num_bytes: int, page_bytes: int) -> int:
    """Pages that a run of bytes fills, the last one padded.

    Args:
        num_bytes: >= 0.
        page_bytes: A power of two, >= 1,024.

    Raises:
        TypeError: If an argument is no whole number.
        ValueError: If an argument is outside what is allowed.
    """
    size, page = _whole("num_bytes", num_bytes), _whole("page_bytes", page_bytes)
    if size < 0:
        raise ValueError(f"num_bytes must be >= 0, found {size}")
    if page < MIN_PAGE_BYTES or page & (page - 1):
        raise ValueError(f"page_bytes must be a power of two >= {MIN_PAGE_BYTES:,}, found {page:,}")
    return -(-size // page)


def block_pages(
    rows: int,
    columns: int,
    bits: int,
    *,
    page_bytes: int,
    min_bits: int = DEFAULT_MIN_BITS,
    tables: ResidentTables = "all",
    entry: TableEntry = "fp16",
) -> int:
    """Pages of a block at ``bits``: each plane and each resident table is rounded up by itself.

    Every plane and every table has a page list of its own, so that one can be freed without the
    others. A table row never straddles pages; it need not be padded for that, because rows of 2^q
    entries divide a page (an ``int8`` table is its rows, then its scales).

    Args:
        rows: N, outputs, >= 1.
        columns: K, inputs, >= 1.
        bits: q, ``min_bits``..8.
        page_bytes: A power of two, >= 1,024.
        min_bits: The lowest width the block can drop to, >= 1.
        tables: Which tables are resident, see ``resident_table_bits``.
        entry: What a table entry is, see ``table_bytes``.

    Raises:
        TypeError: If a size or width is no whole number.
        ValueError: If a size, width, page or choice is outside what is allowed.
    """
    resident = resident_table_bits(bits, min_bits=min_bits, tables=tables)
    plane_pages = pages_of(plane_bytes(rows, columns), page_bytes)
    table_pages = sum(pages_of(table_bytes(rows, b, entry), page_bytes) for b in resident)
    return (resident.stop - 1) * plane_pages + table_pages


def _whole(name: str, value: SupportsIndex) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, found {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, found {value!r}") from None


def _size(name: str, value: SupportsIndex) -> int:
    size = _whole(name, value)
    if size < 1:
        raise ValueError(f"{name} must be >= 1, found {size}")
    return size


def _bits(name: str, value: SupportsIndex) -> int:
    bits = _whole(name, value)
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"{name} must be within {MIN_BITS}..{MAX_BITS}, found {bits}")
    return bits


def _choice(name: str, value: str, choices: object) -> str:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, found {value!r}")
    return value
