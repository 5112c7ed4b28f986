"""Row tables fitted to what a block computes, not to its weights: same codes, less output error.

k-means centroids shrink a matrix towards zero: the quantized row explains 1 - e of the output's
variance (e the relative error), and that loss is the same for every token, so the layers' outputs
shrink together and the loss suffers far more than from noise of the same size. Given the codes, the
table that minimises the output error (w - C t) H (w - C t)^T is a least-squares problem in the 2^q
entries of a row; a few steps of preconditioned conjugate gradients from the centroids solve it. A
last scale per row makes the quantized output unbiased: regressing it on the exact output gives 1.

Source:
    Refitting a codebook by least squares with the layer's input moments is step two of the
    alternation in "Extreme Compression of Large Language Models via Additive Quantization"
    (arXiv 2401.06118) and of GuidedQuant's LNQ (arXiv 2505.07004).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

ITERATIONS = 6
RIDGE = 1e-4
LARGEST_SCALE = 2.0


def fitted_table(
    weights: NDArray[np.floating],
    codes: NDArray[np.uint8],
    table: NDArray[np.floating],
    moment: NDArray[np.floating],
    *,
    iterations: int = ITERATIONS,
    unbiased: bool = True,
) -> FloatArray:
    """[N, 2^q] table of one width with less output error than the one given.

    Rows are independent of each other, up to rounding. An entry that no column uses stays.

    Args:
        weights: [N, K].
        codes: [N, K] q-bit codes.
        table: [N, 2^q] centroids to start from.
        moment: [K, K] H; or [K], its diagonal, for which centroids weighted alike are optimal.
        iterations: Steps of conjugate gradients, one product [N, K] x [K, K] each; 0 keeps the
            table and leaves the scale.
        unbiased: Whether to scale every row to an unbiased output.

    Raises:
        ValueError: If shapes disagree.
    """
    if weights.shape != codes.shape or table.shape[:1] != codes.shape[:1]:
        raise ValueError(
            f"weights {weights.shape}, codes {codes.shape}, table {table.shape} do not fit"
        )
    columns = codes.shape[1]
    if moment.shape not in ((columns,), (columns, columns)):
        raise ValueError(f"moment must be [K] or [K, K] with K = {columns}, found {moment.shape}")
    fit = _RowFit(weights, codes, table.shape[1], moment)
    start = torch.from_numpy(np.array(table, dtype=np.float32))
    result = fit.descend(start, iterations)
    if unbiased:
        result = fit.unbiased(result)
    return np.asarray(result.double().numpy())


class _RowFit:
    """The least-squares problems of all rows of one block at one width, float32."""

    def __init__(
        self,
        weights: NDArray[np.floating],
        codes: NDArray[np.uint8],
        cells: int,
        moment: NDArray[np.floating],
    ) -> None:
        self._w = torch.from_numpy(np.ascontiguousarray(weights, dtype=np.float32))
        self._cell = torch.from_numpy(codes.astype(np.int64))
        self._cells = cells
        self._h = torch.from_numpy(np.asarray(moment, dtype=np.float32))
        diagonal = self._h if self._h.ndim == 1 else self._h.diagonal()
        self._weight = self._sum(diagonal.expand_as(self._w))
        self._safe = torch.where(self._weight > 0, self._weight, 1.0)

    def _through(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self._h if self._h.ndim == 1 else rows @ self._h

    def _sum(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, 2^q] sums over the columns of each cell."""
        return torch.zeros(len(rows), self._cells).scatter_add_(1, self._cell, rows)

    def descend(self, table: torch.Tensor, iterations: int) -> torch.Tensor:
        if iterations == 0:
            return table
        residual = self._sum(self._through(self._w - table.gather(1, self._cell)))
        z = residual / self._safe
        direction = z
        slope = (residual * z).sum(1, keepdim=True)
        for _ in range(iterations):
            pushed = self._sum(self._through(direction.gather(1, self._cell)))
            pushed += RIDGE * self._weight * direction
            curvature = (direction * pushed).sum(1, keepdim=True)
            step = torch.where(curvature > 0, slope / torch.where(curvature > 0, curvature, 1), 0)
            table = table + step * direction
            residual = residual - step * pushed
            z = residual / self._safe
            new_slope = (residual * z).sum(1, keepdim=True)
            keep = torch.where(slope > 0, new_slope / torch.where(slope > 0, slope, 1), 0)
            direction = z + keep * direction
            slope = new_slope
        return table

    def unbiased(self, table: torch.Tensor) -> torch.Tensor:
        """Scale rows so that (C t) H w^T = w H w^T."""
        exact = self._through(self._w)
        own = (exact * self._w).sum(1, keepdim=True)
        shared = (exact * table.gather(1, self._cell)).sum(1, keepdim=True)
        possible = (shared > 0) & (own > 0)
        scale = torch.where(possible, own / torch.where(possible, shared, 1), 1)
        return table * scale.clamp(1.0 / LARGEST_SCALE, LARGEST_SCALE)
