"""What one pass of the model computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """New tokens of several sequences, one sequence's after the other's.

    Attributes:
        sequences: Numbers of the sequences, as the KV cache knows them; each once.
        tokens: [T] int64, new tokens.
        first: [n + 1] int64, rows of sequence i are ``first[i]`` to ``first[i + 1]``, at least one.
        starts: [n] int64, tokens of each sequence whose keys and values are held before.
        logit_rows: [m] int64, rows whose logits are wanted, ascending.
    """

    sequences: tuple[int, ...]
    tokens: Ints
    first: Ints
    starts: Ints
    logit_rows: Ints

    @property
    def positions(self) -> Ints:
        """[T] int64, position of every new token in its sequence."""
        counts = np.diff(self.first)
        return np.arange(len(self.tokens)) + np.repeat(self.starts - self.first[:-1], counts)

    @property
    def counts(self) -> Ints:
        """[n] int64, new tokens of each sequence."""
        return np.diff(self.first)
