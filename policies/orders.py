"""What a policy may answer: plain facts that either engine carries out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class AssignWorkers:
    """Order: request ``i`` of the batch takes a free slot of attention worker ``workers[i]``.

    Attributes:
        workers: [n] int64, worker ids in 0..r-1, in the order of the batch.
    """

    workers: NDArray[np.int64]
