"""What went wrong with raises: back-off, pinned blocks, reasons and how often each occurred."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

REASONS = (
    "none",
    "copy error",
    "time-out",
    "checksum",
    "newer plan",
    "pressure",
    "no pages",
    "draining",
    "back-off",
    "pinned",
)


class MovementFaults:
    """Failures per block and reasons in sum.

    A fault of a copy (copy error, time-out, checksum) counts as a failure: after the nth in a row
    the block accepts no raise for 2**n steps, after ``max_failures`` it is pinned at its width
    until ``unpin``. Cancellation by memory pressure holds the block back for as long again but is
    no failure, and a newer plan costs nothing: neither says that the block's copies go wrong.

    Attributes:
        failures: [n] int64, faults since the last raise that committed.
        retry_step: [n] int64, first step at which a raise is accepted again.
        pinned: [n] bool.
        last_reason: [n] uint8, index into REASONS.
        counts: How often each reason occurred, in blocks.
    """

    def __init__(self, num_blocks: int, max_failures: int) -> None:
        self.max_failures = max_failures
        self.failures = np.zeros(num_blocks, np.int64)
        self.retry_step = np.zeros(num_blocks, np.int64)
        self.pinned = np.zeros(num_blocks, np.bool_)
        self.last_reason = np.zeros(num_blocks, np.uint8)
        self.counts = dict.fromkeys(REASONS[1:], 0)

    def note(self, blocks: NDArray[np.int64], reason: str) -> None:
        """Count a reason without consequences."""
        self.counts[reason] += len(blocks)
        self.last_reason[blocks] = REASONS.index(reason)

    def hold_back(self, blocks: NDArray[np.int64], reason: str, *, step: int) -> None:
        """Count a reason and accept no raise for 2**failures steps."""
        self.note(blocks, reason)
        self.retry_step[blocks] = step + (1 << self.failures[blocks])

    def fail(self, blocks: NDArray[np.int64], reason: str, *, step: int) -> None:
        """One more failure of each block."""
        self.failures[blocks] += 1
        self.hold_back(blocks, reason, step=step)
        self.pinned[blocks] |= self.failures[blocks] >= self.max_failures

    def succeeded(self, blocks: NDArray[np.int64]) -> None:
        """A raise of these blocks has committed."""
        self.failures[blocks] = 0
        self.retry_step[blocks] = 0

    def unpin(self, blocks: NDArray[np.int64]) -> None:
        """Let blocks move again, with a clean record."""
        self.pinned[blocks] = False
        self.succeeded(blocks)
