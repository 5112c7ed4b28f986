"""A mixture-of-experts layer of float32 or bfloat16 experts, in one call."""

import numpy as np
import pytest

from kernels.cpu import PackedLinear, PlainExperts, backend, plain_moe_layer
from kernels.cpu.backend import ALL_PATHS
from kernels.reference import moe_layer as reference_layer

COMPILED = [p for p in ALL_PATHS if p not in ("numba", "numpy")]


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


def random_layer(rng, experts, hidden, inner):
    gate_up = rng.standard_normal((experts, 2 * inner, hidden)) / np.sqrt(hidden)
    down = rng.standard_normal((experts, hidden, inner)) / np.sqrt(inner)
    return gate_up.astype(np.float32), down.astype(np.float32)


def random_tokens(rng, tokens, hidden, experts, top):
    index = np.array([rng.permutation(experts)[:top] for _ in range(tokens)], np.int32)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    return x, index.reshape(tokens, top), rng.random((tokens, top)).astype(np.float32)


def halves(values):
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(half):
    return (half.astype(np.uint32) << 16).view(np.float32)


def close(found, expected):
    return np.max(np.abs(found - expected)) <= 2e-6 * np.max(np.abs(expected))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 32, 64), (3, 70, 45), (40, 129, 33)])
def test_layers_agree_with_the_reference(path, activation, tokens, hidden, inner):
    rng = np.random.default_rng(tokens)
    gate_up, down = random_layer(rng, 7, hidden, inner)
    x, index, weight = random_tokens(rng, tokens, hidden, 5, 3)
    scale = rng.random(7).astype(np.float32)
    expected = reference_layer(
        x, index, weight, list(gate_up), list(down), activation, expert_scale=scale
    )
    for experts in (PlainExperts(gate_up, down), PlainExperts.pack(gate_up, down)):
        options = {"expert_scale": scale, "path": path}
        assert close(plain_moe_layer(x, index, weight, experts, activation, **options), expected)


def test_bfloat16_experts_are_widened_exactly(path):
    rng = np.random.default_rng(1)
    gate_up, down = (halves(w) for w in random_layer(rng, 4, 50, 37))
    x, index, weight = random_tokens(rng, 9, 50, 4, 2)
    found = plain_moe_layer(x, index, weight, PlainExperts(gate_up, down), "silu", path=path)
    wide = PlainExperts(widened(gate_up), widened(down))
    assert np.array_equal(found, plain_moe_layer(x, index, weight, wide, "silu", path=path))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_token_is_the_same_bit_for_bit_whatever_tokens_share_the_call(compiled, activation):
    rng = np.random.default_rng(2)
    experts = PlainExperts.pack(*random_layer(rng, 6, 65, 83))
    x, index, weight = random_tokens(rng, 400, 65, 6, 3)
    index[:300, 0] = 2  # more than one group of buffers holds, and some experts named twice
    whole = plain_moe_layer(x, index, weight, experts, activation, path=compiled)
    for tokens in (1, 2, 3, 5, 8, 13, 21, 34, 150, 399):
        at = slice(first := int(rng.integers(0, 400 - tokens)), first + tokens)
        part = plain_moe_layer(
            x[at].copy(), index[at].copy(), weight[at].copy(), experts, activation, path=compiled
        )
        assert np.array_equal(part, whole[at])


@pytest.mark.parametrize("tokens", [1, 7, 120])
def test_neither_packing_nor_threads_change_a_bit(compiled, tokens):
    rng = np.random.default_rng(tokens)
    gate_up, down = random_layer(rng, 5, 100, 90)
    x, index, weight = random_tokens(rng, tokens, 100, 5, 2)
    packed = PlainExperts.pack(gate_up, down)
    whole = plain_moe_layer(x, index, weight, packed, "silu", path=compiled)
    mixed = PlainExperts(list(gate_up), [PackedLinear.pack(w) for w in down])
    for experts in (packed, mixed):
        for threads in (1, 2, 3, 11):
            found = plain_moe_layer(
                x, index, weight, experts, "silu", path=compiled, threads=threads
            )
            assert np.array_equal(found, whole)


