"""Packing and page copies on the emulated device: bit for bit what the reference says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cuda import gather, pack
from kernels.cuda.load import load_kernels
from kernels.cuda_emulation import emulator
from kernels.cuda_emulation.emulator import RawModule
from kernels.cuda_emulation.source_text import read_source
from kernels.planes import pack_planes, unpack_codes

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
SCHEDULES = [0, 1, 2, 3]
SHAPES = [(1, 1), (3, 31), (5, 32), (2, 33), (17, 95), (64, 64)]


@pytest.fixture(scope="module")
def packing():
    return load_kernels(pack.SOURCE, target="emulation")


@pytest.fixture(scope="module")
def paging():
    return load_kernels(gather.SOURCE, target="emulation")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("parent_bits", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_gives_the_canonical_planes(packing, shape, parent_bits, schedule):
    packing.schedule = schedule
    codes = np.random.default_rng(0).integers(0, 1 << parent_bits, shape).astype(np.uint8)
    want = pack_planes(codes, parent_bits)
    planes = np.full_like(want, 0xAAAAAAAA)
    pack.pack_planes(packing, codes, planes, parent_bits)
    assert np.array_equal(planes, want)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_unpacking_gives_the_codes_of_every_width(packing, bits, schedule):
    packing.schedule = schedule
    rng = np.random.default_rng(bits)
    for shape in SHAPES:
        parent = rng.integers(0, 256, shape).astype(np.uint8)
        planes, codes = pack_planes(parent, 8), np.full(shape, 0xAA, np.uint8)
        pack.unpack_codes(packing, planes, codes, bits)
        assert np.array_equal(codes, parent >> (8 - bits))
        assert np.array_equal(codes, unpack_codes(planes[:bits], shape[1]))


@pytest.mark.parametrize(
    ("codes", "planes", "bits", "message"),
    [
        (np.zeros((2, 3), np.int8), np.zeros((8, 2, 1), np.uint32), 8, "codes must be uint8"),
        (np.zeros((2, 33), np.uint8), np.zeros((8, 2, 1), np.uint32), 8, r"\[>= 8, 2, 2\]"),
        (np.zeros((2, 3), np.uint8), np.zeros((3, 2, 1), np.uint32), 4, r"\[>= 4, 2, 1\]"),
        (np.zeros((2, 3), np.uint8), np.zeros((9, 2, 1), np.uint32), 9, "must be 1..8: 9"),
    ],
)
def test_packing_refuses_shapes_that_do_not_fit(packing, codes, planes, bits, message):
    with pytest.raises(ValueError, match=message):
        pack.pack_planes(packing, codes, planes, bits)


def paged(rng, sizes, page_bytes, spare):
    counts = [-(-size // page_bytes) for size in sizes]
    order = rng.permutation(sum(counts) + spare).astype(np.int32)
    lists = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    return list(zip(lists, sizes, strict=True)), (sum(counts) + spare) * page_bytes


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    page_bytes=st.sampled_from([16, 64, 256]),
    align=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**20),
    schedule=st.sampled_from(SCHEDULES),
)
def test_streams_survive_the_way_into_pages_and_back(
    paging, sizes, page_bytes, align, seed, schedule
):
    paging.schedule = schedule
    rng = np.random.default_rng(seed)
    streams, arena_bytes = paged(rng, sizes, page_bytes, spare=2)
    pieces = gather.cut_streams(streams, page_bytes, align_bytes=align)
    stream = rng.integers(0, 256, pieces.stream_bytes).astype(np.uint8)
    arena = np.full(arena_bytes, 0xEE, np.uint8)
    gather.scatter_pages(paging, np, arena, stream, pieces, page_bytes)

    expected = np.full(arena_bytes, 0xEE, np.uint8)  # the same in plain numpy
    start = 0
    for pages, size in streams:
        data = np.zeros(len(pages) * page_bytes, np.uint8)
        data[:size] = stream[start : start + size]
        for page, part in zip(pages, data.reshape(-1, page_bytes), strict=True):
            expected[page * page_bytes : (page + 1) * page_bytes] = part
        start += -(-size // align) * align
    assert np.array_equal(arena, expected)

    back = np.full_like(stream, 0x55)
    gather.gather_pages(paging, np, arena, back, pieces, page_bytes)
    start = 0
    for _, size in streams:
        assert np.array_equal(back[start : start + size], stream[start : start + size])
        gap = back[start + size : start + -(-size // align) * align]
        assert (gap == 0x55).all()
        start += -(-size // align) * align


def test_pages_below_zero_are_skipped(paging):
    pieces = gather.cut_streams([(np.array([1, -1, 0], np.int32), 48)], 16)
    arena, stream = np.zeros(32, np.uint8), np.arange(48, dtype=np.uint8)
    gather.scatter_pages(paging, np, arena, stream, pieces, 16)
    assert np.array_equal(arena, np.r_[32:48, 0:16])


def test_page_lists_that_do_not_fit_are_refused(paging):
    with pytest.raises(ValueError, match="stream 1 of 33 bytes needs 3 pages of 16, found 2"):
        gather.cut_streams([(np.arange(1), 5), (np.arange(2), 33)], 16)
    pieces = gather.cut_streams([(np.array([1, 1], np.int32), 32)], 16)
    with pytest.raises(ValueError, match="written twice"):
        gather.scatter_pages(paging, np, np.zeros(32, np.uint8), np.zeros(32, np.uint8), pieces, 16)
    with pytest.raises(ValueError, match="31 bytes: 32 are needed"):
        gather.gather_pages(paging, np, np.zeros(32, np.uint8), np.zeros(31, np.uint8), pieces, 16)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("bytes[i], page_bytes)", "bytes[i] + 1, page_bytes)"),
        ("i = vectors * 16 + first;", "i = vectors * 16 + first + 1;"),
        ("offsets[i];", "offsets[0];"),
    ],
)
def test_a_planted_bug_in_the_page_copy_is_found(good, bad):
    text = read_source(gather.SOURCE)
    assert text.count(good) == 1
    broken = RawModule(code=text.replace(good, bad))
    pieces = gather.cut_streams([(np.array([2, 0], np.int32), 61), (np.array([1]), 17)], 32)
    stream, arena = np.arange(1, 97, dtype=np.uint8), np.zeros(96, np.uint8)
    gather.scatter_pages(broken, np, arena, stream, pieces, 32)
    want = np.zeros(96, np.uint8)
    want[64:96], want[0:29], want[32:49] = stream[:32], stream[32:61], stream[64:81]
    assert not np.array_equal(arena, want)
