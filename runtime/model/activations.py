"""Gated activations whose numbers do not depend on their place in an array.

torch's SiLU, GELU and sigmoid run a vector loop and finish an array with scalar code whose last
bits differ, so that a row's result would depend on the rows around it. Its exponential and
hyperbolic tangent do not; everything here is made of those and of exactly rounded operations.
"""

from __future__ import annotations

import math

import torch

from models.llm_shape import Activation

_SQRT_2_BY_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), a new tensor."""
    return x.neg().exp_().add_(1).reciprocal_()


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """SiLU, or GELU in its tanh form; a new tensor."""
    if activation == "silu":
        return x / x.neg().exp_().add_(1)
    inner = (x * x).mul_(x).mul_(_CUBIC).add_(x).mul_(_SQRT_2_BY_PI)
    return inner.tanh_().add_(1).mul_(x).mul_(0.5)


def gated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(gate) * up.

    Args:
        both: [T, 2 I], gate first.
        activation: Of the gate.

    Returns:
        [T, I], contiguous.
    """
    width = both.shape[-1] // 2
    return activate(both[:, :width], activation).mul_(both[:, width:])
