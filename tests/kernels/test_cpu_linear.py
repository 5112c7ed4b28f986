"""Dense linear layers: right against float64; bits of a row do not depend on the call it is in."""

import numpy as np
import pytest

from kernels.cpu import PackedLinear, backend, linear
from kernels.cpu.backend import ALL_PATHS

COMPILED = [p for p in ALL_PATHS if p not in ("numba", "numpy")]
SHAPES = [(1, 1, 1), (2, 5, 3), (3, 17, 33), (8, 512, 96), (13, 300, 70), (25, 700, 129)]


@pytest.fixture(params=ALL_PATHS)
def path(request):
    if request.param not in backend().available:
        pytest.skip(f"{request.param} does not run on this machine")
    return request.param


@pytest.fixture(params=COMPILED)
def compiled(request):
    if request.param not in backend().available:
        pytest.skip(f"{request.param} does not run on this machine")
    return request.param


def random_weights(rng, rows, columns, kind):
    """Weights of this kind, and the float32 values they stand for."""
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "float32":
        return values, values
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    return halves, (halves.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "columns", "rows"), SHAPES)
def test_products_agree_with_float64(path, kind, tokens, columns, rows):
    rng = np.random.default_rng(tokens)
    weight, values = random_weights(rng, rows, columns, kind)
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32)
    expected = x.astype(np.float64) @ values.T.astype(np.float64) + bias
    # the error bound of a chain of K rounded additions, per output
    bound = np.abs(x).astype(np.float64) @ np.abs(values).T + np.abs(bias)
    bound *= (columns + 2) * np.finfo(np.float32).eps
    for given in (weight, PackedLinear.pack(weight)):
        found = linear(x, given, bias, path=path)
        assert found.dtype == np.float32
        assert (np.abs(found - expected) <= bound).all()


def test_without_a_bias_small_whole_numbers_are_multiplied_exactly(path):
    rng = np.random.default_rng(1)
    x = rng.integers(-8, 9, (9, 333)).astype(np.float32)
    weight = rng.integers(-8, 9, (77, 333)).astype(np.float32)
    assert np.array_equal(linear(x, PackedLinear.pack(weight), path=path), x @ weight.T)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("columns", "rows"), [(64, 64), (301, 95), (2100, 40)])
def test_a_row_is_the_same_bit_for_bit_whatever_rows_share_the_call(compiled, kind, columns, rows):
    rng = np.random.default_rng(columns)
    weight = PackedLinear.pack(random_weights(rng, rows, columns, kind)[0])
    x = rng.standard_normal((230, columns)).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32)
    whole = linear(x, weight, bias, path=compiled)
    for tokens in (*range(1, 27), 100, 229):
        first = int(rng.integers(0, 230 - tokens))
        part = linear(x[first : first + tokens].copy(), weight, bias, path=compiled)
        assert np.array_equal(part, whole[first : first + tokens])


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_neither_packing_nor_threads_nor_splitting_the_outputs_changes_a_bit(
    compiled, kind, tokens
):
    rng = np.random.default_rng(tokens)
    weight, _ = random_weights(rng, 210, 519, kind)
    x = rng.standard_normal((tokens, 519)).astype(np.float32)
    packed = PackedLinear.pack(weight)
    whole = linear(x, packed, path=compiled)
    assert np.array_equal(linear(x, weight, path=compiled), whole)
    for threads in (2, 3, 9):
        assert np.array_equal(linear(x, packed, path=compiled, threads=threads), whole)
        assert np.array_equal(linear(x, weight, path=compiled, threads=threads), whole)
    assert np.array_equal(linear(x, weight[37:99], path=compiled), whole[:, 37:99])


def test_paths_with_fused_multiply_adds_agree_bit_for_bit():
    if not {"avx512", "avx2"} <= set(backend().available):
        pytest.skip("needs both paths")
    rng = np.random.default_rng(3)
    weight = PackedLinear.pack(rng.standard_normal((100, 700)).astype(np.float32))
    x = rng.standard_normal((17, 700)).astype(np.float32)
    assert np.array_equal(linear(x, weight, path="avx512"), linear(x, weight, path="avx2"))


