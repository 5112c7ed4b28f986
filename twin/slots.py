"""The slots of one microbatch, always full: who finishes when, and what each worker holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.routing import RoutingPolicy

# Prompt tokens, output tokens and line of a request without a slot.
Waiting = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class InService:
    """Requests found in slots: [num_slots] prompt and output tokens and age in steps, >= 0."""

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    age_steps: NDArray[np.int64]


class RequestLines:
    """Where the next request of a slot comes from: r endless lines, one for each worker.

    At the start, a worker's slots hold requests of the worker's own line. Whoever follows a
    request comes from the same line, wherever the request was placed. So under every routing
    policy the same requests are in slots in the same steps, only on other workers; and with
    in-place refill a worker's path does not depend on how many other workers there are. Both are
    common random numbers for comparing policies and ratios.

    Requests of a lost worker go before all others.

    Attributes:
        num_retries: How often a request came back.
    """

    __slots__ = ("_next_of_line", "_returned", "num_retries")

    def __init__(self, lines: Sequence[Iterator[tuple[int, int]]]) -> None:
        self._next_of_line = [line.__next__ for line in lines]
        self._returned: deque[Waiting] = deque()
        self.num_retries = 0

    def follow(self, line: int) -> Waiting:
        """The request that takes the place of one of that line."""
        if self._returned:
            return self._returned.popleft()
        prompt, output = self._next_of_line[line]()
        return prompt, output, line

    def put_back(self, requests: Sequence[Waiting]) -> None:
        """Queue requests before all new ones, in the given order."""
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
        "_line_of",
        "_lines",
        "_policy",
        "_slots_per_worker",
        "_step",
        "_worker_of",
        "live",
        "loads",
    )

    def __init__(
        self, start: InService, num_workers: int, lines: RequestLines, policy: RoutingPolicy | None
    ) -> None:
        """``policy`` None: in place, every slot takes the request that follows its last one.

        Requests are independent, so that is the random assignment.
        """
        num_slots = len(start.prompt_tokens)
        self._slots_per_worker = num_slots // num_workers
        self._worker_of = [slot // self._slots_per_worker for slot in range(num_slots)]
        self._line_of = list(self._worker_of)
        self._lines = lines
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
        returned: dict[int, Waiting] = {}
        for step, slots in list(self._calendar.items()):
            kept = []
            for slot in slots:
                if self._worker_of[slot] == worker:
                    to_come = step - self._step + 1  # decode steps of this request ahead
                    prompt = self._full_load[slot] - to_come
                    returned[slot] = (prompt, to_come, self._line_of[slot])
                else:
                    kept.append(slot)
            if kept:
                self._calendar[step] = kept
            else:
                del self._calendar[step]
        self._lines.put_back([returned[slot] for slot in sorted(returned)])
        self.loads[worker] = 0
        self.live[worker] = 0

    def restore(self, worker: int, now: float) -> None:
        """Fill every slot of a worker that is back, with requests at age 0."""
        first = worker * self._slots_per_worker
        slots = list(range(first, first + self._slots_per_worker))
        for slot in slots:
            self._full_load[slot] = 0
            self._line_of[slot] = worker
        self.live[worker] = self._slots_per_worker
        self._refill(slots, now)

    def _refill(self, slots: list[int], now: float) -> None:
        """Put new requests into finished slots, given in ascending order."""
        follow, line_of = self._lines.follow, self._line_of
        if self._policy is None:
            for slot in slots:
                self._replace(slot, follow(line_of[slot]))
            return
        owners = np.array([self._worker_of[slot] for slot in slots])
        for slot, worker in zip(slots, owners.tolist(), strict=True):
            self.loads[worker] -= self._full_load[slot]
            self._full_load[slot] = 0
        requests = [follow(line_of[slot]) for slot in slots]
        free_slots = np.bincount(owners, minlength=len(self.loads))
        order = self._policy.assign(
            np.array([request[0] for request in requests]),
            free_slots=free_slots,
            token_loads=np.array(self.loads),
            now=now,
        )
        if np.bincount(order.workers, minlength=len(self.loads)).tolist() != free_slots.tolist():
            raise RuntimeError(f"{type(self._policy).__name__} does not fill the free slots")
        by_worker = np.argsort(order.workers, kind="stable").tolist()
        for slot, request in zip(slots, by_worker, strict=True):
            self._replace(slot, requests[request])

    def _replace(self, slot: int, request: Waiting) -> None:
        """The request that finished leaves; the next one starts at age 0."""
        prompt, output, self._line_of[slot] = request
        self.loads[self._worker_of[slot]] += prompt - self._full_load[slot]
        self._full_load[slot] = prompt + output
        last_step = self._step - 1 + output
        if last_step in self._calendar:
            self._calendar[last_step].append(slot)
        else:
            self._calendar[last_step] = [slot]
