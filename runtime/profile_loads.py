"""What measured steps read and computed, in the twin's bytes and operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.engine_profile import StepMeasured
from models.step_counts import StepCounts

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StepLoads:
    """Bytes and operations of measured steps, one entry each."""

    kv_bytes: Floats
    attention_flops: Floats
    dense_flops: Floats
    expert_bytes: Floats
    expert_flops: Floats
    tokens: Floats


def reference_bits(steps: Sequence[StepMeasured]) -> int:
    """The width that was measured at most points: 0 where experts are not quantized."""
    counts: dict[int, int] = {}
    for step in steps:
        counts[step.bits] = counts.get(step.bits, 0) + 1
    return max(counts, key=lambda bits: (counts[bits], -bits))


def values_of(steps: Sequence[StepMeasured], name: str) -> Floats:
    """[n] one field of all steps."""
    return np.array([getattr(step, name) for step in steps], dtype=np.float64)


def loads_of(counts: StepCounts, steps: Sequence[StepMeasured]) -> StepLoads:
    """Counted as the twin counts them; expert bytes are those that were read."""
    kv_bytes, attention, dense, experts = [], [], [], []
    for step in steps:
        held = np.full(step.sequences, step.held, dtype=np.int64)
        added = np.full(step.sequences, step.added, dtype=np.int64)
        tokens = step.sequences * step.added
        kv_bytes.append(counts.kv_read_bytes(held, added))
        attention.append(step.sequences * counts.attention_flops(step.held, step.added))
        dense.append(counts.token_flops * tokens + counts.output_flops * step.sequences)
        experts.append(counts.expert_flops * tokens)
    return StepLoads(
        kv_bytes=np.array(kv_bytes),
        attention_flops=np.array(attention),
        dense_flops=np.array(dense),
        expert_bytes=values_of(steps, "expert_bytes"),
        expert_flops=np.array(experts),
        tokens=values_of(steps, "sequences") * values_of(steps, "added"),
    )
