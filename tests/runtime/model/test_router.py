"""Which experts a token gets, in the cases that go wrong."""

import numpy as np
import pytest
import torch

from runtime.model.experts_plain import ExpertMatrices, KernelExperts, TorchExperts
from runtime.model.router import choose_experts
from runtime.model.spec import MoeSpec

NAN, INF = float("nan"), float("inf")


def moe(experts=60, per_token=4, renormalises=True):
    return MoeSpec(experts=experts, experts_per_token=per_token, width=8, renormalises=renormalises)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("experts", [4, 60, 128])
def test_rows_that_are_not_finite_give_experts_that_exist_and_weights_that_are_no_numbers(
    bad, experts
):
    scores = torch.randn(5, experts, generator=torch.Generator().manual_seed(1))
    clean = choose_experts(scores, moe(experts))
    scores[1], scores[3] = bad, bad
    chosen, weights = choose_experts(scores, moe(experts))
    assert chosen.min() >= 0 and chosen.max() < experts
    assert weights[[1, 3]].isnan().all()
    for found, wanted in zip((chosen, weights), clean, strict=True):
        assert torch.equal(found[[0, 2, 4]], wanted[[0, 2, 4]])


@pytest.mark.parametrize("value", [0.0, 3.5, -1e30])
def test_ties_give_different_experts_that_exist_and_equal_weights(value):
    chosen, weights = choose_experts(torch.full((3, 60), value), moe())
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 60 for row in chosen.tolist())
    torch.testing.assert_close(weights, torch.full((3, 4), 0.25))


def test_weights_are_shares_of_all_experts_or_of_the_chosen_ones():
    scores = torch.log(torch.tensor([[1.0, 5.0, 3.0, 1.0]]))
    chosen, shares = choose_experts(scores, moe(4, 2, renormalises=False))
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(shares, torch.tensor([[0.5, 0.3]]))
    chosen, shares = choose_experts(scores, moe(4, 2), torch.tensor([1.0, 2.0, 4.0, 8.0]))
    torch.testing.assert_close(shares, torch.tensor([[2 * 0.625, 4 * 0.375]]))


def experts_of(kind, activation):
    rng = np.random.default_rng(2)
    gate_up = rng.standard_normal((6, 2 * 24, 32)).astype(np.float32) / 4
    down = rng.standard_normal((6, 32, 24)).astype(np.float32) / 4
    if kind == "torch":
        matrices = ExpertMatrices(torch.from_numpy(gate_up), torch.from_numpy(down))
        return TorchExperts({3: matrices}, activation), gate_up, down
    from kernels.cpu.plain_experts import PlainExperts

    return KernelExperts({3: PlainExperts.pack(gate_up, down)}, activation), gate_up, down


@pytest.mark.parametrize("kind", ["torch", "kernel"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_grouped_experts_give_the_sum_over_every_tokens_own(kind, activation):
    experts, gate_up, down = experts_of(kind, activation)
    rng = np.random.default_rng(5)
    tokens = rng.standard_normal((17, 32))
    chosen = np.stack([rng.permutation(6)[:3] for _ in tokens])
    chosen[chosen == 4] = 5  # nobody asks for expert 4, some ask twice for 5
    gates = rng.random((17, 3))
    wanted = np.zeros_like(tokens)
    for t, x in enumerate(tokens):
        for expert, gate in zip(chosen[t], gates[t], strict=True):
            a, b = np.split(gate_up[expert].astype(np.float64) @ x, 2)
            if activation == "silu":
                a = a / (1 + np.exp(-a))
            else:
                a = 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
            wanted[t] += gate * (down[expert] @ (a * b))
    found = experts(
        3,
        torch.from_numpy(tokens).float(),
        torch.from_numpy(chosen),
        torch.from_numpy(gates).float(),
    )
    torch.testing.assert_close(found, torch.from_numpy(wanted).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["torch", "kernel"])
def test_a_row_of_nan_stays_with_its_token(kind):
    experts, _, _ = experts_of(kind, "silu")
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
    chosen, gates = torch.tensor([[0, 1], [2, 3], [1, 2], [0, 5]]), torch.full((4, 2), 0.5)
    clean = experts(3, hidden, chosen, gates)
    hidden[1], gates[1] = NAN, NAN
    found = experts(3, hidden, chosen, gates)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], clean[[0, 2, 3]])
