"""Linear layers, embeddings and activations: exact where they promise it."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from kernels.cpu import backend
from runtime.model.activations import activate, gated, sigmoid
from runtime.model.embedding import PackedEmbedding, TableEmbedding
from runtime.model.linear import Linear, TorchLinear, make_linear

needs_compiler = pytest.mark.skipif(backend().library is None, reason="no compiled kernels")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 31, 97, 128])
def test_an_embedding_out_of_the_output_matrix_gives_its_rows_bit_for_bit(dtype, rows):
    matrix = torch.randn(rows, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = np.random.default_rng(2).integers(0, rows, size=50)
    found = PackedEmbedding(Linear(matrix).packed)(tokens)
    assert torch.equal(found, TableEmbedding(matrix)(tokens))
    assert torch.equal(found, matrix.float()[torch.from_numpy(tokens)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [make_linear, TorchLinear])
def test_products_are_those_of_double_precision(kind, dtype):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(70, 48, generator=generator).to(dtype)
    bias, x = torch.randn(70, generator=generator), torch.randn(9, 48, generator=generator)
    wanted = functional.linear(x.double(), weight.double(), bias.double())
    rounds = kind is TorchLinear and dtype == torch.bfloat16
    worst = float((kind(weight, bias)(x).double() - wanted).abs().max())
    assert worst < (0.2 if rounds else 2e-5)
    assert kind(weight, bias)(x[:0]).shape == (0, 70)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_are_those_of_torch_and_do_not_depend_on_their_place(activation):
    x = torch.cat([torch.linspace(-120, 120, 3001), torch.tensor([-1e30, 1e30, 0.0])])
    exact = (
        functional.silu(x.double())
        if activation == "silu"
        else functional.gelu(x.double(), approximate="tanh")
    )
    whole = activate(x, activation)
    torch.testing.assert_close(whole.double(), exact, rtol=2e-6, atol=2e-6)
    for start, count in ((0, 1), (5, 3), (100, 17), (7, 41), (2990, 14)):
        part = slice(start, start + count)
        assert torch.equal(activate(x[part].clone(), activation), whole[part])
    both = torch.stack([x[:3000], x[:3000].flip(0)]).view(2, -1)
    torch.testing.assert_close(
        gated(both, activation), activate(both[:, :1500], activation) * both[:, 1500:]
    )


def test_sigmoid_is_within_zero_and_one():
    x = torch.tensor([-1e30, -90.0, -1.0, 0.0, 1.0, 90.0, 1e30])
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x))
