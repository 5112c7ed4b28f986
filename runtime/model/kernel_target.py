"""Torch tensors as arguments of CUDA kernels, on a GPU or in the emulation.

On a GPU kernels go to torch's current stream, so that they are ordered with torch's own work and
are part of a graph that torch captures. In the emulation tensors lie in host memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from kernels.cuda.load import Target

_BITS = {torch.bfloat16: torch.uint16}  # what neither numpy nor CuPy has


def target_of(device: torch.device | str) -> Target:
    """``gpu`` for CUDA devices, else the emulation."""
    return "gpu" if torch.device(device).type == "cuda" else "emulation"


def pointer(tensor: torch.Tensor, target: Target) -> Any:
    """A tensor's first number for a kernel that is told all extents.

    Args:
        tensor: Of any strides.
        target: Whose kernel.
    """
    if target == "gpu":
        return np.uintp(tensor.data_ptr())
    bits = tensor.detach().view(_BITS.get(tensor.dtype, tensor.dtype))
    offset = bits.storage_offset()
    behind = bits.untyped_storage().nbytes() // bits.element_size() - offset
    return bits.as_strided((behind,), (1,), offset).numpy()


def array(tensor: torch.Tensor, target: Target) -> Any:
    """A contiguous tensor as CuPy's or numpy's array over the same memory."""
    bits = tensor.detach().view(_BITS.get(tensor.dtype, tensor.dtype))
    if target == "emulation":
        return bits.numpy()
    import cupy

    return cupy.asarray(bits)


def on_current_stream(device: torch.device, target: Target) -> AbstractContextManager[Any]:
    """Kernels launched inside are ordered with torch's current stream of the device."""
    if target == "emulation":
        return nullcontext()
    import cupy

    stream: AbstractContextManager[Any] = cupy.cuda.ExternalStream(
        torch.cuda.current_stream(device).cuda_stream, device.index or 0
    )
    return stream
