"""Damage of a weight block: reference values, brute force over tokens, Monte Carlo, identities."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.quality import (
    Activation,
    activation_slope,
    activation_value,
    block_damage,
    conditional_second_moment,
    gate_up_row_weight,
    gradient_scale,
    output_error,
    output_scale,
    required_tokens,
    routed_mass,
    shrinkage,
    shrunk_moment,
    step_damage,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "pagedweight_cases.json"
CASE: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))["damage"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
REL = 1e-12


def close(value: float) -> Any:
    return pytest.approx(value, rel=REL, abs=1e-15)


def test_the_damage_case_with_the_full_moment() -> None:
    h, a = CASE["H"], CASE["row_weight"]
    assert output_error(CASE["W"], CASE["W4"], h, a) == close(CASE["total_q4"])
    assert output_error(CASE["W"], CASE["W3"], h, a) == close(CASE["total_q3"])
    assert output_error(CASE["W4"], CASE["W3"], h, a) == close(CASE["step_43"])


def test_the_damage_case_with_the_diagonal_alone() -> None:
    diagonal = np.diagonal(np.asarray(CASE["H"]))
    found = output_error(CASE["W"], CASE["W3"], diagonal, CASE["row_weight"])
    assert found == close(CASE["diag_total_q3"])


def test_damage_is_the_weighted_output_error_of_the_routed_tokens() -> None:
    rng = np.random.default_rng(3)
    weights, rounded = rng.standard_normal((2, 5, 7))
    inputs, gate = rng.standard_normal((40, 7)), rng.random(40)
    a = rng.random(5)
    brute = 0.0
    for x, g in zip(inputs, gate, strict=True):
        for r in range(5):
            brute += g**2 * a[r] * float((weights[r] - rounded[r]) @ x) ** 2
    moment = conditional_second_moment(inputs, gate)
    assert output_error(weights, rounded, moment, a) == close(brute / float((gate**2).sum()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_slope_of_an_activation_is_its_derivative(activation: Activation) -> None:
    z = np.linspace(-6.0, 6.0, 401)
    h = 1e-5
    difference = activation_value(z + h, activation) - activation_value(z - h, activation)
    np.testing.assert_allclose(activation_slope(z, activation), difference / (2 * h), atol=1e-9)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_torch(activation: Activation) -> None:
    torch = pytest.importorskip("torch")
    z = torch.linspace(-40.0, 40.0, 997, dtype=torch.float64, requires_grad=True)
    functional = torch.nn.functional
    y = functional.silu(z) if activation == "silu" else functional.gelu(z, approximate="tanh")
    (slope,) = torch.autograd.grad(y.sum(), z)
    numbers = z.detach().numpy()
    np.testing.assert_allclose(
        activation_value(numbers, activation), y.detach().numpy(), rtol=1e-12, atol=1e-14
    )
    np.testing.assert_allclose(
        activation_slope(numbers, activation), slope.numpy(), rtol=1e-11, atol=1e-13
    )


def test_activations_stay_finite_far_out() -> None:
    far = np.array([-1e4, -800.0, 800.0, 1e4])
    for activation in ACTIVATIONS:
        np.testing.assert_array_equal(activation_value(far, activation), np.maximum(far, 0.0))
        np.testing.assert_array_equal(activation_slope(far, activation), [0.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("part", ["gate", "up"])
def test_row_weights_turn_weight_errors_into_output_errors(
    activation: Activation, part: str
) -> None:
    """Independent small errors of the gate or up rows: predicted against simulated output error."""
    rng = np.random.default_rng(11)
    tokens, hidden, inner, trials, size = 400, 96, 24, 60, 1e-4
    x = rng.standard_normal((tokens, hidden))
    g = 0.2 + rng.random(tokens)
    gate_up = rng.standard_normal((2 * inner, hidden)) / np.sqrt(hidden)
    down = rng.standard_normal((hidden, inner)) * np.linspace(0.3, 2.0, inner)

    def output(weights: np.ndarray) -> np.ndarray:
        z, u = np.split(x @ weights.T, 2, axis=1)
        return (activation_value(z, activation) * u) @ down.T

    z, u = np.split(x @ gate_up.T, 2, axis=1)
    a = gate_up_row_weight(z, u, g, down, activation)
    rows = slice(0, inner) if part == "gate" else slice(inner, 2 * inner)
    base, moment = output(gate_up), conditional_second_moment(x, g)
    simulated = predicted = 0.0
    for _ in range(trials):
        moved = gate_up.copy()
        moved[rows] += size * rng.standard_normal((inner, hidden))
        change = ((output(moved) - base) ** 2).sum(axis=1)
        simulated += float(g**2 @ change / (g**2).sum())
        predicted += output_error(gate_up, moved, moment, a)
    # the product form takes E[s x x^T] as E[s] E[x x^T], nearly so for wide isotropic inputs
    assert predicted / simulated == pytest.approx(1.0, abs=0.1)


def test_row_weights_are_exact_where_slope_and_input_are_independent() -> None:
    """One input direction of constant square: E[s x^2] = E[s] x^2, so prediction is exact."""
    rng = np.random.default_rng(5)
    tokens, inner = 60, 4
    x = rng.choice([-1.0, 1.0], (tokens, 1))
    gate_up, down = rng.standard_normal((2 * inner, 1)), rng.standard_normal((3, inner))
    g = rng.random(tokens)
    z, u = np.split(x @ gate_up.T, 2, axis=1)
    a = gate_up_row_weight(z, u, g, down, "silu")
    step = 1e-6
    for row in range(2 * inner):
        moved = gate_up.copy()
        moved[row] += step
        z2, u2 = np.split(x @ moved.T, 2, axis=1)
        change = (activation_value(z2, "silu") * u2 - activation_value(z, "silu") * u) @ down.T
        simulated = float(g**2 @ (change**2).sum(axis=1) / (g**2).sum())
        found = output_error(gate_up, moved, conditional_second_moment(x, g), a)
        assert found == pytest.approx(simulated, rel=1e-4)


def test_shrinking_keeps_the_diagonal_up_to_the_ridge() -> None:
    h = np.array([[2.0, 0.5, -0.25], [0.5, 1.0, 0.125], [-0.25, 0.125, 3.0]])
    half = shrunk_moment(h, 0.5, ridge=0.01)
    np.testing.assert_allclose(np.diagonal(half), np.diagonal(h) + 0.01 * 2.0, rtol=REL)
    np.testing.assert_allclose(half[0, 1:], h[0, 1:] / 2, rtol=REL)
    np.testing.assert_array_equal(shrunk_moment(h, 0.0, ridge=0.0), h)
    assert np.count_nonzero(shrunk_moment(h, 1.0)) == 3


@given(tokens=st.integers(0, 40), columns=st.integers(1, 24), seed=st.integers(0, 99))
def test_a_shrunk_moment_is_positive_definite_however_few_the_tokens(
    tokens: int, columns: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = np.vstack([rng.standard_normal((tokens, columns)), np.ones((1, columns))])
    moment = conditional_second_moment(x, np.ones(len(x)))
    shrunk = shrunk_moment(moment, shrinkage(len(x), columns))
    assert np.linalg.eigvalsh(shrunk).min() > 0.0


@pytest.mark.parametrize(
    ("columns", "tokens"), [(64, 256), (1024, 256), (1408, 352), (14336, 3584)]
)
def test_required_tokens_grow_with_the_columns(columns: int, tokens: int) -> None:
    assert required_tokens(columns) == tokens
    assert shrinkage(tokens, columns) == 0.0
    assert shrinkage(tokens / 2, columns) == 0.5
    assert shrinkage(0, columns) == 1.0


def test_the_layer_scale_from_gradients_and_from_outputs() -> None:
    gradient = np.array([[1.0, -2.0], [3.0, 0.0]])
    assert gradient_scale(gradient) == close(14.0 / 4.0)
    assert output_scale([[3.0, 4.0], [0.0, 1.0]]) == close(1.0 / 13.0)
    with pytest.raises(ValueError, match="not 0"):
        output_scale(np.zeros((3, 2)))


def test_an_expert_without_tokens_has_mass() -> None:
    mass = routed_mass([30.0, 10.0, 0.0, 0.0], [50, 30, 0, 0], 40)
    np.testing.assert_allclose(mass, (np.array([30.0, 10.0, 0, 0]) + 0.125) / 41.0, rtol=REL)
    assert (mass > 0).all()
    many = routed_mass(np.array([3e6, 1e6]), np.array([5e6, 3e6]), 4_000_000)
    np.testing.assert_allclose(many, [0.75, 0.25], rtol=1e-6)
    with pytest.raises(ValueError, match="routed tokens"):
        routed_mass([0.0, 0.0], [0, 0], 10)


def test_damage_scales_with_mass_and_layer_and_its_steps_add_up() -> None:
    errors = np.array([[9.0, 4.0, 1.0], [2.0, 1.0, 0.5]])
    damage = block_damage(errors, [0.5, 2.0], [10.0, 1.0])
    np.testing.assert_allclose(damage, [[45.0, 20.0, 5.0], [4.0, 2.0, 1.0]], rtol=REL)
    steps = step_damage(damage)
    np.testing.assert_allclose(steps, [[25.0, 15.0], [2.0, 1.0]], rtol=REL)
    np.testing.assert_allclose(damage[:, -1] + steps.sum(axis=1), damage[:, 0], rtol=REL)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: conditional_second_moment(np.ones((3, 2)), np.ones(2)), "inputs must be"),
        (lambda: conditional_second_moment(np.ones((3, 2)), np.zeros(3)), "gate weight > 0"),
        (lambda: output_error(np.ones((2, 3)), np.zeros((2, 3)), np.eye(2), 1.0), "moment must be"),
        (lambda: shrunk_moment(np.eye(3), 1.5), "rho must be"),
        (lambda: shrunk_moment(np.ones((2, 3)), 0.5), r"\[K, K\]"),
        (lambda: activation_value([0.0], "relu"), "found 'relu'"),  # type: ignore[arg-type]
        (lambda: activation_slope([0.0], "relu"), "found 'relu'"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