def test_strided_experts_are_read_where_they_lie(path):
    rng = np.random.default_rng(6)
    gate_up, down = random_layer(rng, 6, 40, 24)
    x, index, weight = random_tokens(rng, 4, 40, 3, 2)
    every_other = PlainExperts(gate_up[::2], down[::2])
    copied = PlainExperts(gate_up[::2].copy(), down[::2].copy())
    found = plain_moe_layer(x, index, weight, every_other, "silu", path=path)
    assert np.array_equal(found, plain_moe_layer(x, index, weight, copied, "silu", path=path))


def test_an_expert_without_tokens_is_not_read(path):
    rng = np.random.default_rng(7)
    gate_up, down = random_layer(rng, 3, 20, 10)
    gate_up[1], down[1] = np.nan, np.nan
    x, index, weight = random_tokens(rng, 5, 20, 1, 1)
    index[2:] = 2
    experts = PlainExperts(gate_up, down)
    assert np.isfinite(plain_moe_layer(x, index, weight, experts, "silu", path=path)).all()


def test_a_token_that_is_not_a_number_spoils_no_other(path):
    rng = np.random.default_rng(8)
    experts = PlainExperts.pack(*random_layer(rng, 3, 20, 10))
    x, index, weight = random_tokens(rng, 6, 20, 3, 2)
    clean = plain_moe_layer(x, index, weight, experts, "gelu_tanh", path=path)
    x[4, 3] = np.nan
    found = plain_moe_layer(x, index, weight, experts, "gelu_tanh", path=path)
    others = [0, 1, 2, 3, 5]
    assert np.isnan(found[4]).all()
    assert np.array_equal(found[others], clean[others])


@pytest.mark.parametrize("top", [0, 2])
def test_no_tokens_and_no_experts_give_zeros(path, top):
    experts = PlainExperts(*random_layer(np.random.default_rng(9), 2, 8, 8))
    for tokens in (0, 3) if top == 0 else (0,):
        out = plain_moe_layer(
            np.ones((tokens, 8), np.float32),
            np.empty((tokens, top), np.int32),
            np.empty((tokens, top), np.float32),
            experts,
            "silu",
            path=path,
        )
        assert out.shape == (tokens, 8)
        assert not out.any()


def test_matrices_that_do_not_fit_each_other_are_refused():
    gate_up, down = random_layer(np.random.default_rng(10), 2, 8, 6)
    with pytest.raises(ValueError, match=r"down\[1\] must be \[8, 6\], found \[8, 5\]"):
        PlainExperts(gate_up, [down[0], down[1][:, :5]])
    with pytest.raises(ValueError, match="found 2 and 1"):
        PlainExperts(gate_up, down[:1])
    with pytest.raises(ValueError, match="at least one"):
        PlainExperts([], [])
    with pytest.raises(ValueError, match=r"gate_up\[0\] must be float32 or uint16"):
        PlainExperts(gate_up.astype(np.float64), down)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": [[0, 2]]}, r"expert_index must be in \[0, 2\), found 0..2"),
        ({"index": [[-1, 0]]}, r"expert_index must be in \[0, 2\), found -1..0"),
        ({"index": [[0, 1], [0, 1]]}, r"expert_index must be int32 \[1, k\]"),
        ({"activation": "relu"}, "activation must be one of"),
        ({"tokens": np.ones((1, 9), np.float32)}, r"tokens must be float32 \[T, 8\]"),
        ({"threads": 257}, "threads must be 1..256, found 257"),
        ({"expert_scale": np.ones(3, np.float32)}, r"expert_scale must be float32 \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change, message):
    experts = PlainExperts(*random_layer(np.random.default_rng(11), 2, 8, 6))
    change = dict(change)
    tokens = change.pop("tokens", np.ones((1, 8), np.float32))
    index = np.array(change.pop("index", [[0, 1]]), np.int32)
    weight = np.ones((1, 2), np.float32)
    activation = change.pop("activation", "silu")
    with pytest.raises(ValueError, match=message) as error:
        plain_moe_layer(tokens, index, weight, experts, activation, **change)
    assert "\n" not in str(error.value)
