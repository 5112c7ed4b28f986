"""Numbers of an Arrow array as numpy, by its buffers.

``Array.to_numpy`` would do, but the first call imports pandas wherever that is installed, which
takes longer than reading a hundred thousand rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def whole_numbers(array: Any) -> NDArray[np.int64]:
    """[n] of an int64 or timestamp array without nulls; read only, shares its memory."""
    return np.frombuffer(
        array.buffers()[1], dtype=np.int64, count=len(array), offset=8 * array.offset
    )


def numbers(array: Any) -> NDArray[np.float64]:
    """[n] of a float64 array, NaN where it has nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = np.frombuffer(
        array.buffers()[1], dtype=np.float64, count=len(array), offset=8 * array.offset
    )
    if array.null_count == 0:
        return values
    valid = pc.cast(pc.is_valid(array), pa.uint8())
    is_valid = np.frombuffer(valid.buffers()[1], dtype=np.uint8, count=len(array))
    return np.where(is_valid == 1, values, np.nan)
