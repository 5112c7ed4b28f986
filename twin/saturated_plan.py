"""One saturated run before it starts: slots, stage times, faults, and where rows go.

Cycle ``n`` of a run is step ``n // m`` of microbatch ``n % m``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twin.cycle_log import CycleLog
from twin.fault_effects import FaultEffects
from twin.slots import SlotPool
from twin.stages import StageInterval, StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedPlan:
    """One run before it starts.

    Attributes:
        times: Stage seconds.
        pools: One per microbatch.
        log: Where cycles are noted; it knows how many there will be.
        effects: Faults, or None.
        timeline: Where stage intervals of the first ``timeline_cycles`` cycles are noted.
    """

    times: StageTimes
    pools: Sequence[SlotPool]
    log: CycleLog
    effects: FaultEffects | None = None
    timeline: list[StageInterval] = field(default_factory=list)
    timeline_cycles: int = 0

    def attention_s(self, pool: SlotPool) -> list[float]:
        """[r] undisturbed attention seconds of one layer; 0 for a lost worker."""
        alpha = self.times.bundle.coefficients.alpha_attention
        beta = self.times.bundle.coefficients.beta_attention
        return [
            alpha * load + beta if live else 0.0
            for load, live in zip(pool.loads, pool.live, strict=True)
        ]


def meet_presence(pool: SlotPool, effects: FaultEffects, now: float) -> bool:
    """Empty the slots of workers that got lost, fill those of workers that are back.

    Returns:
        Whether any worker is there.
    """
    if effects.has_losses:
        for worker, live in enumerate(pool.live):
            if live and effects.is_lost(worker, now):
                pool.lose(worker)
        for worker, live in enumerate(pool.live):
            if not live and not effects.is_lost(worker, now):
                pool.restore(worker, now)
    return any(pool.live)
