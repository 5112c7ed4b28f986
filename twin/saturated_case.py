"""One saturated run as it was asked for, and the chance it draws from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from models.streams import stream
from traces.lengths import LengthPairs
from twin.faults import Fault
from twin.request_stream import RequestStream
from twin.slots import InService
from twin.stages import StageTimes

Start = Literal["stationary", "cold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedCase:
    """All that decides the numbers of a run.

    Attributes:
        times: Bundle, r, layers played.
        lengths: Law of the requests.
        num_cycles: Steps of microbatches.
        seed: Of the named streams.
        replication: Which independent repetition.
        start: ``stationary`` or ``cold``.
        routing: Name of the policy.
        faults: What goes wrong.
    """

    times: StageTimes
    lengths: LengthPairs
    num_cycles: int
    seed: int
    replication: int
    start: Start
    routing: str
    faults: tuple[Fault, ...]

    def in_service(self) -> list[InService]:
        """What is in the slots of each microbatch at instant 0."""
        bundle = self.times.bundle
        per_pool = self.times.attention_per_ffn * bundle.batch_per_worker
        num_slots = bundle.microbatches * per_pool
        rng = stream(self.seed, "slots at start", self.replication)
        if self.start == "stationary":
            prompts, outputs, age = self.lengths.sample_in_service(rng, num_slots)
        else:
            prompts, outputs = self.lengths.sample(rng, num_slots)
            age = np.zeros(num_slots, dtype=np.int64)
        return [
            InService(
                prompt_tokens=prompts[first : first + per_pool],
                output_tokens=outputs[first : first + per_pool],
                age_steps=age[first : first + per_pool],
            )
            for first in range(0, num_slots, per_pool)
        ]

    def requests(self) -> RequestStream:
        """The requests that come into free slots, from the first one on."""
        return RequestStream(self.lengths, stream(self.seed, "requests", self.replication))

    def routing_chance(self) -> np.random.Generator:
        """What a routing policy draws from."""
        return stream(self.seed, "routing", self.replication)
