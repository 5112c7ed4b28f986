"""A whole mixture-of-experts layer: a width of its own for every block, in one call."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import ContiguousBlock, ContiguousExperts, backend, moe_layer
from kernels.cpu.backend import ALL_PATHS
from kernels.planes import pack_planes
from kernels.reference import dequantize
from kernels.reference import moe_layer as reference_layer

COMPILED = [p for p in ALL_PATHS if p not in ("numba", "numpy")]


@pytest.fixture(params=ALL_PATHS)
def path(request):
    if request.param not in backend().available:
        pytest.skip(f"{request.param} does not run on this machine")
    return request.param


def random_experts(rng, experts, hidden, inner, widths=None):
    blocks = []
    for i in range(2 * experts):
        rows, columns = (hidden, inner) if i % 2 else (2 * inner, hidden)
        bits = 2 + i % 7 if widths is None else widths[i]
        planes = pack_planes(rng.integers(0, 256, (rows, columns), dtype=np.uint8), 8)
        table = rng.standard_normal((rows, 1 << bits)) / np.sqrt(columns)
        blocks.append(ContiguousBlock(planes, table.astype(np.float16), bits, columns))
    return ContiguousExperts(blocks)


def random_routing(rng, tokens, top, experts):
    index = np.array([rng.permutation(experts)[:top] for _ in range(tokens)], np.int32)
    return index.reshape(tokens, top), rng.random((tokens, top)).astype(np.float32)


def expected_layer(x, index, weight, layer, activation, **options):
    weights = [dequantize(b.planes, b.table, b.bits, b.columns) for b in layer.blocks]
    return reference_layer(x, index, weight, weights[::2], weights[1::2], activation, **options)


def close(found, expected):
    return np.max(np.abs(found - expected)) <= 2e-6 * np.max(np.abs(expected))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [1, 3, 21])
def test_mixed_widths_and_empty_experts_agree_with_the_reference(path, activation, tokens):
    rng = np.random.default_rng(tokens)
    layer = random_experts(rng, 9, 70, 45)
    index, weight = random_routing(rng, tokens, 2, 7)
    x = rng.standard_normal((tokens, 70)).astype(np.float32)
    found = moe_layer(x, index, weight, layer, activation, path=path)
    assert close(found, expected_layer(x, index, weight, layer, activation))


def test_more_slots_than_one_group_of_buffers_holds(path):
    """Experts with over 256 tokens are worked through in runs; groups end between experts."""
    if path == "numba":
        pytest.skip("the same code as numpy above the block product")
    rng = np.random.default_rng(11)
    layer = random_experts(rng, 6, 33, 17)
    index, weight = random_routing(rng, 600, 2, 6)
    index[:560, 0] = 2
    x = rng.standard_normal((600, 33)).astype(np.float32)
    found = moe_layer(x, index, weight, layer, "silu", path=path)
    assert close(found, expected_layer(x, index, weight, layer, "silu"))


def test_one_token_to_all_experts_and_an_expert_named_twice(path):
    rng = np.random.default_rng(12)
    layer = random_experts(rng, 5, 64, 40)
    index = np.array([[0, 1, 2, 3, 4], [3, 3, 3, 0, 0]], np.int32)
    weight = rng.random((2, 5)).astype(np.float32)
    x = rng.standard_normal((2, 64)).astype(np.float32)
    found = moe_layer(x, index, weight, layer, "gelu_tanh", path=path)
    assert close(found, expected_layer(x, index, weight, layer, "gelu_tanh"))


def test_no_tokens_and_no_experts_per_token_give_zeros(path):
    rng = np.random.default_rng(13)
    layer = random_experts(rng, 2, 20, 9)
    x = rng.standard_normal((3, 20)).astype(np.float32)
    none = np.zeros((3, 0), np.int32), np.zeros((3, 0), np.float32)
    out = np.full((3, 20), np.nan, np.float32)
    assert not moe_layer(x, *none, layer, "silu", out=out, path=path).any()
    empty = moe_layer(x[:0], none[0][:0], none[1][:0], layer, "silu", path=path)
    assert empty.shape == (0, 20)


def test_expert_scales_multiply_gate_weights(path):
    rng = np.random.default_rng(14)
    layer = random_experts(rng, 4, 50, 30)
    index, weight = random_routing(rng, 6, 2, 4)
    scale = np.array([2.0, -0.5, 0.0, 1.5], np.float32)
    x = rng.standard_normal((6, 50)).astype(np.float32)
    found = moe_layer(x, index, weight, layer, "silu", expert_scale=scale, path=path)
    assert close(found, expected_layer(x, index, weight, layer, "silu", expert_scale=scale))


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("widths", [None, [8] * 10, [2, 8] * 5, [6, 3] * 5])
def test_a_tokens_result_does_not_depend_on_its_company_or_the_threads(path, widths):
    if path not in backend().available:
        pytest.skip(f"{path} does not run on this machine")
    rng = np.random.default_rng(15)
    layer = random_experts(rng, 5, 96, 75, widths)
    index, weight = random_routing(rng, 300, 3, 5)
    x = rng.standard_normal((300, 96)).astype(np.float32)
    together = moe_layer(x, index, weight, layer, "silu", path=path)
    shuffled = rng.permutation(300)
    found = moe_layer(
        x[shuffled], index[shuffled], weight[shuffled], layer, "silu", path=path, threads=3
    )
    assert np.array_equal(found, together[shuffled])
    for first, last in ((7, 8), (7, 9), (20, 33), (100, 190)):
        part = slice(first, last)
        found = moe_layer(x[part], index[part], weight[part], layer, "silu", path=path)
        assert np.array_equal(found, together[part])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.integers(1, 6),
    hidden=st.integers(1, 90),
    inner=st.integers(1, 90),
    tokens=st.integers(0, 20),
    threads=st.integers(1, 3),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
)
def test_random_layers_agree_with_the_reference(
    seed, experts, hidden, inner, tokens, threads, activation
):
    rng = np.random.default_rng(seed)
    widths = rng.integers(2, 9, 2 * experts).tolist()
    layer = random_experts(rng, experts, hidden, inner, widths)
    index, weight = random_routing(rng, tokens, min(2, experts), experts)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    found = moe_layer(x, index, weight, layer, activation, threads=threads)
    if tokens:
        expected = expected_layer(x, index, weight, layer, activation)
        assert np.max(np.abs(found - expected)) <= 2e-5 * max(np.max(np.abs(expected)), 1e-3)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_agree_with_the_reference_over_their_whole_range(path, activation):
    """With gate = x, up = x and down = 1 the layer is act(x) * x, from -60 to 60 and beyond."""
    ones = np.full((2, 1), 255, np.uint8)
    table = np.ones((2, 4), np.float16)
    blocks = [
        ContiguousBlock(pack_planes(ones[:n], 8), table[:n], 2, 1)
        for n in (2, 1)  # gate_up [2, 1], down [1, 1]
    ]
    layer = ContiguousExperts(blocks)
    z = np.concatenate([np.linspace(-60, 60, 2401), [-1e4, 1e4, 1e-30, -1e-30, 0.0]])
    z = np.concatenate([z, [np.inf, -np.inf, np.nan]]).astype(np.float32)[:, None]
    index, weight = np.zeros((len(z), 1), np.int32), np.ones((len(z), 1), np.float32)
    found = moe_layer(z, index, weight, layer, activation, path=path)
    expected = expected_layer(z, index, weight, layer, activation)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
    assert np.allclose(found, expected, rtol=3e-6, atol=1e-8, equal_nan=True)


def test_nan_and_infinity_stay_with_their_token(path):
    rng = np.random.default_rng(16)
    layer = random_experts(rng, 3, 64, 40)
    index, weight = random_routing(rng, 8, 2, 3)
    x = rng.standard_normal((8, 64)).astype(np.float32)
    clean = moe_layer(x, index, weight, layer, "silu", path=path)
    x[2, 5], x[6, 63] = np.nan, np.inf
    found = moe_layer(x, index, weight, layer, "silu", path=path)
    assert np.isnan(found[2]).all()
    assert not np.isfinite(found[6]).any()
    others = [0, 1, 3, 4, 5, 7]
    assert np.array_equal(found[others], clean[others])


def arguments():
    rng = np.random.default_rng(17)
    layer = random_experts(rng, 3, 20, 9)
    index, weight = random_routing(rng, 4, 2, 3)
    return {
        "tokens": np.zeros((4, 20), np.float32),
        "expert_index": index,
        "gate_weight": weight,
        "experts": layer,
        "activation": "silu",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((4, 21), np.float32)}, r"tokens must be float32 \[T, 20\]"),
        ({"tokens": np.zeros((4, 20))}, "tokens must be float32"),
        ({"tokens": np.zeros((4, 40), np.float32)[:, ::2]}, "C-contiguous"),
        ({"tokens": np.zeros((5, 20), np.float32)}, r"expert_index must be int32 \[5, k\]"),
        ({"expert_index": np.zeros((4, 2), np.int64)}, "found int64"),
        ({"expert_index": np.zeros(4, np.int32)}, r"\[4, k\]"),
        ({"expert_index": np.full((4, 2), 3, np.int32)}, r"in \[0, 3\), found 3..3"),
        ({"expert_index": np.full((4, 2), -1, np.int32)}, r"in \[0, 3\), found -1..-1"),
        ({"expert_index": np.zeros((2, 4), np.int32).T}, "C-contiguous"),
        ({"gate_weight": np.zeros((4, 2))}, r"gate_weight must be float32 \[4, 2\]"),
        ({"gate_weight": np.zeros((4, 3), np.float32)}, r"gate_weight must be float32 \[4, 2\]"),
        ({"activation": "relu"}, "activation must be one of"),
        ({"expert_scale": np.ones(2, np.float32)}, r"expert_scale must be float32 \[3\]"),
        ({"threads": -1}, "threads must be"),
        ({"out": np.zeros((4, 21), np.float32)}, "out must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_read(change, message):
    with pytest.raises(ValueError, match=message):
        moe_layer(**{**arguments(), **change})


def test_the_output_may_not_be_the_input():
    call = arguments()
    with pytest.raises(ValueError, match="share memory"):
        moe_layer(**call, out=call["tokens"])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_layer_needs_two_blocks_per_expert(count):
    blocks = random_experts(np.random.default_rng(1), 2, 20, 9).blocks
    with pytest.raises(ValueError, match="2 per expert"):
        ContiguousExperts(blocks[:count])


def test_blocks_of_a_layer_must_fit_each_other():
    blocks = random_experts(np.random.default_rng(1), 2, 20, 9).blocks
    with pytest.raises(ValueError, match=r"block 1 must be \[20, 9\], found \[18, 20\]"):
        ContiguousExperts([blocks[0], blocks[2], *blocks[2:]])
