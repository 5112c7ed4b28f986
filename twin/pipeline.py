"""One microbatch after the other through attention, link and FFN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twin.fault_effects import FaultEffects
from twin.stages import StageInterval


class Attention(NamedTuple):
    """One attention stage of one microbatch on all its workers.

    Attributes:
        ready_s: When the slowest worker is done.
        longest_s: Longest time a worker took.
        sum_s: Time all workers took together.
    """

    ready_s: float
    longest_s: float
    sum_s: float


class PingPongPipeline:
    """When each resource of a bundle is free again, as microbatches pass through it.

    Workers do not wait for each other between microbatches, only for the FFN's answer:

        attention of worker j   starts at max(worker j free, answer arrived)
        barrier                 the slowest worker's end
        link                    starts at max(barrier, link free); a microbatch holds the link for
                                one round trip, so rounds are at least t_C apart
        FFN                     starts at max(link start + one way, FFN free)
        answer arrives          one way after the FFN's end

    For constant times the period is the max-plus eigenvalue, derived in docs/theory.md.

    Args:
        num_workers: r.
        effects: Faults that stretch attention stages, or None.
        timeline: Where to note stage intervals, or None.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        effects: FaultEffects | None = None,
        timeline: list[StageInterval] | None = None,
    ) -> None:
        self._worker_free_s = [0.0] * num_workers
        self._link_free_s = 0.0
        self._ffn_free_s = 0.0
        self._effects = effects
        self._stretched = effects.stretched if effects else frozenset[int]()
        self.timeline = timeline

    def attend(self, arrived_s: float, attention_s: Sequence[float], microbatch: int) -> Attention:
        """Run attention on every worker whose time is > 0.

        Args:
            arrived_s: When the workers have the microbatch.
            attention_s: [r] undisturbed seconds; 0: no slots on that worker, nobody waits for it.
            microbatch: For the timeline.

        """
        free_s = self._worker_free_s
        ready_s = arrived_s
        sum_s = longest_s = 0.0
        for worker, duration_s in enumerate(attention_s):
            if duration_s > 0.0:
                start_s = free_s[worker]
                if arrived_s > start_s:
                    start_s = arrived_s
                if worker in self._stretched and self._effects is not None:
                    finish_s = self._effects.finish_s(worker, start_s, duration_s)
                    duration_s = finish_s - start_s
                else:
                    finish_s = start_s + duration_s
                sum_s += duration_s
                if duration_s > longest_s:
                    longest_s = duration_s
                free_s[worker] = finish_s
                if finish_s > ready_s:
                    ready_s = finish_s
                if self.timeline is not None:
                    self._note(f"attention {worker}", start_s, finish_s, microbatch, "attention")
        return Attention(ready_s, longest_s, sum_s)

    def serve(
        self, ready_s: float, one_way_s: float, round_trip_s: float, ffn_s: float, microbatch: int
    ) -> float:
        """Send a microbatch to the FFN, compute, send back; when the workers have the answer."""
        sent_s = ready_s if ready_s > self._link_free_s else self._link_free_s
        self._link_free_s = sent_s + round_trip_s
        received_s = sent_s + one_way_s
        start_s = received_s if received_s > self._ffn_free_s else self._ffn_free_s
        finish_s = start_s + ffn_s
        self._ffn_free_s = finish_s
        arrived_s = finish_s + one_way_s
        if self.timeline is not None:
            self._note("link to ffn", sent_s, received_s, microbatch, "transfer")
            self._note("ffn", start_s, finish_s, microbatch, "ffn")
            self._note("link to attention", finish_s, arrived_s, microbatch, "transfer")
        return arrived_s

    def _note(self, lane: str, start_s: float, end_s: float, microbatch: int, stage: str) -> None:
        if self.timeline is not None:
            self.timeline.append(StageInterval(lane, start_s, end_s, microbatch, stage))
