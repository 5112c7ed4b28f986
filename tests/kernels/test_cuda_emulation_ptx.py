"""The functions of ptx_compat.h against the PTX manual, written down here in numpy once more."""

from pathlib import Path

import numpy as np
import pytest

from kernels.cuda_emulation import emulator
from kernels.cuda_emulation.emulator import EmulationError, RawModule

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
SOURCE = (Path(__file__).parent / "emulation_sources" / "ptx.cu").read_text()
SCHEDULES = [0, 1, 2, 3]
LANE = np.arange(32)
GROUP, IN_GROUP = LANE // 4, LANE % 4


@pytest.fixture(scope="module")
def ptx() -> RawModule:
    return RawModule(code=SOURCE)


# PTX ISA 9.0, 9.7.14.5.8 (m16n8k16, 16 bits) and 9.7.14.5.11 (m16n8k32, 8 bits): where element i
# of a lane's fragment lies. `per` is the number of elements in a register.
def a_place(i: int, per: int) -> tuple[np.ndarray, np.ndarray]:
    second_rows = per <= i < 2 * per or 3 * per <= i
    column = IN_GROUP * per + i % per + (4 * per if i >= 2 * per else 0)
    return GROUP + 8 * second_rows, column


def b_place(i: int, per: int) -> tuple[np.ndarray, np.ndarray]:
    return IN_GROUP * per + i % per + (4 * per if i >= per else 0), GROUP


def d_place(i: int) -> tuple[np.ndarray, np.ndarray]:
    return GROUP + 8 * (i >= 2), IN_GROUP * 2 + i % 2


def fragments(matrix: np.ndarray, count: int, place: object) -> np.ndarray:
    values = np.zeros((32, count), matrix.dtype)
    for i in range(count):
        values[:, i] = matrix[place(i)]  # type: ignore[operator]
    return values


def run_mma(ptx: RawModule, name: str, a, b, c, per: int, sched: int) -> np.ndarray:
    ra = fragments(a, 4 * per, lambda i: a_place(i, per)).view(np.uint32)
    rb = fragments(b, 2 * per, lambda i: b_place(i, per)).view(np.uint32)
    rc = fragments(c, 4, d_place)
    rd = np.zeros_like(rc)
    ptx.get_function(name)((1,), (32,), (ra, rb, rc, rd), sched=sched)
    out = np.zeros_like(c)
    for i in range(4):
        out[d_place(i)] = rd[:, i]
    return out


@pytest.mark.parametrize("sched", SCHEDULES)
def test_int8_mma_is_the_exact_integer_product(ptx, sched):
    rng = np.random.default_rng(sched)
    a = rng.integers(-128, 128, (16, 32), dtype=np.int8)
    b = rng.integers(-128, 128, (32, 8), dtype=np.int8)
    a[0], b[:, 0] = -128, -128
    c = rng.integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
    want = (a.astype(np.int64) @ b.astype(np.int64) + c).astype(np.int32)  # wraps, as the device
    assert np.array_equal(run_mma(ptx, "mma_s8", a, b, c, 4, sched), want)


@pytest.mark.parametrize("sched", SCHEDULES)
def test_half_mma_accumulates_in_float(ptx, sched):
    rng = np.random.default_rng(sched)
    a = rng.standard_normal((16, 16)).astype(np.float16)
    b = rng.standard_normal((16, 8)).astype(np.float16)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(run_mma(ptx, "mma_f16", a, b, c, 2, sched), want, atol=1e-5)


@pytest.mark.parametrize("sched", SCHEDULES)
def test_bfloat16_mma_accumulates_in_float(ptx, sched):
    rng = np.random.default_rng(sched)

    def bf16(shape):
        return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )

    def wide(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    a, b = bf16((16, 16)), bf16((16, 8))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    got = run_mma(ptx, "mma_bf16", a, b, c, 2, sched)
    np.testing.assert_allclose(got, wide(a) @ wide(b) + c, atol=1e-5)


@pytest.mark.parametrize("sched", SCHEDULES)
def test_tf32_mma_takes_halves_exactly_and_cuts_longer_numbers(ptx, sched):
    rng = np.random.default_rng(sched)
    a = rng.standard_normal((16, 8)).astype(np.float16).astype(np.float32)
    b, c = rng.standard_normal((8, 8)).astype(np.float32), np.zeros((16, 8), np.float32)
    cut = (b.view(np.uint32) & 0xFFFFE000).view(np.float32)
    got = run_mma(ptx, "mma_tf32", a, b, c, 1, sched)
    np.testing.assert_allclose(got, a.astype(np.float64) @ cut.astype(np.float64), atol=1e-6)


def test_every_single_int8_position_reaches_its_own_product(ptx):
    """A one at each (row, k): the layouts cannot be wrong in two ways that cancel."""
    for k in range(32):
        a, b = np.zeros((16, 32), np.int8), np.zeros((32, 8), np.int8)
        a[:, k], b[k] = np.arange(16) - 8, np.arange(8) + 1
        got = run_mma(ptx, "mma_s8", a, b, np.zeros((16, 8), np.int32), 4, 0)
        assert np.array_equal(got, np.outer(np.arange(16) - 8, np.arange(8) + 1))


def prmt(a: int, b: int, selector: int) -> int:
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    out = []
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        value = pool[nibble & 7]
        out.append((255 if value >= 128 else 0) if nibble & 8 else value)
    return int.from_bytes(bytes(out), "little")


def lop3(table: int, a: int, b: int, c: int) -> int:
    bits = [
        (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)
    ]
    return sum(bits)


def test_prmt_lop3_and_byte_perm_follow_their_tables(ptx):
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, (400, 3), dtype=np.uint32)
    words[:2, :2] = 0x80FF7F00
    words[0, 2], words[1, 2] = 0xFEDC, 0x3210
    out = np.zeros((400, 5), np.uint32)
    ptx.get_function("bit_functions")((4,), (128,), (words, out, np.int32(400)))
    for (a, b, c), got in zip(words.tolist(), out.tolist(), strict=True):
        assert got == [
            prmt(a, b, c),
            (a & b) | c,
            a ^ b ^ c,
            lop3(0x1D, a, b, c),
            prmt(a, b, c & 0x7777),  # nvcc masks the selector of __byte_perm
        ]


