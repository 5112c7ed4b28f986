"""The slots of one microbatch that may be empty: requests in service and when they finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twin.admission import RequestTable, Returned


class StepTokens(NamedTuple):
    """What a step made.

    Attributes:
        tokens: Tokens in all, one for each filled slot.
        continuing: Of those, tokens that follow one of the same request a step before.
        resumed_gaps_s: Gaps of requests that lost their worker and now have a token again.
        completed: Requests that got their last token.
    """

    tokens: int
    continuing: int
    resumed_gaps_s: Sequence[float]
    completed: int


class OpenPool:
    """Up to B requests of one microbatch on each of r workers.

    As in ``twin.slots.SlotPool`` a step costs as much as the requests that start or finish with
    it; what goes on is counted in running sums.

    Attributes:
        loads: [r] tokens each worker reads in the coming step.
        live: [r] filled slots of each worker.
        num_live: Filled slots of all workers.
        present: [r] whether the worker is there.
        is_running: Whether a step is under way.
        begun_s: When the step under way began.
    """

    __slots__ = (
        "_calendar",
        "_fresh",
        "_resumed",
        "_slots_per_worker",
        "_step",
        "_table",
        "begun_s",
        "is_running",
        "live",
        "loads",
        "num_live",
        "present",
    )

    def __init__(self, table: RequestTable, num_workers: int, slots_per_worker: int) -> None:
        self._table = table
        self._slots_per_worker = slots_per_worker
        self._step = 0
        self._calendar: dict[int, list[int]] = {}
        self._fresh = range(0)
        self._resumed: list[int] = []
        self.loads = [0] * num_workers
        self.live = [0] * num_workers
        self.num_live = 0
        self.present = [True] * num_workers
        self.is_running = False
        self.begun_s = 0.0

    def free_slots(self) -> list[int]:
        """[r] empty slots of each worker, none where it is lost."""
        full = self._slots_per_worker
        return [full - n if here else 0 for n, here in zip(self.live, self.present, strict=True)]

    def finish_step(self, now: float) -> StepTokens:
        """Every request in a slot has one token more; finished ones leave."""
        table, fresh, tokens = self._table, self._fresh, self.num_live
        done = self._calendar.pop(self._step, ())
        self._step += 1
        self.loads = [load + live for load, live in zip(self.loads, self.live, strict=True)]
        if fresh:
            table.first_token_s[fresh.start : fresh.stop] = now
            self._fresh = range(0)
        gaps = [now - table.lost_s[row] for row in self._resumed]
        continuing = tokens - len(fresh) - len(gaps)
        if gaps:
            self._resumed = []
        loads, live, prompts, outputs = (
            self.loads,
            self.live,
            table.prompt_tokens,
            table.output_tokens,
        )
        for row in done:
            worker = table.worker[row]
            loads[worker] -= prompts[row] + outputs[row]
            live[worker] -= 1
            table.last_token_s[row] = now
        self.num_live = tokens - len(done)
        self.is_running = False
        return StepTokens(tokens, continuing, gaps, len(done))

    def admit(
        self, returned: Sequence[Returned], fresh: range, workers: Sequence[int], now: float
    ) -> None:
        """Put requests into slots; ``workers``: first of the returned ones, then of the rows."""
        table = self._table
        for request, worker in zip(returned, workers, strict=False):
            table.worker[request.row] = worker
            self._place(request.row, worker, request.prompt_tokens, request.to_come)
            self._resumed.append(request.row)
        own = workers[len(returned) :] if returned else workers
        table.worker[fresh.start : fresh.stop] = own
        table.admitted_s[fresh.start : fresh.stop] = now
        prompts, outputs = table.prompt_tokens, table.output_tokens
        for row, worker in zip(fresh, own, strict=True):
            self._place(row, worker, prompts[row], outputs[row])
        self._fresh = fresh

    def lose(self, worker: int, now: float) -> list[Returned]:
        """Empty the slots of a worker; its requests, with what they have so far as prompt."""
        table = self._table
        returned = []
        for step, rows in list(self._calendar.items()):
            kept = []
            for row in rows:
                if table.worker[row] != worker:
                    kept.append(row)
                    continue
                to_come = step - self._step + 1
                prompt = table.prompt_tokens[row] + table.output_tokens[row] - to_come
                table.retries[row] += 1
                table.lost_s[row] = now
                ready_s = now + table.prefill_s(prompt)
                returned.append(Returned(ready_s, row, prompt, to_come))
            self._calendar[step] = kept
        self.num_live -= self.live[worker]
        self.loads[worker] = self.live[worker] = 0
        self.present[worker] = False
        return returned

    def _place(self, row: int, worker: int, prompt_tokens: int, to_come: int) -> None:
        self.loads[worker] += prompt_tokens
        self.live[worker] += 1
        self.num_live += 1
        last_step = self._step + to_come - 1
        if last_step in self._calendar:
            self._calendar[last_step].append(row)
        else:
            self._calendar[last_step] = [row]
