"""The device order of planes and tables: against the definition bit by bit, and back again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cuda.decode_tables import (
    device_table,
    device_table_bytes,
    entry_bytes,
    round_table,
    rounded_table,
)
from kernels.cuda.tile_layout import TileShape, check_page_bytes, tile_planes, untile_planes
from kernels.planes import pack_planes, plane_words


def unit_place(shape: TileShape, row_tile: int, tile: int, lane: int) -> int:
    """Byte of a lane's two words of a tile, as the module's text has it."""
    if tile < 2 * shape.full_units:
        unit = (row_tile * shape.full_units + tile // 2) * 512
        return unit + lane * 16 + tile % 2 * 8
    return shape.row_tiles * shape.full_units * 512 + row_tile * 256 + lane * 8


def device_bit(words, shape: TileShape, plane: int, row: int, k: int) -> int:
    half, in_half = divmod(row, shape.half_rows)
    row_tile = in_half // 16 * shape.halves + half
    pair, g = divmod(in_half % 16, 8)
    tile, inner = divmod(k, 128)
    a, j = divmod(inner, 32)
    i, t = j // 16 * 4 + j % 4, j // 4 % 4
    place = unit_place(shape, row_tile, tile, 4 * g + t)
    return int(words[plane, place // 4 + pair] >> (4 * i + (3 - plane - a) % 4)) & 1


@pytest.mark.parametrize(
    ("rows", "columns", "halves"), [(16, 128, 1), (17, 129, 1), (40, 704, 2), (34, 300, 2)]
)
def test_every_bit_lies_where_the_definition_says(rows, columns, halves):
    rng = np.random.default_rng(rows)
    shape = TileShape(rows, columns, halves)
    codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    words = tile_planes(pack_planes(codes, 8), shape)
    for _ in range(400):
        row, k, plane = rng.integers(rows), rng.integers(columns), rng.integers(8)
        assert device_bit(words, shape, plane, row, k) == codes[row, k] >> (7 - plane) & 1


@settings(max_examples=60, deadline=None)
@given(
    half_rows=st.integers(1, 40),
    halves=st.sampled_from([1, 2]),
    columns=st.integers(1, 700),
    first=st.integers(0, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_planes_come_back_exactly(half_rows, halves, columns, first, seed):
    shape = TileShape(half_rows * halves, columns, halves)
    rng = np.random.default_rng(seed)
    planes = rng.integers(
        0, 2**32, (2, shape.rows, plane_words(columns)), dtype=np.uint32, endpoint=False
    )
    words = tile_planes(planes, shape, first_plane=first)
    assert np.array_equal(untile_planes(words, shape, first_plane=first), planes)
    # a permutation: nothing but padding is added
    assert np.bitwise_count(words).sum() == np.bitwise_count(planes).sum()
    assert words.nbytes == 2 * shape.plane_bytes


def test_one_plane_alone_is_the_same_as_within_all():
    shape = TileShape(20, 200)
    planes = np.random.default_rng(3).integers(0, 2**32, (8, 20, 7), dtype=np.uint32)
    together = tile_planes(planes, shape)
    for p in range(8):
        alone = tile_planes(planes[p : p + 1], shape, first_plane=p)
        assert np.array_equal(alone[0], together[p])


@pytest.mark.parametrize(
    ("rows", "columns", "halves", "expected"),
    [
        (2816, 2048, 2, 2816 * 256),  # Qwen1.5 gate_up
        (2048, 1408, 1, 2048 * 176),  # its down: eleven tiles
        (2816, 704, 1, 2816 * 96),  # Gemma-4 down: 5.5 tiles are six
        (17, 129, 1, 32 * 32),
        (34, 128, 2, 64 * 16),  # each half on its own
    ],
)
def test_bytes_of_a_plane(rows, columns, halves, expected):
    assert TileShape(rows, columns, halves).plane_bytes == expected


@given(st.integers(1, 200), st.integers(1, 3000), st.sampled_from([1024, 2048, 32768]))
def test_no_unit_straddles_a_page(rows, columns, page_bytes):
    shape = TileShape(rows, columns)
    for row_tile in {0, shape.row_tiles // 2, shape.row_tiles - 1}:
        for tile in range(shape.column_tiles):
            full = tile < 2 * shape.full_units
            start = unit_place(shape, row_tile, tile - tile % 2 if full else tile, 0)
            assert start // page_bytes == (start + (511 if full else 255)) // page_bytes


@pytest.mark.parametrize("page_bytes", [0, 512, 1000, 1536])
def test_other_page_sizes_are_refused(page_bytes):
    with pytest.raises(ValueError, match=f"power of two >= 1024: {page_bytes}"):
        check_page_bytes(page_bytes)


def test_wrong_shapes_are_refused():
    shape = TileShape(16, 128)
    with pytest.raises(ValueError, match=r"uint32 \[P, 16, 4\], found uint32 \[1, 16, 5\]"):
        tile_planes(np.zeros((1, 16, 5), np.uint32), shape)
    with pytest.raises(ValueError, match=r"uint32 \[P, 64\], found uint64"):
        untile_planes(np.zeros((1, 64), np.uint64), shape)
    with pytest.raises(ValueError, match="positive multiple of 2: 5"):
        TileShape(5, 8, 2)
    with pytest.raises(ValueError, match="halves must be 1 or 2"):
        TileShape(6, 8, 3)
    with pytest.raises(ValueError, match="columns must be >= 1"):
        TileShape(6, 0)


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("bits", range(2, 9))
def test_entries_are_off_by_at_most_half_a_step(bits):
    rng = np.random.default_rng(bits)
    table = rng.standard_t(4, (50, 1 << bits)).astype(np.float16)
    error = np.abs(rounded_table(table, bits) - table.astype(np.float64))
    steps = 127 if bits <= 5 else 16256
    largest = np.abs(table.astype(np.float64)).max(axis=1, keepdims=True)
    assert (error <= 0.501 / steps * largest).all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_rounding_adds_little_to_the_error_of_the_cells(bits):
    # equally filled cells of Gaussian rows, entries their means: what 8 or 15 bits add to it
    rng = np.random.default_rng(bits)
    weights = np.sort(rng.standard_normal((40, 2048)), axis=1).reshape(40, 1 << bits, -1)
    table = weights.mean(axis=2)
    cells = ((weights - table[:, :, None]) ** 2).sum()
    rounded = ((weights - rounded_table(table, bits)[:, :, None]) ** 2).sum()
    assert rounded / cells - 1 < (0.03 if bits <= 5 else 0.001)


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_stream_of_a_table_holds_every_entry_and_scale(bits):
    rng = np.random.default_rng(bits)
    shape = TileShape(2 * 21, 64, halves=2)
    table = rng.standard_normal((42, 1 << bits)).astype(np.float16)
    values, scales = round_table(table, bits)
    stream = device_table(table, bits, shape)
    assert stream.dtype == np.uint8 and stream.shape == (device_table_bytes(shape, bits),)
    size = entry_bytes(bits)
    row_bytes = size << bits
    for row in range(42):
        half, in_half = divmod(row, 21)
        at = (in_half // 16 * 2 + half) * 16 + in_half % 16
        entries = stream[at * row_bytes : (at + 1) * row_bytes].view(np.int8).astype(int)
        whole = entries if size == 1 else 128 * entries[1::2] + entries[0::2]
        assert np.array_equal(whole, values[row])
        first = shape.row_tiles * 16 * row_bytes + 4 * at
        assert stream[first : first + 4].view("<f4")[0] == scales[row]


def test_rows_of_zeros_have_scale_zero():
    values, scales = round_table(np.zeros((2, 16)), 4)
    assert not values.any() and not scales.any()


def test_bad_tables_are_refused():
    with pytest.raises(ValueError, match="row 1 has an entry that is not finite"):
        round_table(np.array([[1.0, 2, 3, 4], [1, np.inf, 0, 0]]), 2)
    with pytest.raises(ValueError, match=r"floating \[N, 8\], found float64 \[2, 4\]"):
        round_table(np.zeros((2, 4)), 3)
    with pytest.raises(ValueError, match=r"bits must be 2..8, found 9"):
        round_table(np.zeros((2, 512)), 9)
    with pytest.raises(ValueError, match="must have 3 rows, found 2"):
        device_table(np.ones((2, 4)), 2, TileShape(3, 5))
