"""Root mean square norms, in float32."""

from __future__ import annotations

import torch
from torch.nn import functional


class RmsNorm:
    """x / sqrt(mean(x**2) + epsilon) * weight over the last dimension.

    Args:
        weight: Of its width, or broadcast against [..., width] where ``width`` is given; None for
            none.
        epsilon: Added to the mean square.
        width: Numbers normed together; None for the width of ``weight``.
    """

    def __init__(
        self, weight: torch.Tensor | None, epsilon: float, width: int | None = None
    ) -> None:
        if width is None:
            assert weight is not None
            width = weight.shape[-1]
        self._shape = (width,)
        is_plain = weight is not None and weight.shape == self._shape
        self._weight = weight if is_plain else None
        self._factor = None if is_plain else weight
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] float32 -> the same shape, a new tensor."""
        normed = functional.rms_norm(x, self._shape, self._weight, self._epsilon)
        return normed if self._factor is None else normed.mul_(self._factor)
