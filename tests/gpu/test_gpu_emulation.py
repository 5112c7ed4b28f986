"""The emulated device and a real one run one source: do they give the same?"""

from pathlib import Path

import numpy as np
import pytest

from kernels.cuda.load import load_kernels

pytestmark = pytest.mark.gpu
SOURCES = Path(__file__).parents[1] / "kernels" / "emulation_sources"


def run_both(cupy, source: str, name: str, grid, block, arrays, scalars=(), shared_mem=0):
    """Results of every array after one launch on the GPU and one under emulation."""
    on_gpu = [cupy.asarray(a) for a in arrays]
    on_cpu = [a.copy() for a in arrays]
    for target, args in (("gpu", on_gpu), ("emulation", on_cpu)):
        kernel = load_kernels(SOURCES / f"{source}.cu", target=target).get_function(name)
        kernel(grid, block, (*args, *scalars), shared_mem=shared_mem)
    return [cupy.asnumpy(a) for a in on_gpu], on_cpu


def test_integer_tensor_cores_agree_bit_for_bit(cupy, rng):
    a = rng.integers(0, 2**32, (32, 4), dtype=np.uint32)
    b = rng.integers(0, 2**32, (32, 2), dtype=np.uint32)
    c = rng.integers(-(2**31), 2**31, (32, 4)).astype(np.int32)
    gpu, cpu = run_both(cupy, "ptx", "mma_s8", (1,), (32,), [a, b, c, np.zeros_like(c)])
    assert np.array_equal(gpu[3], cpu[3])


@pytest.mark.parametrize(
    ("name", "kind"), [("mma_f16", "f2"), ("mma_bf16", "bf"), ("mma_tf32", "f4")]
)
def test_floating_tensor_cores_agree_to_rounding(cupy, rng, name, kind):
    def registers(count):
        values = rng.standard_normal((32, count * (1 if kind == "f4" else 2))).astype(np.float32)
        if kind == "f4":
            return values.view(np.uint32)
        if kind == "bf":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
        return values.astype(np.float16).view(np.uint32)

    c = rng.standard_normal((32, 4)).astype(np.float32)
    arrays = [registers(4), registers(2), c, np.zeros_like(c)]
    gpu, cpu = run_both(cupy, "ptx", name, (1,), (32,), arrays)
    np.testing.assert_allclose(gpu[3], cpu[3], atol=2e-5)


def test_bits_loads_copies_and_conversions_agree_bit_for_bit(cupy, rng):
    words = rng.integers(0, 2**32, (400, 3), dtype=np.uint32)
    tile = rng.integers(0, 2**32, 128, dtype=np.uint32)
    floats = rng.standard_normal((64, 2)).astype(np.float32)
    data = rng.integers(0, 256, 512).astype(np.uint8)
    cases = [
        ("bit_functions", (4,), (128,), [words, np.zeros((400, 5), np.uint32)], (np.int32(400),)),
        ("ldmatrix_all", (1,), (32,), [tile, np.zeros((32, 12), np.uint32)], ()),
        ("cp_async_all", (1,), (32,), [data, np.zeros((3, 128), np.uint32)], (np.int32(399),)),
        ("cp_async_predicates", (1,), (32,), [tile, np.zeros(224, np.uint32)], (np.int32(37),)),
        ("streaming_loads", (1,), (32,), [tile, np.zeros((32, 12), np.uint32)], ()),
        ("conversions", (1,), (64,), [floats, np.zeros((64, 2), np.uint32)], (np.int32(64),)),
    ]
    for name, grid, block, arrays, scalars in cases:
        gpu, cpu = run_both(cupy, "ptx", name, grid, block, arrays, scalars)
        assert np.array_equal(gpu[-1], cpu[-1]), name


def test_a_half_gemv_and_paged_attention_agree_to_rounding(cupy, rng):
    w, x = rng.standard_normal((33, 1000)).astype(np.float16), rng.standard_normal(1000)
    arrays = [w, x.astype(np.float16), np.zeros(33, np.float32)]
    scalars = (np.int32(33), np.int32(1000), np.int32(504))
    gpu, cpu = run_both(cupy, "gemv_fp16", "gemv_fp16", (9, 2), (128,), arrays, scalars)
    np.testing.assert_allclose(gpu[2], cpu[2], rtol=1e-5, atol=1e-4)

    q = rng.standard_normal((3, 4, 64)).astype(np.float16)
    keys, values = (rng.standard_normal((12, 16, 2, 64)).astype(np.float16) for _ in range(2))
    table = rng.permutation(12).reshape(3, 4).astype(np.int32)
    lengths = np.array([1, 37, 64], np.int32)
    arrays = [q, keys, values, table, lengths, np.zeros((3, 4, 64), np.float32)]
    scalars = (np.int32(4), np.int32(2), np.int32(4), np.float32(0.125))
    gpu, cpu = run_both(cupy, "paged_decode", "paged_decode", (4, 3), (128,), arrays, scalars)
    np.testing.assert_allclose(gpu[5], cpu[5], atol=2e-5)
