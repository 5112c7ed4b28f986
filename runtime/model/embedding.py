"""Rows of the embedding, by token; where the output matrix is the same one, out of that."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu.linear import PANEL_ROWS, PackedLinear

Tokens = torch.Tensor | NDArray[np.int64]


class Embedding(Protocol):
    """The vectors of tokens."""

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        """[T] int64 -> [T, H] float32, a new tensor."""


class TableEmbedding:
    """Rows of a matrix.

    Args:
        matrix: [V, H] float32 or bfloat16.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        """See ``Embedding``."""
        return self._matrix[torch.as_tensor(tokens, device=self._matrix.device)].float()


class PackedEmbedding:
    """Rows of a matrix that is kept once, packed as the output matrix.

    Args:
        packed: [V, H].
    """

    def __init__(self, packed: PackedLinear) -> None:
        self._panels = packed.panels
        lanes = np.arange(PANEL_ROWS)
        if self._panels.dtype == np.uint16:  # output i lies next to 16 + i
            half = PANEL_ROWS // 2
            lanes = 2 * (lanes % half) + lanes // half
        self._lanes = lanes

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        """See ``Embedding``."""
        panel, lane = np.divmod(np.asarray(tokens), PANEL_ROWS)
        rows = torch.from_numpy(self._panels[panel, :, self._lanes[lane]])
        return rows.view(torch.bfloat16).float() if rows.dtype == torch.uint16 else rows
