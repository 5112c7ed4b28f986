"""The emulated device: CUDA features one by one, and errors that a GPU would not report."""

from pathlib import Path

import numpy as np
import pytest

from kernels.cuda_emulation import emulator
from kernels.cuda_emulation.emulator import EmulationError, RawModule

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
SOURCES = Path(__file__).parent / "emulation_sources"
SCHEDULES = [0, 1, 2, 3]
SRC = {
    name: (SOURCES / f"{name}.cu").read_text()
    for name in ("gemv_fp16", "misc", "tensor_core", "paged_decode")
}
rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def misc():
    return RawModule(
        code=SRC["misc"], name_expressions=["block_max<float, 64>", "block_max<int, 128>"]
    )


@pytest.mark.parametrize("sched", SCHEDULES)
@pytest.mark.parametrize("m,k", [(1, 8), (33, 1000), (130, 512)])
def test_a_half_gemv_with_split_k_equals_float64(sched, m, k):
    W, x = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal(k).astype(np.float16)
    y = np.zeros(m, np.float32)
    f = RawModule(code=SRC["gemv_fp16"]).get_function("gemv_fp16")
    f(
        ((m + 3) // 4, 2),
        (128,),
        (W, x, y, np.int32(m), np.int32(k), np.int32((k // 2 + 7) // 8 * 8)),
        sched=sched,
    )
    ref = W.astype(np.float64) @ x.astype(np.float64)
    np.testing.assert_allclose(y, ref, rtol=2e-5, atol=2e-4)


def test_a_missing_barrier_in_the_gemv_is_found():
    """Without its __syncthreads the kernel must fail under some schedule."""
    code = SRC["gemv_fp16"].replace("__syncthreads();  // SYNC", "")
    f = RawModule(code=code).get_function("gemv_fp16")
    W, x = np.ones((4, 256), np.float16), np.ones(256, np.float16)
    bad = 0
    for sched in SCHEDULES:
        y = np.zeros(4, np.float32)
        f((1,), (128,), (W, x, y, np.int32(4), np.int32(256), np.int32(256)), sched=sched)
        bad += not np.array_equal(y, np.full(4, 256, np.float32))
    assert bad


def test_every_thread_of_a_grid_runs_once(misc):
    a, b, c = (np.arange(1000, dtype=np.float32) for _ in range(3))
    misc.get_function("vadd")((4,), (256,), (a, b, c, np.int32(1000)))
    assert np.array_equal(c, a + b)


def test_dynamic_shared_memory_ends_where_the_launch_says(misc):
    x, y = np.arange(512, dtype=np.int32), np.zeros(512, np.int32)
    for s in SCHEDULES:
        misc.get_function("reverse_block")((2,), (256,), (x, y), shared_mem=1024, sched=s)
        assert np.array_equal(y.reshape(2, 256), x.reshape(2, 256)[:, ::-1])
    with pytest.raises(EmulationError, match="illegal memory access"):
        misc.get_function("reverse_block")((2,), (256,), (x, y), shared_mem=1008)


def test_dynamic_shared_memory_without_barrier_is_found():
    f = RawModule(code=SRC["misc"], options=("-DNO_SYNC",)).get_function("reverse_block")
    x, res = np.arange(256, dtype=np.int32), []
    for s in SCHEDULES:
        y = np.zeros(256, np.int32)
        f((1,), (256,), (x, y), shared_mem=1024, sched=s)
        res.append(np.array_equal(y, x[::-1]))
    assert not all(res)


@pytest.mark.parametrize("sched", SCHEDULES)
def test_the_last_block_sees_what_all_others_wrote(misc, sched):
    x = rng.integers(-5, 5, 5000).astype(np.float32)
    part, ticket, out = np.zeros(7, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32)
    misc.get_function("sum_last_block")(
        (7,), (128,), (x, part, ticket, out, np.int32(x.size)), sched=sched
    )
    assert out[0] == x.sum()


def test_half_and_bfloat16_arithmetic_rounds_once(misc):
    n = 64
    a, b = (
        rng.standard_normal(2 * n).astype(np.float16),
        rng.standard_normal(2 * n).astype(np.float16),
    )
    p = (rng.standard_normal(n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    c, tot, q = np.zeros(2 * n, np.float16), np.zeros(1, np.float16), np.zeros(n, np.float32)
    misc.get_function("half_ops")((1,), (64,), (a, b, c, tot, p, q, np.int32(n)))
    mid = (a + np.float16(0.5)).astype(np.float16)
    ref = (a.astype(np.float64) * b.astype(np.float64) + mid.astype(np.float64)).astype(np.float16)
    assert np.array_equal(c, ref)
    pf = (p.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(q, pf * pf, rtol=1 / 256)
    t = np.float16(0)
    for i in range(8):
        t = np.float16(t + a[2 * i])
    assert tot[0] == t


@pytest.mark.parametrize("sched", SCHEDULES)
def test_ballot_and_popc_compact_a_list(misc, sched):
    x = rng.integers(-3, 3, 300).astype(np.int32)
    out, cnt = np.zeros(320, np.int32), np.zeros(1, np.int32)
    misc.get_function("compact")((5,), (64,), (x, out, cnt, np.int32(300)), sched=sched)
    assert cnt[0] == (x > 0).sum()
    assert sorted(out[: cnt[0]]) == sorted(x[x > 0])


def test_template_instances_are_reached_by_name_expression(misc):
    x, o = rng.standard_normal(64).astype(np.float32), np.zeros(1, np.float32)
    misc.get_function("block_max<float, 64>")((1,), (64,), (x, o, np.int32(64)), sched=1)
    assert o[0] == x.max()
    x, o = rng.integers(-9, 9, 128).astype(np.int32), np.zeros(1, np.int32)
    misc.get_function("block_max<int, 128>")((1,), (128,), (x, o, np.int32(128)), sched=1)
    assert o[0] == x.max()


@pytest.mark.parametrize("sched", SCHEDULES)
def test_wmma_equals_the_matrix_product(sched):
    m, n, k = 32, 48, 64
    A, B = (
        rng.standard_normal((m, k)).astype(np.float16),
        rng.standard_normal((k, n)).astype(np.float16),
    )
    C = np.zeros((m, n), np.float32)
    RawModule(code=SRC["tensor_core"]).get_function("gemm_wmma")(
        (n // 16, m // 16), (32,), (A, B, C, np.int32(m), np.int32(n), np.int32(k)), sched=sched
    )
    np.testing.assert_allclose(C, A.astype(np.float64) @ B.astype(np.float64), atol=1e-4)


@pytest.mark.parametrize("sched", SCHEDULES)
def test_a_pipelined_product_is_right_and_wrong_without_its_wait(sched):
    m, n, k = 32, 24, 80
    A, B = (
        rng.standard_normal((m, k)).astype(np.float16),
        rng.standard_normal((k, n)).astype(np.float16),
    )
    C = np.zeros((m, n), np.float32)
    args = (A, B, C, np.int32(m), np.int32(n), np.int32(k))
    RawModule(code=SRC["tensor_core"]).get_function("gemm_mma")(
        (n // 8, m // 16), (32,), args, sched=sched
    )
    ref = A.astype(np.float64) @ B.astype(np.float64)
    np.testing.assert_allclose(C, ref, atol=1e-4)
    RawModule(code=SRC["tensor_core"], options=("-DNO_WAIT",)).get_function("gemm_mma")(
        (n // 8, m // 16), (32,), args, sched=sched
    )
    assert not np.allclose(C, ref, atol=1e-2)  # a missing cp.async wait is seen


@pytest.mark.parametrize("sched", SCHEDULES)
def test_paged_attention_equals_softmax(sched):
    B, H, HKV, D, PAGE, pages, maxp = 3, 4, 2, 64, 16, 12, 4
    q = rng.standard_normal((B, H, D)).astype(np.float16)
    kc, vc = (rng.standard_normal((pages, PAGE, HKV, D)).astype(np.float16) for _ in range(2))
    table = rng.permutation(pages)[: B * maxp].reshape(B, maxp).astype(np.int32)
    ln = np.array([1, 37, 64], np.int32)
    out = np.zeros((B, H, D), np.float32)
    f = RawModule(code=SRC["paged_decode"]).get_function("paged_decode")
    f(
        (H, B),
        (128,),
        (
            q,
            kc,
            vc,
            table,
            ln,
            out,
            np.int32(H),
            np.int32(HKV),
            np.int32(maxp),
            np.float32(D**-0.5),
        ),
        sched=sched,
    )
    for b in range(B):
        k = kc[table[b]].reshape(-1, HKV, D)[: ln[b]].astype(np.float64)
        v = vc[table[b]].reshape(-1, HKV, D)[: ln[b]].astype(np.float64)
        for h in range(H):
            s = k[:, h // 2] @ q[b, h].astype(np.float64) * D**-0.5
            p = np.exp(s - s.max())
            np.testing.assert_allclose(out[b, h], (p / p.sum()) @ v[:, h // 2], atol=2e-5)


BUGS = [
    ("bug_null", (1,), lambda: (None,), "illegal memory access|undefined behaviour"),
    ("bug_div", (1,), lambda: (np.zeros(2, np.int32),), "division by zero|undefined behaviour"),
    ("bug_trap", (1,), lambda: (np.zeros(1, np.int32),), "__trap"),
    ("bug_divergent_barrier", (32,), lambda: (np.zeros(32, np.int32),), "divergent barrier"),
    ("bug_hang", (32,), lambda: (np.zeros(32, np.int32),), "deadlock"),
    ("bug_mask", (32,), lambda: (np.zeros(32, np.int32),), "does not name the calling lane"),
    (
        "bug_oob_read",
        (32,),
        lambda: (np.zeros(32, np.float32), np.zeros(32, np.float32), np.int32(16)),
        "illegal memory access",
    ),
    ("bug_oob_write", (1,), lambda: (np.zeros(32, np.float32), np.int32(16)), "wrote outside"),
    (
        "bug_misaligned",
        (1,),
        lambda: (np.zeros(32, np.float32), np.zeros(32, np.float32)),
        "undefined behaviour",
    ),
]


@pytest.mark.parametrize("name,block,args,match", BUGS, ids=[b[0] for b in BUGS])
def test_bugs_are_errors(name, block, args, match):
    m = RawModule(code=SRC["misc"], ubsan=True)
    with pytest.raises(EmulationError, match=match):
        m.get_function(name)((1,), block, args())


def test_shared_memory_that_nobody_wrote_is_nan(misc):
    o = np.zeros(64, np.float32)
    misc.get_function("bug_uninit_shared")((1,), (64,), (o,))
    assert np.isnan(o[0]) and (o[1:] == 1).all()


def test_a_shuffle_from_an_exited_lane_is_nan(misc):
    o = np.zeros(1, np.float32)
    f = misc.get_function("bug_exited_lane")
    f((1,), (32,), (o, np.int32(20)))
    assert np.isnan(o[0]) and f.stats["undefined_reads"] > 0


def test_a_missing_syncwarp_is_found(misc):
    x, res = np.arange(32, dtype=np.int32), []
    for s in SCHEDULES:
        y = np.zeros(32, np.int32)
        misc.get_function("bug_warp_sync")((1,), (32,), (x, y), sched=s)
        res.append(np.array_equal(y, x[::-1]))
    assert not all(res)


@pytest.mark.parametrize("sched", SCHEDULES)
def test_a_spin_lock_and_integer_warp_reductions(misc, sched):
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    misc.get_function("spin_lock")((3,), (64,), (lock, total), sched=sched)
    assert total[0] == 192
    a, o = rng.integers(-50, 50, 32).astype(np.int32), np.zeros(33, np.int32)
    misc.get_function("warp_int")((1,), (32,), (a, o), sched=sched)
    dot = a.view(np.int8).reshape(32, 4).astype(np.int32).sum(1)
    assert np.array_equal(o[:32], a.sum() + dot + (a & 1).sum())
    assert o[32] == (a > 0).sum()


def test_one_array_given_twice_stays_one_buffer(misc):
    x = np.arange(32, dtype=np.float32)
    misc.get_function("scale_in_place")((1,), (32,), (x, x))
    assert np.array_equal(x, 2 * np.arange(32, dtype=np.float32))


def test_a_wrong_dtype_is_refused(misc):
    with pytest.raises(EmulationError, match="array given for a f4 pointer"):
        misc.get_function("vadd")(
            (1,),
            (32,),
            (np.zeros(8), np.zeros(8, np.float32), np.zeros(8, np.float32), np.int32(8)),
        )