def test_no_tokens_give_no_rows(path):
    weight = np.ones((5, 3), np.float32)
    assert linear(np.empty((0, 3), np.float32), weight, path=path).shape == (0, 5)


def test_nan_and_infinity_reach_the_outputs_they_belong_to_and_no_other(path):
    rng = np.random.default_rng(4)
    x = rng.random((3, 40)).astype(np.float32) + 1
    weight = rng.random((50, 40)).astype(np.float32) + 1
    clean = linear(x, weight, path=path)
    x[1, 39] = np.nan
    weight[49, 0] = np.inf
    found = linear(x, PackedLinear.pack(weight), path=path)
    assert np.isnan(found[1]).all()
    assert np.isposinf(found[[0, 2], 49]).all()
    assert np.array_equal(found[[0, 2], :49], clean[[0, 2], :49])


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64])
def test_unpacking_gives_the_weights_back(kind, rows):
    weight, _ = random_weights(np.random.default_rng(rows), rows, 7, kind)
    assert np.array_equal(PackedLinear.pack(weight).unpacked(), weight)


def test_rows_with_a_stride_are_packed_and_multiplied():
    rng = np.random.default_rng(5)
    wide = rng.standard_normal((40, 90)).astype(np.float32)
    x = rng.standard_normal((3, 50)).astype(np.float32)
    part = wide[:, 20:70]
    expected = linear(x, np.ascontiguousarray(part))
    assert np.array_equal(linear(x, part), expected)
    assert np.array_equal(linear(x, PackedLinear.pack(part)), expected)


def test_the_result_is_written_to_out():
    x, weight = np.ones((2, 3), np.float32), np.ones((40, 3), np.float32)
    out = np.empty((2, 40), np.float32)
    assert linear(x, weight, out=out) is out
    assert (out == 3).all()


X, W = np.ones((2, 8), np.float32), np.ones((4, 8), np.float32)
READ_ONLY = np.ones((2, 4), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X[:, :7]}, r"x must be float32 \[T, 8\], found \[2, 7\]"),
        ({"x": X[0]}, r"x must be float32 \[T, 8\], found \[8\]"),
        ({"x": X.astype(np.float64)}, "x must be float32"),
        ({"x": np.asfortranarray(X)}, "x must be C-contiguous"),
        ({"weight": W.astype(np.float16)}, r"weight must be float32 or uint16 \(bfloat16\)"),
        ({"weight": W[0]}, "weight must be "),
        ({"weight": W[:0]}, "weight must be "),
        ({"weight": np.asfortranarray(W)}, "weight must have contiguous, aligned rows"),
        ({"weight": W[::-1]}, "weight must have contiguous, aligned rows"),
        ({"bias": np.ones(5, np.float32)}, r"bias must be float32 \[4\], found float32 \[5\]"),
        ({"threads": 0}, r"threads must be 1..256, found 0"),
        ({"out": np.ones((2, 5), np.float32)}, r"out must be float32 \[2, 4\]"),
        ({"out": READ_ONLY}, "out must be writeable"),
        ({"path": "mmx"}, "path must be one of"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(arguments, message):
    given = {"x": X, "weight": W, **arguments}
    with pytest.raises(ValueError, match=message) as error:
        linear(given.pop("x"), given.pop("weight"), given.pop("bias", None), **given)
    assert "\n" not in str(error.value)


def test_an_output_over_the_input_is_refused():
    memory = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="out must not share memory with x"):
        linear(memory, np.ones((8, 8), np.float32), out=memory)


def test_panels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"panels must be float32 \[2, 3, 32\]"):
        PackedLinear(np.zeros((1, 3, 32), np.float32), 33, 3)
