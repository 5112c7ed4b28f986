"""Checks of the arrays whose memory the compiled library reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
MAX_THREADS = 256


def check_array(
    name: str, array: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    """Refuse an array whose bytes are not what the library will read.

    Raises:
        ValueError: Naming the array, what was found and what is allowed.
    """
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ValueError(
            f"{name} must be {np.dtype(dtype).name} {list(shape)}, "
            f"found {array.dtype} {list(array.shape)}"
        )
    if not (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):
        raise ValueError(f"{name} must be C-contiguous and aligned, found strides {array.strides}")


def output_array(out: FloatArray | None, shape: tuple[int, ...]) -> FloatArray:
    """`out` if it can be written with float32 of this shape, a new array if it is None.

    Raises:
        ValueError: If it does not fit.
    """
    if out is None:
        return np.empty(shape, np.float32)
    check_array("out", out, np.float32, shape)
    if not out.flags.writeable:
        raise ValueError("out must be writeable")
    return out


def check_threads(threads: int) -> None:
    """Refuse a number of threads that is not 1..256.

    Raises:
        ValueError: If it is not.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads must be 1..{MAX_THREADS}, found {threads}")
