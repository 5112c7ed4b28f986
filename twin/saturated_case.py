"""One saturated run as it was asked for, and the chance it draws from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from models.streams import stream
from policies.routing import RoutingPolicy
from traces.lengths import LengthPairs
from twin.faults import Fault
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
        routing: Name of the policy, or a policy.
        faults: What goes wrong.
    """

    times: StageTimes
    lengths: LengthPairs
    num_cycles: int
    seed: int
    replication: int
    start: Start
    routing: str | RoutingPolicy
    faults: tuple[Fault, ...]

    def in_service(self) -> list[InService]:
        """What is in the slots of each microbatch at instant 0, worker by worker."""
        bundle, r = self.times.bundle, self.times.attention_per_ffn
        m, b = bundle.microbatches, bundle.batch_per_worker
        drawn = np.stack([self._in_slots_of(worker, m * b) for worker in range(r)])
        by_pool = drawn.reshape(r, 3, m, b).transpose(2, 1, 0, 3).reshape(m, 3, r * b)
        return [
            InService(prompt_tokens=pool[0], output_tokens=pool[1], age_steps=pool[2])
            for pool in by_pool
        ]

    def _in_slots_of(self, worker: int, num_slots: int) -> NDArray[np.int64]:
        """[3, num_slots]: prompts, outputs, ages."""
        rng = stream(self.seed, f"slots at start/worker {worker}", self.replication)
        if self.start == "stationary":
            return np.stack(self.lengths.sample_in_service(rng, num_slots))
        prompts, outputs = self.lengths.sample(rng, num_slots)
        return np.stack((prompts, outputs, np.zeros_like(prompts)))

    def request_chance(self) -> list[np.random.Generator]:
        """What each worker's line of requests is drawn from."""
        return [
            stream(self.seed, f"requests/worker {worker}", self.replication)
            for worker in range(self.times.attention_per_ffn)
        ]

    def routing_chance(self) -> np.random.Generator:
        """What a routing policy draws from."""
        return stream(self.seed, "routing", self.replication)
