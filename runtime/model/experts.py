"""The routed experts of a model: the contract that plain and quantized ones fulfil."""

from __future__ import annotations

from typing import Protocol

import torch


class Experts(Protocol):
    """The routed experts of all layers that have some."""

    def __call__(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum over a token's experts of gate weight times output.

        Args:
            layer: The model's number of the layer.
            hidden: [T, H] float32, contiguous.
            experts: [T, k] int64, chosen experts, those of a token different.
            weights: [T, k] float32, gate weights with all scales of experts in them.

        Returns:
            [T, H] float32, a new tensor.
        """
