"""What quantizing one expert matrix costs: damage of a weight block at a bitwidth.

A block is one matrix of one expert (gate_up or down). Its damage is the expected squared change of
the expert's output, weighted by how often and how strongly the expert is used and by how much the
loss cares about the layer:

    damage(q) = M2_e c_l sum_r a_r (w_r - w_{r,q}) H_e (w_r - w_{r,q})^T

H_e is the second moment of the block's inputs *given* that tokens are routed to expert e, weighted
by the squared gate, so that the mass M2_e = E_t[g^2 1(e routed)] counts once. The row weights a_r
carry errors of gate and up rows through the activation and the down matrix into output units.
Second-order weight saliency goes back to Optimal Brain Surgeon (Hassibi and Stork, 1993); the
squared-gradient layer scale is the diagonal Fisher information of SqueezeLLM (arXiv 2306.07629).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

FloatArray = NDArray[np.float64]
Activation = Literal["silu", "gelu_tanh"]

_GELU_LINEAR = float(np.sqrt(2.0 / np.pi))
_GELU_CUBIC = 0.044715
MIN_ROUTED_TOKENS = 256
RIDGE = 1e-6


def activation_value(z: ArrayLike, activation: Activation) -> FloatArray:
    """act(z), elementwise; ``gelu_tanh`` is the tanh form of GELU.

    Raises:
        ValueError: If the activation is not one of the two.
    """
    x = np.asarray(z, dtype=np.float64)
    if activation == "silu":
        return np.asarray(x * expit(x))
    if activation == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh(_GELU_LINEAR * (x + _GELU_CUBIC * x**3)))
    raise ValueError(f"activation must be 'silu' or 'gelu_tanh', found {activation!r}")


def activation_slope(z: ArrayLike, activation: Activation) -> FloatArray:
    """d act / dz, elementwise.

    Raises:
        ValueError: If the activation is not one of the two.
    """
    x = np.asarray(z, dtype=np.float64)
    if activation == "silu":
        sigmoid = expit(x)
        return np.asarray(sigmoid * (1.0 + x * (1.0 - sigmoid)))
    if activation == "gelu_tanh":
        tanh = np.tanh(_GELU_LINEAR * (x + _GELU_CUBIC * x**3))
        inner_slope = _GELU_LINEAR * (1.0 + 3.0 * _GELU_CUBIC * x**2)
        return 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh**2) * inner_slope
    raise ValueError(f"activation must be 'silu' or 'gelu_tanh', found {activation!r}")


def conditional_second_moment(inputs: ArrayLike, gate_weight: ArrayLike) -> FloatArray:
    """[K, K] H = sum_t g_t^2 x_t x_t^T / sum_t g_t^2 over the tokens routed to one expert.

    Args:
        inputs: [T, K] inputs of the block; only tokens that were routed to the expert.
        gate_weight: [T] g, the router's weight of this expert for each of them.

    Raises:
        ValueError: If shapes disagree or every gate weight is 0 (T = 0 included).
    """
    x = np.asarray(inputs, dtype=np.float64)
    g2 = np.asarray(gate_weight, dtype=np.float64) ** 2
    if x.ndim != 2 or g2.shape != x.shape[:1]:
        raise ValueError(f"inputs must be [T, K], gate_weight [T], found {x.shape}, {g2.shape}")
    if not g2.sum() > 0.0:
        raise ValueError("a conditional second moment needs a token with gate weight > 0")
    return np.asarray((x * g2[:, None]).T @ x / g2.sum())


def required_tokens(columns: int) -> int:
    """Routed tokens from which a second moment of K columns is trusted: max(256, K/4)."""
    return max(MIN_ROUTED_TOKENS, -(-columns // 4))


def shrinkage(routed_tokens: float, columns: int) -> float:
    """rho in [0, 1]: 0 from the required tokens on, rising linearly to 1 with no token at all."""
    return float(np.clip(1.0 - routed_tokens / required_tokens(columns), 0.0, 1.0))


def shrunk_moment(moment: ArrayLike, rho: float, *, ridge: float = RIDGE) -> FloatArray:
    """[K, K] (1 - rho) H + rho diag(H) + ridge tr(H)/K I.

    Args:
        moment: [K, K] symmetric H.
        rho: Share given to the diagonal, in [0, 1].
        ridge: Share of the mean diagonal that is added to every diagonal entry.

    Raises:
        ValueError: If H is not square or rho is outside [0, 1].
    """
    h = np.asarray(moment, dtype=np.float64)
    if h.ndim != 2 or h.shape[0] != h.shape[1]:
        raise ValueError(f"moment must be [K, K], found {h.shape}")
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"rho must be within [0, 1], found {rho}")
    result = (1.0 - rho) * h
    diagonal = np.diagonal(h)
    np.fill_diagonal(result, diagonal + ridge * diagonal.mean())
    return result


def output_error(
    weights: ArrayLike, reconstructed: ArrayLike, moment: ArrayLike, row_weight: ArrayLike
) -> float:
    """D = sum_r a_r (w_r - w'_r) H (w_r - w'_r)^T, per routed unit of squared gate.

    Args:
        weights: [N, K] weights, or the reconstruction from which a step starts.
        reconstructed: [N, K] what the block computes with instead.
        moment: [K, K] H, or [K] its diagonal (entries off the diagonal are then taken as 0).
        row_weight: [N] a_r; or a scalar for all rows.

    Raises:
        ValueError: If shapes disagree.
    """
    error = np.asarray(weights, dtype=np.float64) - np.asarray(reconstructed, dtype=np.float64)
    h = np.asarray(moment, dtype=np.float64)
    a = np.broadcast_to(np.asarray(row_weight, dtype=np.float64), error.shape[:1])
    if h.shape == error.shape[1:]:
        return float(a @ (error**2 @ h))
    if h.shape != (error.shape[1], error.shape[1]):
        raise ValueError(f"moment must be [K] or [K, K] with K = {error.shape[1]}, found {h.shape}")
    return float(a @ np.einsum("rk,rk->r", error @ h, error))


def gate_up_row_weight(
    gate: ArrayLike,
    up: ArrayLike,
    gate_weight: ArrayLike,
    down: ArrayLike,
    activation: Activation,
) -> FloatArray:
    """[2I] a_r of the gate rows, then of the up rows, in squared output units.

    Gate row r: E[(act'(z_r) u_r)^2] ||down[:, r]||^2; up row r: E[act(z_r)^2] ||down[:, r]||^2;
    expectations over routed tokens with weight g^2. A down row has a_r = 1.

    Args:
        gate: [T, I] z, outputs of the gate rows before the activation.
        up: [T, I] u, outputs of the up rows.
        gate_weight: [T] g.
        down: [H, I] the expert's down matrix.
        activation: The gate's activation.

    Raises:
        ValueError: If every gate weight is 0, or the activation is unknown.
    """
    g2 = np.asarray(gate_weight, dtype=np.float64) ** 2
    if not g2.sum() > 0.0:
        raise ValueError("row weights need a token with gate weight > 0")
    share = g2 / g2.sum()
    through_gate = share @ (activation_slope(gate, activation) * np.asarray(up)) ** 2
    through_up = share @ activation_value(gate, activation) ** 2
    column_norm = (np.asarray(down, dtype=np.float64) ** 2).sum(axis=0)
    return np.concatenate([through_gate * column_norm, through_up * column_norm])


def gradient_scale(output_gradient: ArrayLike) -> float:
    """c_l from gradients: mean over tokens and coordinates of (dLoss/dy)^2 at the MoE output.

    Args:
        output_gradient: [T, H] gradients of the summed loss.
    """
    return float(np.mean(np.asarray(output_gradient, dtype=np.float64) ** 2))


def output_scale(output: ArrayLike) -> float:
    """c_l without gradients: 1 / E||y||^2.

    Args:
        output: [T, H] MoE outputs of the layer.

    Raises:
        ValueError: If all outputs are 0.
    """
    mean_square = float(np.mean((np.asarray(output, dtype=np.float64) ** 2).sum(axis=-1)))
    if mean_square == 0.0:
        raise ValueError("1/E||y||^2 needs an output that is not 0")
    return 1.0 / mean_square


def routed_mass(squared_gate_sum: ArrayLike, routed_tokens: ArrayLike, tokens: int) -> FloatArray:
    """[E] M2_e = E_t[g^2 1(e routed)], with one mean routed token shared by all experts added.

    The added token keeps an expert that calibration never met from having no damage at all; with
    thousands of tokens it changes nothing else.

    Args:
        squared_gate_sum: [E] sum of g^2 over the tokens routed to each expert.
        routed_tokens: [E] how many they were.
        tokens: How many tokens the router saw, > 0.

    Raises:
        ValueError: If no token was routed.
    """
    sums = np.asarray(squared_gate_sum, dtype=np.float64)
    routed = float(np.asarray(routed_tokens, dtype=np.float64).sum())
    if tokens <= 0 or routed <= 0.0:
        raise ValueError(f"a routing mass needs routed tokens, found {routed:g} of {tokens}")
    mean_square = float(sums.sum()) / routed
    return np.asarray((sums + mean_square / len(sums)) / (tokens + 1.0))


def block_damage(output_errors: ArrayLike, mass: ArrayLike, layer_scale: ArrayLike) -> FloatArray:
    """[n, levels] damage = M2_e c_l D_i(q).

    Args:
        output_errors: [n, levels] D of each block at each bitwidth.
        mass: [n] M2 of each block's expert.
        layer_scale: [n] c of each block's layer.
    """
    factor = np.asarray(mass, dtype=np.float64) * np.asarray(layer_scale, dtype=np.float64)
    return np.asarray(output_errors, dtype=np.float64) * factor[:, None]


def step_damage(damage: ArrayLike) -> FloatArray:
    """[n, levels - 1] damage added by each step down: damage(q - 1) - damage(q).

    Args:
        damage: [n, levels] by ascending bitwidth.
    """
    d = np.asarray(damage, dtype=np.float64)
    return np.asarray(d[:, :-1] - d[:, 1:])
