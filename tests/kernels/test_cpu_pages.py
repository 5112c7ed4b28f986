"""Weights on pages give bit for bit what contiguous weights give."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import (
    ContiguousBlock,
    ContiguousExperts,
    PagedBlock,
    PagedExperts,
    PagedWeights,
    backend,
    block_matmul,
    moe_layer,
)
from kernels.cpu.backend import ALL_PATHS
from kernels.planes import pack_planes


def random_block(rng, rows, columns, bits):
    planes = pack_planes(rng.integers(0, 256, (rows, columns), dtype=np.uint8), 8)[:bits]
    table = rng.standard_normal((rows, 1 << bits)).astype(np.float16)
    return ContiguousBlock(planes, table, bits, columns)


def page_out(blocks, page_bytes, rng, *, min_bits=2, parent_bits=8, spare_pages=5):
    """PagedWeights that hold these contiguous blocks; free pages and page ends hold noise."""
    streams = {}
    for i, block in enumerate(blocks):
        for plane in range(block.bits):
            streams[i, "plane_pages", plane] = block.planes[plane]
        streams[i, "table_pages", block.bits - min_bits] = block.table
    pages_of = {key: -(-a.nbytes // page_bytes) for key, a in streams.items()}
    total = sum(pages_of.values()) + spare_pages
    arena = rng.integers(0, 256, total * page_bytes + 64, dtype=np.uint8)
    arena = arena[-arena.ctypes.data % 64 :][: total * page_bytes]
    free = list(rng.permutation(total))
    most = {
        name: max(n for key, n in pages_of.items() if key[1] == name)
        for name in ("plane_pages", "table_pages")
    }
    lists = {
        "plane_pages": np.full((len(blocks), parent_bits, most["plane_pages"]), -1, np.int32),
        "table_pages": np.full(
            (len(blocks), parent_bits - min_bits + 1, most["table_pages"]), -1, np.int32
        ),
    }
    for (i, name, at), stream in streams.items():
        data = np.ascontiguousarray(stream).reshape(-1).view(np.uint8)
        for n in range(pages_of[i, name, at]):
            page = free.pop()
            part = data[n * page_bytes : (n + 1) * page_bytes]
            arena[page * page_bytes :][: len(part)] = part
            lists[name][i, at, n] = page
    bits = np.array([b.bits for b in blocks], np.int32)
    return PagedWeights(arena, page_bytes, min_bits, bits, **lists)


def paged(blocks, page_bytes, rng):
    weights = page_out(blocks, page_bytes, rng)
    return [PagedBlock(weights, i, b.rows, b.columns) for i, b in enumerate(blocks)]


@pytest.mark.parametrize("page_bytes", [1024, 2048, 4096, 32768])
@pytest.mark.parametrize("columns", [37, 1408, 2048, 9000])
def test_rows_that_straddle_pages_are_read_whole(page_bytes, columns):
    """Rows of 176 bytes straddle now and then; rows of 1,128 bytes span up to three pages."""
    rng = np.random.default_rng(columns)
    blocks = [random_block(rng, 23, columns, bits) for bits in range(2, 9)]
    for whole, block in zip(blocks, paged(blocks, page_bytes, rng), strict=True):
        assert np.array_equal(block.contiguous().planes, whole.planes)
        for tokens in (1, 3, 10):
            x = rng.standard_normal((tokens, columns)).astype(np.float32)
            assert np.array_equal(block_matmul(x, block), block_matmul(x, whole))


@pytest.mark.parametrize("path", ALL_PATHS)
def test_every_path_reads_pages(path):
    if path not in backend().available:
        pytest.skip(f"{path} does not run on this machine")
    rng = np.random.default_rng(5)
    blocks = [random_block(rng, 31, 1408, bits) for bits in (2, 5, 8)]
    x = rng.standard_normal((2, 1408)).astype(np.float32)
    for whole, block in zip(blocks, paged(blocks, 1024, rng), strict=True):
        found = block_matmul(x, block, path=path)
        assert np.array_equal(found, block_matmul(x, whole, path=path))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 60),
    columns=st.integers(1, 1500),
    bits=st.integers(2, 8),
    page_bytes=st.sampled_from([1024, 2048, 8192]),
)
def test_any_shape_on_any_page_size(seed, rows, columns, bits, page_bytes):
    rng = np.random.default_rng(seed)
    whole = random_block(rng, rows, columns, bits)
    block = paged([whole], page_bytes, rng)[0]
    x = rng.standard_normal((2, columns)).astype(np.float32)
    assert np.array_equal(block_matmul(x, block), block_matmul(x, whole))


def layer_blocks(rng, experts, hidden, inner):
    for i in range(2 * experts):
        shape = (hidden, inner) if i % 2 else (2 * inner, hidden)
        yield random_block(rng, *shape, 2 + i * 3 % 7)


def layer_call(rng, hidden, experts):
    tokens = rng.standard_normal((11, hidden)).astype(np.float32)
    index = rng.integers(0, experts, (11, 2)).astype(np.int32)
    return tokens, index, rng.random((11, 2)).astype(np.float32)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_a_paged_layer_is_bit_for_bit_the_contiguous_one(path):
    """The layer is the second of two, so that its first block is not block 0."""
    if path not in backend().available:
        pytest.skip(f"{path} does not run on this machine")
    rng = np.random.default_rng(21)
    blocks = list(layer_blocks(rng, 4, 200, 170))
    weights = page_out([*layer_blocks(rng, 3, 20, 9), *blocks], 1024, rng)
    call = layer_call(rng, 200, 4)
    paged_layer = PagedExperts(weights, 6, 4, 200, 170)
    found = moe_layer(*call, paged_layer, "silu", path=path)
    assert np.abs(found).max() > 0
    assert np.array_equal(found, moe_layer(*call, ContiguousExperts(blocks), "silu", path=path))


@pytest.mark.parametrize("path", ["portable", "numpy"])
def test_a_layer_names_the_block_of_the_model_that_lacks_a_page(path):
    rng = np.random.default_rng(22)
    blocks = [*layer_blocks(rng, 3, 20, 9), *layer_blocks(rng, 2, 200, 170)]
    weights = page_out(blocks, 1024, rng)
    layer = PagedExperts(weights, 6, 2, 200, 170)
    tokens, index, weight = layer_call(rng, 200, 2)
    weights.plane_pages[8, 1, 2] = -1
    only_first = np.zeros_like(index)
    assert moe_layer(tokens, only_first, weight, layer, "silu", path=path).any()
    with pytest.raises(ValueError, match="block 8: page 2 of its plane 1"):
        moe_layer(tokens, index, weight, layer, "silu", path=path)
    weights.bits[9] = 0
    weights.plane_pages[8, 1, 2] = 0
    with pytest.raises(ValueError, match=r"block 9: bits must be 2\.\.8, found 0"):
        moe_layer(tokens, index, weight, layer, "silu", path=path)


def test_a_new_width_is_used_from_the_next_call_on():
    rng = np.random.default_rng(6)
    planes = pack_planes(rng.integers(0, 256, (9, 300), dtype=np.uint8), 8)
    tables = {q: rng.standard_normal((9, 1 << q)).astype(np.float16) for q in (3, 8)}
    wide, narrow = (ContiguousBlock(planes, tables[q], q, 300) for q in (8, 3))
    weights = page_out([wide, narrow], 1024, rng)
    weights.table_pages[0, 1] = weights.table_pages[1, 1]
    block = PagedBlock(weights, 0, 9, 300)
    x = rng.standard_normal((1, 300)).astype(np.float32)
    assert np.array_equal(block_matmul(x, block), block_matmul(x, wide))
    weights.bits[0] = 3
    weights.plane_pages[0, 3:] = -1
    assert np.array_equal(block_matmul(x, block), block_matmul(x, narrow))


@pytest.mark.parametrize("path", ["portable", "numpy"])
@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("plane_pages", (0, 2, 0), -1, "block 0: page 0 of its plane 2 .* found -1"),
        ("plane_pages", (0, 4, 3), 10**6, "page 3 of its plane 4 .* found 1000000"),
        ("table_pages", (0, 3, 0), -7, "page 0 of its table .* found -7"),
        ("bits", 0, 1, "bits must be 2..8, found 1"),
        ("bits", 0, 9, "bits must be 2..8, found 9"),
        ("bits", 0, 6, "page 0 of its (table|plane 5)"),
    ],
)
def test_pages_that_are_not_there_are_refused(path, name, at, value, message):
    rng = np.random.default_rng(7)
    block = paged([random_block(rng, 23, 1408, 5)], 1024, rng)[0]
    getattr(block.weights, name)[at] = value
    with pytest.raises(ValueError, match=message):
        block_matmul(np.zeros((1, 1408), np.float32), block, path=path)


@pytest.mark.parametrize("path", ["portable", "numpy"])
def test_a_shape_that_needs_more_pages_than_are_listed_is_refused(path):
    rng = np.random.default_rng(9)
    weights = paged([random_block(rng, 23, 1408, 5)], 1024, rng)[0].weights
    with pytest.raises(ValueError, match=r"page \d of its"):
        block_matmul(np.zeros((1, 1408), np.float32), PagedBlock(weights, 0, 99, 1408), path=path)


ARRAYS = {
    "arena": np.zeros(8192, np.uint8),
    "page_bytes": 1024,
    "min_bits": 2,
    "bits": np.full(2, 4, np.int32),
    "plane_pages": np.zeros((2, 8, 1), np.int32),
    "table_pages": np.zeros((2, 7, 1), np.int32),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_bytes": 512}, "power of two >= 1024, found 512"),
        ({"page_bytes": 3000}, "power of two"),
        ({"min_bits": 1}, "min_bits"),
        ({"arena": np.zeros((8, 1024), np.uint8)}, "arena must be uint8"),
        ({"arena": np.zeros(8192, np.int8)}, "arena must be uint8"),
        ({"arena": np.zeros(8192, np.uint8)[::2]}, "C-contiguous"),
        ({"bits": np.full(3, 4, np.int32)}, r"bits must be int32 \[2\]"),
        ({"bits": np.full(2, 4)}, "found int64"),
        ({"plane_pages": np.zeros((2, 8), np.int32)}, "three axes"),
        ({"plane_pages": np.zeros((2, 8, 1))}, "plane_pages must be int32"),
        ({"plane_pages": np.zeros((2, 9, 1), np.int32)}, "parent bits"),
        ({"plane_pages": np.zeros((2, 8, 2), np.int32)[..., ::2]}, "C-contiguous"),
        ({"table_pages": np.zeros((2, 6, 1), np.int32)}, r"table_pages must be int32 \[2, 7, 1\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PagedWeights(**{**ARRAYS, **change})


@pytest.mark.parametrize("arguments", [(-1, 1, 4, 4), (1, 1, 4, 4), (0, 2, 4, 4), (0, 0, 4, 4)])
def test_layers_that_are_not_there_are_refused(arguments):
    with pytest.raises(ValueError, match=r"blocks .* needed|>= 1"):
        PagedExperts(PagedWeights(**ARRAYS), *arguments)


@pytest.mark.parametrize("arguments", [(-1, 4, 4), (2, 4, 4), (0, 0, 4), (0, 4, 0)])
def test_blocks_that_are_not_there_are_refused(arguments):
    with pytest.raises(ValueError, match=r"index must be|>= 1"):
        PagedBlock(PagedWeights(**ARRAYS), *arguments)
