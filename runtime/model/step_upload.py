"""Numbers of a step from the host to a fixed place on the device, without waiting."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

STAGING_BUFFERS: Final = 2


class StepUpload:
    """int32 numbers at a fixed address, written through pinned memory.

    A pinned buffer is written again only when its copy is done: with two of them that is a wait
    only for an engine that is two steps ahead of its device.

    Attributes:
        numbers: [size] int32 on the device.

    Args:
        size: Numbers at most.
        device: Where they go.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [
            torch.zeros(size, dtype=torch.int32, pin_memory=self._is_cuda)
            for _ in range(STAGING_BUFFERS if self._is_cuda else 1)
        ]
        self._copied: list[Any] = [None] * len(self._staging)
        self._next = 0

    def write(self, numbers: NDArray[np.int32]) -> torch.Tensor:
        """Copy to the front of the place, in order with the current stream.

        Returns:
            [len(numbers)] int32, a view of ``numbers``.

        Raises:
            ValueError: If they are more than the place holds.
        """
        count = len(numbers)
        if count > len(self.numbers):
            raise ValueError(f"{count} numbers of a step, the place holds {len(self.numbers)}")
        at, self._next = self._next, (self._next + 1) % len(self._staging)
        if self._copied[at] is not None:
            self._copied[at].synchronize()
        staging = self._staging[at][:count]
        staging.numpy()[:] = numbers
        written = self.numbers[:count]
        written.copy_(staging, non_blocking=True)
        if self._is_cuda:
            self._copied[at] = torch.cuda.current_stream(written.device).record_event()
        return written
