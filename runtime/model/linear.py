"""A linear layer behind one small object, so that each device multiplies with what suits it.

On the CPU the compiled kernel is used: a row's result has the same bits whatever rows share the
call, and bfloat16 weights are widened exactly. Without it, and on other devices, torch multiplies;
bfloat16 weights then round what they multiply, and bits may depend on the number of rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch.nn import functional

from kernels.cpu.backend import backend
from kernels.cpu.linear import PackedLinear, linear

__all__ = ["Linear", "LinearLayer", "TorchLinear", "kernel_array", "make_linear"]


class LinearLayer(Protocol):
    """y = x @ weight.T + bias."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] float32, contiguous -> [T, N] float32."""


class Linear:
    """By the compiled CPU kernel, from a copy of the weights in the kernel's own order.

    Attributes:
        packed: The weights.

    Args:
        weight: [N, K] float32 or bfloat16, on the CPU.
        bias: [N]; None for none.
        threads: Of the kernel.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, threads: int = 1
    ) -> None:
        self.packed = PackedLinear.pack(kernel_array(weight))
        self._bias = None if bias is None else bias.float().contiguous().numpy()
        self._threads, self._path = threads, backend().name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``LinearLayer``."""
        return torch.from_numpy(
            linear(x.numpy(), self.packed, self._bias, threads=self._threads, path=self._path)
        )


class TorchLinear:
    """By torch.

    Args:
        weight: [N, K] float32 or bfloat16.
        bias: [N]; None for none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``LinearLayer``."""
        return functional.linear(x.to(self._weight.dtype), self._weight, self._bias).float()


def kernel_array(weight: torch.Tensor) -> NDArray[Any]:
    """A CPU tensor as the kernels take it: float32 as it is, bfloat16 as its bits in uint16."""
    stored = weight.contiguous()
    array: NDArray[Any] = (
        stored.view(torch.uint16) if stored.dtype == torch.bfloat16 else stored
    ).numpy()
    return array


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, threads: int = 1
) -> LinearLayer:
    """The layer for the device that ``weight`` lies on; see ``Linear`` for the arguments."""
    if weight.device.type == "cpu" and backend().library is not None:
        return Linear(weight, bias, threads=threads)
    return TorchLinear(weight, bias)
