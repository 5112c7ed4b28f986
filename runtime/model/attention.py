"""Attention over keys and values in pages: the contract of an implementation."""

from __future__ import annotations

from typing import Protocol

import torch

from runtime.model.step import StepBatch


class Attention(Protocol):
    """Keeps new keys and values, and attends to all that are kept."""

    def begin(self, batch: StepBatch) -> None:
        """A step starts: the pages of its tokens have been reserved."""

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor | None,
        values: torch.Tensor | None,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of one layer, within its window if it has one.

        Args:
            layer: Its number.
            queries: [T, heads, head_dim] after rotation.
            keys: [T, kv_heads, head_dim] after rotation, written first; None in a layer that uses
                those of an earlier one.
            values: [T, kv_heads, head_dim]; None together with ``keys``.
            scale: Factor of every product of query and key.

        Returns:
            [T, heads * head_dim], of the type of ``queries``.
        """
