"""Sizes of planes, tables and pages against stored values, real arrays and counting."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.plane_bytes import (
    block_bytes,
    block_pages,
    effective_bits,
    pages_of,
    plane_bytes,
    resident_table_bits,
    table_bytes,
)

CASES = json.loads(
    (Path(__file__).resolve().parent.parent / "golden" / "pagedweight_cases.json").read_text()
)["bytes"]["rows"]
SIZES = st.integers(1, 300)
BITS = st.integers(2, 8)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['N']}x{c['K']}q{c['q']}")
def test_sizes_are_those_of_the_stored_cases(case: dict[str, Any]) -> None:
    n, k, q = case["N"], case["K"], case["q"]
    assert plane_bytes(n, k) == case["plane"]
    assert table_bytes(n, q) == case["lut_fp16"]
    assert block_bytes(n, k, q) == case["active"]
    assert block_bytes(n, k, q, tables="all") == case["all_luts"]
    assert round(effective_bits(n, k, q), 4) == case["eff_bits"]


@given(rows=SIZES, columns=SIZES, bits=BITS)
def test_bytes_are_those_of_the_arrays_that_would_be_stored(
    rows: int, columns: int, bits: int
) -> None:
    codes = np.zeros((rows, columns), np.uint8)
    padded = np.pad(codes, ((0, 0), (0, -columns % 32)))
    plane = np.packbits(padded.astype(bool), axis=1)
    tables = {q: np.zeros((rows, 2**q), np.float16) for q in range(2, bits + 1)}
    assert plane_bytes(rows, columns) == plane.nbytes
    assert block_bytes(rows, columns, bits) == bits * plane.nbytes + tables[bits].nbytes
    assert block_bytes(rows, columns, bits, tables="all") == bits * plane.nbytes + sum(
        table.nbytes for table in tables.values()
    )
    small, scale = np.zeros((rows, 2**bits), np.int8), np.zeros(rows, np.float32)
    assert table_bytes(rows, bits, "int8") == small.nbytes + scale.nbytes


@given(
    rows=SIZES,
    columns=SIZES,
    bits=BITS,
    page_bytes=st.sampled_from([1024, 4096, 32768]),
    tables=st.sampled_from(["active", "all"]),
    entry=st.sampled_from(["fp16", "int8"]),
)
@settings(max_examples=60, deadline=None)
def test_pages_are_those_that_filling_them_byte_run_by_byte_run_takes(
    rows: int, columns: int, bits: int, page_bytes: int, tables: Any, entry: Any
) -> None:
    resident = [bits] if tables == "active" else list(range(2, bits + 1))
    runs = [plane_bytes(rows, columns)] * bits + [table_bytes(rows, q, entry) for q in resident]
    taken = 0
    for run in runs:
        left = run
        while left > 0:
            taken, left = taken + 1, left - page_bytes
    pages = block_pages(rows, columns, bits, page_bytes=page_bytes, tables=tables, entry=entry)
    assert pages == taken
    exact = block_bytes(rows, columns, bits, tables=tables, entry=entry)
    assert exact <= pages * page_bytes < exact + len(runs) * page_bytes


@given(rows=SIZES, columns=SIZES, bits=st.integers(3, 8))
def test_a_drop_frees_a_plane_and_the_difference_of_two_tables(
    rows: int, columns: int, bits: int
) -> None:
    freed = block_bytes(rows, columns, bits) - block_bytes(rows, columns, bits - 1)
    assert freed == plane_bytes(rows, columns) + rows * 2 ** (bits - 1) * 2
    kept = block_bytes(rows, columns, bits, tables="all")
    assert kept - block_bytes(rows, columns, bits - 1, tables="all") == (
        plane_bytes(rows, columns) + table_bytes(rows, bits)
    )


# Page waste of one plane, in percent, as published for these three models' matrices.
@pytest.mark.parametrize(
    ("rows", "columns", "waste_by_page_kib"),
    [
        (2816, 2048, {16: 0, 32: 0, 64: 0, 2048: 191}),
        (2048, 1408, {16: 0, 32: 0, 64: 9.1, 2048: 482}),
        (28672, 4096, {16: 0, 32: 0, 64: 0, 2048: 0}),
        (4096, 14336, {16: 0, 32: 0, 64: 0, 2048: 14}),
        (1408, 2816, {16: 2.5, 32: 5.8, 64: 5.8, 2048: 323}),
        (2816, 704, {16: 5.8, 32: 5.8, 64: 5.8, 2048: 746}),
    ],
)
def test_page_rounding_of_the_three_models_planes(
    rows: int, columns: int, waste_by_page_kib: dict[int, float]
) -> None:
    plane = plane_bytes(rows, columns)
    for kib, waste in waste_by_page_kib.items():
        found = 100 * (pages_of(plane, kib * 1024) * kib * 1024 / plane - 1)
        assert found == pytest.approx(waste, abs=0.5 if kib == 2048 else 0.05)


def test_numpy_whole_numbers_are_whole_numbers() -> None:
    assert block_bytes(np.int64(64), np.int32(40), np.uint8(8)) == block_bytes(64, 40, 8)
    assert type(plane_bytes(np.int32(2**20), np.int32(2**20))) is int  # no overflow on the way


def test_resident_tables_start_at_the_lowest_width() -> None:
    assert list(resident_table_bits(5)) == [5]
    assert list(resident_table_bits(5, tables="all")) == [2, 3, 4, 5]
    assert list(resident_table_bits(5, min_bits=4, tables="all")) == [4, 5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plane_bytes(0, 4), "rows must be >= 1, found 0"),
        (lambda: plane_bytes(4, -1), "columns must be >= 1, found -1"),
        (lambda: table_bytes(4, 9), "bits must be within 1..8, found 9"),
        (lambda: table_bytes(4, 2, "fp8"), "entry must be one of 'fp16', 'int8', found 'fp8'"),
        (lambda: block_bytes(4, 4, 2, min_bits=3), "bits must be >= min_bits = 3, found 2"),
        (lambda: block_bytes(4, 4, 2, tables="none"), "tables must be one of 'active', 'all'"),
        (lambda: pages_of(1, 3000), "page_bytes must be a power of two >= 1,024, found 3,000"),
        (lambda: pages_of(1, 512), "page_bytes must be a power of two >= 1,024, found 512"),
        (lambda: pages_of(-1, 4096), "num_bytes must be >= 0, found -1"),
        (lambda: block_pages(4, 4, 2, page_bytes=0), "page_bytes must be a power of two"),
    ],
)
def test_sizes_that_cannot_be_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        call()


@pytest.mark.parametrize("value", [2.0, "4", None, True])
def test_sizes_are_whole_numbers(value: Any) -> None:
    with pytest.raises(TypeError, match="rows must be a whole number"):
        plane_bytes(value, 4)
