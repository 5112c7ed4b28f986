"""The bundle as one would first write it in SimPy: a process a slot, an event a token.

It draws the same requests in the same order as ``twin``, so its cycles must come out equal; it
serves as the baseline of ``bundle_speed.py`` and as one more check.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import simpy
from simpy.events import Event

from twin.request_stream import RequestLaw
from twin.saturated_case import SaturatedCase


class TokenEventBundle:
    """r workers of B slots under the barrier; every slot wakes up for every token."""

    def __init__(self, case: SaturatedCase) -> None:
        self.env = simpy.Environment()
        self.case = case
        self.cycle_s: list[float] = []
        self.completed = 0
        self.loads = [0] * case.times.attention_per_ffn
        self.token = self.env.event()
        law = RequestLaw(case.lengths)
        lines = [law.endless(rng) for rng in case.request_chance()]
        (start,) = case.in_service()
        columns = (start.prompt_tokens, start.output_tokens, start.age_steps)
        requests = zip(*(column.tolist() for column in columns), strict=True)
        for slot, (prompt, output, age) in enumerate(requests):
            worker = slot // case.times.bundle.batch_per_worker
            self.env.process(self.slot(worker, lines[worker], prompt, output, age))
        self.env.process(self.steps())

    def slot(
        self, worker: int, line: Iterator[tuple[int, int]], prompt: int, output: int, age: int
    ) -> Generator[Event, None, None]:
        while True:
            self.loads[worker] += prompt + age
            while age < output:
                yield self.token
                age += 1
                self.loads[worker] += 1
            self.loads[worker] -= prompt + output
            self.completed += 1
            prompt, output = next(line)
            age = 0

    def steps(self) -> Generator[Event, None, None]:
        times = self.case.times
        c, b = times.bundle.coefficients, times.bundle.batch_per_worker
        live = times.attention_per_ffn * b
        shared_s = max(times.round_trip_s(live, b), times.ffn_s(live))
        yield self.env.timeout(0.0)  # slots fill first
        for _ in range(self.case.num_cycles):
            cycle_s = max(c.attention_s(max(self.loads)), shared_s)
            self.cycle_s.append(cycle_s)
            yield self.env.timeout(cycle_s * times.layers_each)
            now, self.token = self.token, self.env.event()
            now.succeed()
            yield self.env.timeout(0.0)  # every slot has its token

    def run(self) -> None:
        self.env.run()
