"""One expert matrix on every CPU path of this machine, against the numpy reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import ContiguousBlock, backend, block_matmul
from kernels.cpu.backend import ALL_PATHS
from kernels.planes import pack_planes
from kernels.reference import block_matmul as reference_matmul

COLUMNS = [1, 31, 33, 64, 65, 127, 200, 256, 257, 704, 1000]


@pytest.fixture(params=ALL_PATHS)
def path(request):
    if request.param not in backend().available:
        pytest.skip(f"{request.param} does not run on this machine")
    return request.param


def random_block(rng, rows, columns, bits):
    planes = pack_planes(rng.integers(0, 256, (rows, columns), dtype=np.uint8), 8)
    table = rng.standard_normal((rows, 1 << bits)).astype(np.float16)
    return ContiguousBlock(planes, table, bits, columns)


def expected_product(x, block):
    return reference_matmul(x, block.planes, block.table, block.bits, block.columns)


def relative_error(found, expected, x, block):
    """Largest error over the sum of the sizes of the terms, the scale that rounding works on."""
    size = reference_matmul(np.abs(x), block.planes, np.abs(block.table), block.bits, block.columns)
    return float(np.max(np.abs(found - expected) / size))


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_width_and_odd_size_agrees_with_the_reference(path, bits):
    rng = np.random.default_rng(bits)
    for columns in COLUMNS:
        for rows in (1, 7, 17):
            block = random_block(rng, rows, columns, bits)
            for tokens in (1, 2, 3, 4, 7, 13):
                x = rng.standard_normal((tokens, columns)).astype(np.float32)
                found = block_matmul(x, block, path=path)
                assert found.dtype == np.float32
                assert relative_error(found, expected_product(x, block), x, block) < 1e-6


@pytest.mark.parametrize("columns", [640, 2600, 5000])
@pytest.mark.parametrize("bits", [2, 4, 5, 6, 8])
def test_a_tokens_result_does_not_depend_on_its_company_or_the_threads(path, bits, columns):
    rng = np.random.default_rng(columns + bits)
    block = random_block(rng, 19, columns, bits)
    x = rng.standard_normal((40, columns)).astype(np.float32)
    together = block_matmul(x, block, path=path)
    assert relative_error(together, expected_product(x, block), x, block) < 1e-6
    for tokens in (1, 2, 3, 4, 5, 6, 8, 9, 11, 25):
        found = block_matmul(x[11 - tokens // 3 :][:tokens].copy(), block, path=path, threads=3)
        assert np.array_equal(found, together[11 - tokens // 3 :][:tokens])


def test_every_number_of_tokens_up_to_forty(path):
    rng = np.random.default_rng(3)
    block = random_block(rng, 5, 96, 3)
    x = rng.standard_normal((40, 96)).astype(np.float32)
    expected = expected_product(x, block)
    for tokens in range(41):
        found = block_matmul(x[:tokens], block, path=path)
        assert found.shape == (tokens, 5)
        assert np.allclose(found, expected[:tokens], rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 40),
    columns=st.integers(1, 400),
    bits=st.integers(2, 8),
    tokens=st.integers(1, 12),
    threads=st.integers(1, 3),
)
def test_random_shapes_agree_with_the_reference(seed, rows, columns, bits, tokens, threads):
    rng = np.random.default_rng(seed)
    block = random_block(rng, rows, columns, bits)
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    found = block_matmul(x, block, threads=threads)
    assert relative_error(found, expected_product(x, block), x, block) < 1e-6


@pytest.mark.parametrize("bits", range(2, 9))
def test_each_code_meets_its_own_table_entry_exactly(path, bits):
    """Unit vectors pick single weights; products with 1 and 0 are exact, subnormals included."""
    entries = np.linspace(-2.0, 2.0, 3 << bits).astype(np.float16).reshape(3, 1 << bits)
    entries[1] *= np.float16(2.0**-15)
    codes = np.resize(np.arange(256, dtype=np.uint8), (3, 300))
    block = ContiguousBlock(pack_planes(codes, 8), entries, bits, 300)
    found = block_matmul(np.eye(300, dtype=np.float32), block, path=path)
    expected = np.take_along_axis(entries, (codes >> (8 - bits)).astype(int), axis=1)
    assert np.array_equal(found.T, expected.astype(np.float32))


@pytest.mark.parametrize("bits", [2, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("tokens", [3, 9])
def test_nan_and_infinity_pass_as_in_numpy_and_stay_with_their_token(path, bits, tokens):
    rng = np.random.default_rng(bits)
    block = random_block(rng, 6, 75, bits)
    block.table[3, :] = np.inf
    x = rng.standard_normal((tokens, 75)).astype(np.float32)
    x[0, 74], x[1, 3] = np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        expected = expected_product(x, block)
    found = block_matmul(x, block, path=path)
    assert np.isfinite(expected[2]).sum() == 5
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_an_infinite_entry_that_no_weight_has_does_no_harm(path):
    """Padding has code 0; it must not meet the padded inputs as 0 * infinity."""
    for bits in range(2, 9):
        codes = np.full((2, 37), 255, np.uint8)
        table = np.ones((2, 1 << bits), np.float16)
        table[:, 0] = np.inf
        block = ContiguousBlock(pack_planes(codes, 8), table, bits, 37)
        found = block_matmul(np.ones((1, 37), np.float32), block, path=path)
        assert np.array_equal(found, [[37.0, 37.0]])


def test_results_are_written_where_the_caller_wants_them(path):
    rng = np.random.default_rng(8)
    block = random_block(rng, 9, 70, 4)
    x = rng.standard_normal((2, 70)).astype(np.float32)
    around = np.full((4, 9), 7.0, np.float32)
    assert block_matmul(x, block, out=around[1:3], path=path) is not None
    assert np.array_equal(around[1:3], block_matmul(x, block, path=path))
    assert (around[[0, 3]] == 7.0).all()


X = np.zeros((2, 40), np.float32)
READ_ONLY = np.zeros((2, 3), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.zeros((2, 41), np.float32), {}, r"x must be float32 \[T, 40\]"),
        (np.zeros(40, np.float32), {}, r"found \[40\]"),
        (np.zeros((2, 40)), {}, "x must be float32"),
        (np.zeros((2, 80), np.float32)[:, ::2], {}, "C-contiguous"),
        (np.zeros((2, 40), ">f4"), {}, "x must be"),
        (np.zeros((2, 161), np.uint8)[:, 1:].reshape(-1)[: 2 * 160].view(np.uint8), {}, "x must"),
        (X, {"threads": 0}, "threads must be 1..256, found 0"),
        (X, {"threads": 1000}, "threads"),
        (X, {"out": np.zeros((2, 4), np.float32)}, r"out must be float32 \[2, 3\]"),
        (X, {"out": np.zeros((2, 3))}, "found float64"),
        (X, {"out": np.zeros((3, 2), np.float32).T}, "C-contiguous"),
        (X, {"out": READ_ONLY}, "writeable"),
        (X, {"path": "sse"}, "path must be one of"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_read(x, options, message):
    block = random_block(np.random.default_rng(0), 3, 40, 4)
    with pytest.raises(ValueError, match=message):
        block_matmul(x, block, **options)


PLANES = np.zeros((4, 3, 2), np.uint32)
TABLE = np.zeros((3, 16), np.float16)


@pytest.mark.parametrize(
    ("planes", "table", "bits", "columns", "message"),
    [
        (PLANES, TABLE, 5, 40, "planes of 5 bits"),
        (PLANES, TABLE, 1, 40, "2..8, found 1"),
        (PLANES, TABLE, 9, 40, "2..8, found 9"),
        (PLANES, TABLE, 4, 65, "65 columns"),
        (PLANES, TABLE, 4, 0, "columns"),
        (PLANES.astype(np.int32), TABLE, 4, 40, "uint32"),
        (PLANES[:, :, ::-1], TABLE, 4, 40, "C-contiguous"),
        (np.zeros((4, 6, 2), np.uint32)[:, ::2], TABLE, 4, 40, "C-contiguous"),
        (PLANES, TABLE.astype(np.float32), 4, 40, "table must be float16"),
        (PLANES, TABLE, 3, 40, r"table must be float16 \[3, 8\]"),
        (PLANES, TABLE[:2], 4, 40, r"\[3, 16\]"),
        (PLANES, np.zeros((3, 32), np.float16)[:, ::2], 4, 40, "C-contiguous"),
    ],
)
def test_weights_that_do_not_fit_are_refused(planes, table, bits, columns, message):
    with pytest.raises(ValueError, match=message):
        ContiguousBlock(planes, table, bits, columns)