@pytest.mark.parametrize("sched", SCHEDULES)
def test_ldmatrix_hands_each_lane_two_neighbours_of_its_row(ptx, sched):
    tile = np.random.default_rng(2).integers(0, 2**16, (32, 8)).astype(np.uint16)
    out = np.zeros((32, 12), np.uint32)
    ptx.get_function("ldmatrix_all")((1,), (32,), (tile.view(np.uint32), out), sched=sched)
    halves = out.view(np.uint16).reshape(32, 12, 2)
    for register in range(12):
        matrix = register % 4 if register < 8 else register % 2
        block = tile[8 * matrix : 8 * matrix + 8]
        if register in (4, 5, 6, 7, 10, 11):
            block = block.T
        assert np.array_equal(halves[:, register], block.reshape(32, 2))


@pytest.mark.parametrize("sched", SCHEDULES)
@pytest.mark.parametrize("num_bytes", [0, 1, 63, 100, 511, 512])
def test_cp_async_copies_what_is_there_and_fills_with_zero(ptx, sched, num_bytes):
    src = np.random.default_rng(3).integers(0, 256, 512).astype(np.uint8)
    out = np.full((3, 128), 7, np.uint32)
    ptx.get_function("cp_async_all")((1,), (32,), (src, out, np.int32(num_bytes)), sched=sched)
    want = np.where(np.arange(512) < num_bytes, src, 0).astype(np.uint8).view(np.uint32)
    assert (out == want).all()


def test_cp_async_without_its_wait_gives_wrong_data():
    module = RawModule(code=SOURCE, options=("-DNO_WAIT",))
    src = np.arange(512).astype(np.uint8)
    for sched in SCHEDULES:
        out = np.zeros((3, 128), np.uint32)
        args = (src, out, np.int32(512))
        module.get_function("cp_async_all")((1,), (32,), args, sched=sched)
        assert not (out == src.view(np.uint32)).any()


def test_cp_async_switched_off_never_reads_its_source(ptx):
    """Twenty words are there; the guard page after them would stop a read."""
    src, out = np.arange(1, 21, dtype=np.uint32), np.full(224, 9, np.uint32)
    ptx.get_function("cp_async_predicates")((1,), (32,), (src, out, np.int32(20)))
    for size, part in ((1, out[:32]), (2, out[32:96]), (4, out[96:])):
        whole = 20 // size * size
        assert np.array_equal(part[:whole], src[:whole])
        assert not part[whole:].any()


def test_streaming_loads_return_what_lies_there(ptx):
    src, out = np.arange(128, dtype=np.uint32), np.zeros((32, 12), np.uint32)
    ptx.get_function("streaming_loads")((1,), (32,), (src, out))
    rows = src.reshape(32, 4)
    assert np.array_equal(out, np.hstack([rows, rows, rows[:, :2], rows[:, :2]]))


def test_packed_conversions_round_to_nearest_even(ptx):
    floats = np.random.default_rng(4).standard_normal((64, 2)).astype(np.float32)
    floats[0] = 1 + 2.0**-11, 1 + 3 * 2.0**-11  # ties of half
    floats[1] = 1 + 2.0**-8, 1 + 3 * 2.0**-8  # ties of bfloat16
    out = np.zeros((64, 2), np.uint32)
    ptx.get_function("conversions")((1,), (64,), (floats, out, np.int32(64)))
    halves = out.view(np.uint16).reshape(64, 2, 2)
    assert np.array_equal(halves[:, 0].view(np.float16), floats.astype(np.float16))
    bits = floats.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(halves[:, 1], rounded)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bug_mma_short_warp", "have exited"),
        ("bug_cp_async_misaligned", "not aligned to its 16 bytes"),
        ("bug_cp_async_to_global", "not in shared memory"),
    ],
)
def test_misuse_is_an_error(ptx, name, message):
    a = np.zeros(64, np.uint32)
    args = (np.zeros(32, np.int32),) if name == "bug_mma_short_warp" else (a, a.copy())
    with pytest.raises(EmulationError, match=message):
        ptx.get_function(name)((1,), (32,), args)
