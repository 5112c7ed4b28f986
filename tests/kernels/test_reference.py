"""The numpy reference against worked cases, torch and single loops."""

import json
from pathlib import Path

import numpy as np
import pytest

from kernels.planes import pack_planes
from kernels.reference import ACTIVATIONS, block_matmul, dequantize, moe_layer

CASE = json.loads((Path(__file__).parent.parent / "golden" / "pagedweight_cases.json").read_text())[
    "forward"
]


def case_arrays():
    tokens, index, weight = (np.array(CASE[name]) for name in ("X", "idx", "w"))
    return tokens, index, weight, np.array(CASE["gate_up"]), np.array(CASE["down"])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_layer_gives_the_worked_case(activation):
    out = moe_layer(*case_arrays(), activation)
    assert np.allclose(out, CASE[activation], rtol=1e-10, atol=0)


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_weight_is_its_rows_table_at_its_code(bits):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 256, (7, 45), dtype=np.uint8)
    table = rng.standard_normal((7, 1 << bits)).astype(np.float16)
    weights = dequantize(pack_planes(codes, 8), table, bits, 45)
    assert weights.dtype == np.float32
    for row in range(7):
        for k in range(45):
            assert weights[row, k] == table[row, codes[row, k] >> (8 - bits)]
    x = rng.standard_normal((3, 45))
    product = block_matmul(x, pack_planes(codes, 8), table, bits, 45)
    assert np.allclose(product, [[w @ t for w in weights.astype(float)] for t in x], rtol=1e-13)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_activations_are_those_of_torch(name):
    torch = pytest.importorskip("torch")
    z = np.concatenate([np.linspace(-30, 30, 4001), [-1e4, 1e4, np.inf, -np.inf, np.nan]])
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    }
    expected = functions[name](torch.from_numpy(z)).numpy()
    assert np.allclose(ACTIVATIONS[name](z), expected, rtol=1e-12, atol=1e-15, equal_nan=True)


def test_an_expert_scale_multiplies_the_gate_weight():
    tokens, index, weight, gate_up, down = case_arrays()
    scale = np.array([2.0, 0.5, -1.0])
    scaled = moe_layer(tokens, index, weight, gate_up, down, "silu", expert_scale=scale)
    assert np.allclose(
        scaled, moe_layer(tokens, index, weight * scale[index], gate_up, down, "silu")
    )


def test_an_expert_named_twice_by_a_token_counts_twice():
    tokens, _, _, gate_up, down = case_arrays()
    twice = moe_layer(tokens, np.ones((3, 2), int), np.full((3, 2), 0.25), gate_up, down, "silu")
    once = moe_layer(tokens, np.ones((3, 1), int), np.full((3, 1), 0.5), gate_up, down, "silu")
    assert np.allclose(twice, once, rtol=1e-14)


def test_no_tokens_and_no_experts_give_zeros():
    tokens, index, weight, gate_up, down = case_arrays()
    assert moe_layer(tokens[:0], index[:0], weight[:0], gate_up, down, "silu").shape == (0, 4)
    assert not moe_layer(tokens, index[:, :0], weight[:, :0], gate_up, down, "silu").any()


def test_nan_and_infinity_stay_with_their_token():
    tokens, index, weight, gate_up, down = case_arrays()
    tokens[0, 1], tokens[2, 0] = np.nan, np.inf
    out = moe_layer(tokens, index, weight, gate_up, down, "silu")
    assert np.isnan(out[0]).all()
    assert not np.isfinite(out[2]).any()
    assert np.allclose(out[1], CASE["silu"][1], rtol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "relu"}, "silu"),
        ({"expert_index": np.full((3, 2), 3)}, r"\[0, 3\)"),
        ({"expert_index": np.full((3, 2), -1)}, r"\[0, 3\)"),
        ({"expert_index": np.zeros((3, 2))}, "whole numbers"),
        ({"gate_weight": np.zeros((3, 1))}, r"gate_weight must be \[3, 2\]"),
        ({"down": np.zeros((2, 4, 3))}, "down must have 3"),
        ({"down": np.zeros((3, 4, 2))}, "expert 0"),
        ({"expert_scale": np.ones(2)}, r"expert_scale must be \[3\]"),
        ({"tokens": np.zeros(4)}, r"tokens must be \[T, H\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    names = ("tokens", "expert_index", "gate_weight", "gate_up", "down")
    arguments = dict(zip(names, case_arrays(), strict=True)) | {"activation": "silu"} | change
    with pytest.raises(ValueError, match=message):
        moe_layer(**arguments)


@pytest.mark.parametrize(
    ("table", "bits", "message"),
    [
        (np.zeros((2, 8), np.float16), 2, r"\[2, 4\]"),
        (np.zeros((2, 4), np.int32), 2, "floating"),
        (np.zeros((2, 512), np.float16), 9, "1..8"),
        (np.zeros((2, 16), np.float16), 4, r">= 4"),
    ],
)
def test_tables_and_widths_that_do_not_fit_are_refused(table, bits, message):
    with pytest.raises(ValueError, match=message):
        dequantize(np.zeros((3, 2, 2), np.uint32), table, bits, 40)
