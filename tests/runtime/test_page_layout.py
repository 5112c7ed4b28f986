"""Planes and tables as streams in pages, and back bit for bit; the tables that kernels read."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.planes import pack_planes, unpack_codes
from models.plane_bytes import block_pages
from policies.weight_page_orders import PartCopies, PartList
from runtime.page_layout import BlockShape, CanonicalLayout, part_bytes, read_stream, write_stream
from runtime.page_parent import HostParent
from runtime.page_tables import NO_PAGE, PageTables
from runtime.page_tile_layout import TileLayout

LAYOUTS = [CanonicalLayout(), TileLayout()]
SHAPES = st.builds(
    lambda half_rows, columns, halves: BlockShape(half_rows * halves, columns, halves),
    st.integers(1, 40),
    st.integers(1, 300),
    st.integers(1, 2),
)


@dataclass
class Block:
    planes: np.ndarray
    tables: dict


def random_block(shape, seed):
    chance = np.random.default_rng(seed)
    codes = chance.integers(0, 256, (shape.rows, shape.columns), dtype=np.uint8)
    tables = {q: chance.normal(size=(shape.rows, 1 << q)).astype(np.float16) for q in range(2, 9)}
    return Block(pack_planes(codes, 8), tables), codes


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 99), page_bytes=st.sampled_from([1024, 4096]))
def test_codes_come_back_bit_for_bit_from_pages_in_any_order(layout, shape, seed, page_bytes):
    block, codes = random_block(shape, seed)
    parent = HostParent([shape], layout, page_bytes=page_bytes)
    parent.store(0, block)
    chance = np.random.default_rng(seed)
    places = chance.permutation(len(parent.pages) + 3)[: len(parent.pages)]
    arena = chance.integers(0, 256, (len(parent.pages) + 3, page_bytes), dtype=np.uint8)
    arena[places] = parent.pages
    words = []
    for plane in range(8):
        first, count = parent.first_page[0, plane], parent.parts.pages[0, plane]
        pages = places[first : first + count]
        stream = np.array(
            [
                arena[pages[k // page_bytes], k % page_bytes]
                for k in range(layout.plane_bytes(shape))
            ],
            np.uint8,
        )
        words.append(layout.plane_words(stream, plane, shape))
    assert np.array_equal(unpack_codes(np.stack(words), shape.columns), codes)


@given(num_bytes=st.integers(1, 5000), seed=st.integers(0, 99))
def test_a_stream_is_cut_into_its_pages_in_order_and_touches_nothing_else(num_bytes, seed):
    chance = np.random.default_rng(seed)
    stream = chance.integers(0, 256, num_bytes, dtype=np.uint8)
    arena = np.full((8, 1024), 77, np.uint8)
    pages = chance.permutation(8)[: -(-num_bytes // 1024)].astype(np.int32)
    write_stream(arena, pages, stream)
    got = [arena[pages[k // 1024], k % 1024] for k in range(num_bytes)]
    assert got == stream.tolist() == read_stream(arena, pages, num_bytes).tolist()
    assert (np.delete(arena, pages, axis=0) == 77).all()
    with pytest.raises(ValueError, match=f"{num_bytes} bytes does not fill"):
        write_stream(arena, np.append(pages, 0), stream)


@given(shape=SHAPES, bits=st.integers(2, 8), page_bytes=st.sampled_from([1024, 4096]))
def test_pages_are_counted_as_by_the_model_of_bytes(shape, bits, page_bytes):
    sizes = part_bytes(CanonicalLayout(), shape, parent_bits=8, min_bits=2)
    resident = np.concatenate([sizes[:bits], sizes[8 : 8 + bits - 1]])
    pages = int((-(-resident // page_bytes)).sum())
    assert pages == block_pages(shape.rows, shape.columns, bits, page_bytes=page_bytes)


def test_a_table_comes_back_bit_for_bit():
    shape = BlockShape(9, 50)
    block, _ = random_block(shape, 1)
    layout = CanonicalLayout()
    for bits, entries in block.tables.items():
        stream = layout.table_stream(entries, bits, shape)
        assert len(stream) == layout.table_bytes(shape, bits)
        assert layout.table_entries(stream, bits, shape).tobytes() == entries.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_raise_between_any_widths_is_one_run_of_host_pages(layout):
    shapes = [BlockShape(32, 200, 2), BlockShape(50, 64)]
    parent = HostParent(shapes, layout, page_bytes=1024)
    for block in range(2):
        for q in range(2, 8):
            for d in range(q + 1, 9):
                parts = [*range(q, d), *range(8 + q - 1, 8 + d - 1)]
                pages = np.concatenate(
                    [
                        parent.first_page[block, p] + np.arange(parent.parts.pages[block, p])
                        for p in parts
                    ]
                )
                assert np.ptp(pages) + 1 == len(pages) == len(set(pages.tolist()))


def test_a_block_of_another_shape_is_refused():
    shape = BlockShape(8, 40)
    block, _ = random_block(shape, 0)
    parent = HostParent([shape, BlockShape(8, 70)], CanonicalLayout(), page_bytes=1024)
    with pytest.raises(ValueError, match=r"block 1: planes must be uint32 \[8, 8, 3\]"):
        parent.store(1, block)
    del block.tables[5]
    with pytest.raises(ValueError, match=r"block 0: table 5 must be \[8, 32\], not none"):
        parent.store(0, block)
    with pytest.raises(ValueError, match="shorter"):
        parent.store_all([])


@pytest.mark.parametrize(
    ("rows", "columns", "halves"), [(0, 5, 1), (5, 0, 1), (5, 5, 2), (6, 5, 3)]
)
def test_shapes_out_of_range_are_refused(rows, columns, halves):
    with pytest.raises(ValueError, match="halves 1 or 2 dividing rows"):
        BlockShape(rows, columns, halves)


def tables(num_blocks=3):
    return PageTables.empty(
        num_blocks, parent_bits=8, min_bits=2, plane_pages=4, table_pages=3, page_bytes=1024
    )


def test_page_lists_are_written_padded_and_removed_in_place():
    found = tables()
    addresses = [a.ctypes.data for a in (found.bits, found.plane_pages, found.table_pages)]
    copies = PartCopies(
        np.array([2, 0, 2]),
        np.array([7, 0, 8 + 3]),
        np.array([0, 4, 5, 7]),
        np.array([9, 4, 6, 1, 8, 3, 2], np.int32),
    )
    found.write_parts(copies)
    assert found.plane_list(2, 7).tolist() == [9, 4, 6, 1]
    assert found.plane_pages[0, 0].tolist() == [8, NO_PAGE, NO_PAGE, NO_PAGE]
    assert found.table_list(2, 5).tolist() == [3, 2]
    assert np.count_nonzero(found.plane_pages != NO_PAGE) == 5
    found.write_plane(2, 7, np.array([5], np.int32))
    found.write_table(1, 2, np.array([0], np.int32))
    assert found.plane_pages[2, 7].tolist() == [5, NO_PAGE, NO_PAGE, NO_PAGE]
    found.clear_parts(PartList(np.array([2, 2]), np.array([7, 8 + 3])))
    assert found.plane_list(2, 7).tolist() == found.table_list(2, 5).tolist() == []
    assert found.table_list(1, 2).tolist() == [0]
    now = [a.ctypes.data for a in (found.bits, found.plane_pages, found.table_pages)]
    assert now == addresses


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_bytes": 3000}, "power of two >= 1024, not 3000"),
        ({"page_bytes": 512}, "power of two >= 1024, not 512"),
        ({"min_bits": 9}, "need 1 <= min_bits <= parent_bits <= 8: 9, 8"),
        ({"plane_pages": 0}, "must be >= 1"),
    ],
)
def test_table_sizes_out_of_range_are_refused(change, message):
    sizes = {
        "parent_bits": 8,
        "min_bits": 2,
        "plane_pages": 4,
        "table_pages": 3,
        "page_bytes": 1024,
    }
    with pytest.raises(ValueError, match=message):
        PageTables.empty(3, **(sizes | change))
