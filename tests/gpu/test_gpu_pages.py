"""Packing and page copies on a GPU, bit for bit."""

import numpy as np
import pytest

from kernels.cuda import gather, pack
from kernels.cuda.load import load_kernels
from kernels.planes import pack_planes

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1), (5, 32), (2, 33), (17, 95), (1408, 2048)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_codes_survive_the_way_into_planes_and_back(cupy, rng, shape, bits):
    module = load_kernels(pack.SOURCE, target="gpu")
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    want = pack_planes(codes, 8)
    planes = cupy.zeros(want.shape, np.uint32)
    pack.pack_planes(module, cupy.asarray(codes), planes, 8)
    assert np.array_equal(cupy.asnumpy(planes), want)
    back = cupy.zeros(shape, np.uint8)
    pack.unpack_codes(module, planes, back, bits)
    assert np.array_equal(cupy.asnumpy(back), codes >> (8 - bits))


@pytest.mark.parametrize("page_bytes", [1024, 32768])
def test_streams_survive_the_way_into_pages_and_back(cupy, rng, page_bytes):
    module = load_kernels(gather.SOURCE, target="gpu")
    sizes = [1, page_bytes - 1, page_bytes, page_bytes + 1, 5 * page_bytes + 123]
    counts = [-(-size // page_bytes) for size in sizes]
    order = rng.permutation(sum(counts) + 3).astype(np.int32)
    lists = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    pieces = gather.cut_streams(list(zip(lists, sizes, strict=True)), page_bytes, align_bytes=4)
    stream = rng.integers(0, 256, pieces.stream_bytes).astype(np.uint8)
    arena = cupy.full((sum(counts) + 3) * page_bytes, 0xEE, np.uint8)
    back = cupy.full(pieces.stream_bytes, 0x55, np.uint8)
    gather.scatter_pages(module, cupy, arena, cupy.asarray(stream), pieces, page_bytes)
    gather.gather_pages(module, cupy, arena, back, pieces, page_bytes)

    on_cpu, back_on_cpu = np.full(arena.size, 0xEE, np.uint8), np.full(stream.size, 0x55, np.uint8)
    emulated = load_kernels(gather.SOURCE, target="emulation")
    gather.scatter_pages(emulated, np, on_cpu, stream, pieces, page_bytes)
    gather.gather_pages(emulated, np, on_cpu, back_on_cpu, pieces, page_bytes)
    assert np.array_equal(cupy.asnumpy(arena), on_cpu)
    assert np.array_equal(cupy.asnumpy(back), back_on_cpu)
