"""The slots of one microbatch, always full: who finishes when, and what each worker holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.routing import RoutingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class InService:
    """Requests found in slots: [num_slots] prompt and output tokens and age in steps, >= 0."""

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    age_steps: NDArray[np.int64]


class WaitingLine:
    """An endless stream of new requests, behind those that came back from a lost worker.

    Attributes:
        num_retries: Requests that have come back so far.
    """

    __slots__ = ("_returned", "_take_fresh", "num_retries")

    def __init__(self, fresh: Iterator[tuple[int, int]]) -> None:
        self._take_fresh = fresh.__next__
        self._returned: deque[tuple[int, int]] = deque()
        self.num_retries = 0

    def take(self) -> tuple[int, int]:
        """Prompt and output tokens of the next request."""
        return self._returned.popleft() if self._returned else self._take_fresh()

    def put_back(self, requests: Sequence[tuple[int, int]]) -> None:
        """Queue requests in front of all new ones, in the given order."""
        self._returned.extend(requests)
        self.num_retries += len(requests)

    def __len__(self) -> int:
        """Requests that came back and wait."""
        return len(self._returned)


class SlotPool:
    """The r * B slots of one microbatch. Slot ``worker * B + i`` belongs to ``worker``.

    A step adds one token to every slot. Work is done only for slots whose request finishes: they
    sit in a calendar under the step after which they are free, and the load of a worker is a
    running sum.

    Attributes:
        loads: [r] tokens each worker reads in the coming step.
        live: [r] filled slots of each worker: B, or 0 while it is lost.
    """

    __slots__ = (
        "_calendar",
        "_full_load",
        "_line",
        "_policy",
        "_slots_per_worker",
        "_step",
        "_worker_of",
        "live",
        "loads",
    )

    def __init__(
        self, start: InService, num_workers: int, line: WaitingLine, policy: RoutingPolicy | None
    ) -> None:
        """``policy`` None: every free slot takes the next request, in order of slots.

        Requests of the stream are independent, so that is the random assignment.
        """
        num_slots = len(start.prompt_tokens)
        self._slots_per_worker = num_slots // num_workers
        self._worker_of = [slot // self._slots_per_worker for slot in range(num_slots)]
        self._line = line
        self._policy = policy
        self._step = 0
        held = start.prompt_tokens + start.age_steps
        self.loads: list[int] = held.reshape(num_workers, -1).sum(axis=1).tolist()
        self.live = [self._slots_per_worker] * num_workers
        self._full_load: list[int] = (start.prompt_tokens + start.output_tokens).tolist()
        self._calendar: dict[int, list[int]] = {}
        last_step = start.output_tokens - start.age_steps - 1
        for slot, step in enumerate(last_step.tolist()):
            self._calendar.setdefault(step, []).append(slot)

    def finish_step(self, now: float) -> int:
        """Age every slot, free the finished ones and refill them; how many finished."""
        done = self._calendar.pop(self._step, None)
        self._step += 1
        self.loads = [load + live for load, live in zip(self.loads, self.live, strict=True)]
        if done is None:
            return 0
        done.sort()
        self._refill(done, now)
        return len(done)

    def lose(self, worker: int) -> None:
        """Drop everything a worker holds; its requests queue again with what they have so far."""
        returned: dict[int, tuple[int, int]] = {}
        for step, slots in list(self._calendar.items()):
            kept = []
            for slot in slots:
                if self._worker_of[slot] == worker:
                    to_come = step - self._step + 1  # decode steps of this request ahead
                    returned[slot] = (self._full_load[slot] - to_come, to_come)
                else:
                    kept.append(slot)
            if kept:
                self._calendar[step] = kept
            else:
                del self._calendar[step]
        self._line.put_back([returned[slot] for slot in sorted(returned)])
        self.loads[worker] = 0
        self.live[worker] = 0

    def restore(self, worker: int, now: float) -> None:
        """Fill every slot of a worker that is back, with requests at age 0."""
        first = worker * self._slots_per_worker
        slots = list(range(first, first + self._slots_per_worker))
        for slot in slots:
            self._full_load[slot] = 0
        self.live[worker] = self._slots_per_worker
        self._refill(slots, now)

    def _refill(self, slots: list[int], now: float) -> None:
        """Put new requests into finished slots, given in ascending order."""
        take = self._line.take
        if self._policy is None:
            for slot in slots:
                self._replace(slot, *take())
            return
        owners = np.array([self._worker_of[slot] for slot in slots])
        for slot, worker in zip(slots, owners.tolist(), strict=True):
            self.loads[worker] -= self._full_load[slot]
            self._full_load[slot] = 0
        requests = [take() for _ in slots]
        free_slots = np.bincount(owners, minlength=len(self.loads))
        order = self._policy.assign(
            np.array([prompt for prompt, _ in requests]),
            free_slots=free_slots,
            token_loads=np.array(self.loads),
            now=now,
        )
        if np.bincount(order.workers, minlength=len(self.loads)).tolist() != free_slots.tolist():
            raise RuntimeError(f"{type(self._policy).__name__} does not fill the free slots")
        by_worker = np.argsort(order.workers, kind="stable").tolist()
        for slot, request in zip(slots, by_worker, strict=True):
            self._replace(slot, *requests[request])

    def _replace(self, slot: int, prompt_tokens: int, output_tokens: int) -> None:
        """The request that finished leaves; the next one starts at age 0."""
        self.loads[self._worker_of[slot]] += prompt_tokens - self._full_load[slot]
        self._full_load[slot] = prompt_tokens + output_tokens
        last_step = self._step - 1 + output_tokens
        if last_step in self._calendar:
            self._calendar[last_step].append(slot)
        else:
            self._calendar[last_step] = [slot]
