"""The running sequences of an engine: who computes how many tokens in a step, and on which pages.

In order of admission: one token for who decodes, prompts in chunks as far as the step's prefill
reaches, then the waiting ones, first come, first served. Short of pages, the weights are asked for
room; if none can come, the youngest gives its pages up and waits again at the front.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from models.kv_bytes import KvLayers
from policies.precision_forecast import HORIZON_STEPS, forecast_kv_pages
from policies.weight_page_ledger import PageLedger
from twin.paged_weight_cache import KvPages
from twin.paged_weight_log import Totals

Ints = NDArray[np.int64]


class RunningBatch:
    """Struct of arrays over the running sequences, and the queue before them.

    Attributes:
        ids: [n] sequences, in order of admission.
        computed: [n] tokens whose keys and values are held.
        count: [n] tokens of each in the step that is being built or under way.
        known: [requests] tokens there are of each: prompt and generated.
        waiting: Sequences in the queue.
        admitted: Sequences admitted in the step that is being built.
    """

    def __init__(
        self,
        prompt_tokens: Ints,
        output_tokens: Ints,
        *,
        ledger: PageLedger,
        kv: tuple[KvLayers, ...],
        page_bytes: int,
        max_running: int,
        prefill_tokens: int,
        totals: Totals,
    ) -> None:
        self._cache = KvPages(ledger, kv, page_bytes=page_bytes)
        self._kv, self._page_bytes = kv, page_bytes
        self._max_running, self._prefill = max_running, prefill_tokens
        self._totals = totals
        self._goal = prompt_tokens + output_tokens
        self.known = prompt_tokens.copy()
        self.preemptions = np.zeros(len(prompt_tokens), np.int64)
        self.is_refused = np.zeros(len(prompt_tokens), np.bool_)
        self.waiting: deque[int] = deque()
        self.admitted: list[int] = []
        self.ids = np.zeros(0, np.int64)
        self.computed = np.zeros(0, np.int64)
        self.count = np.zeros(0, np.int64)

    @property
    def is_empty(self) -> bool:
        """Whether nobody runs and nobody waits."""
        return len(self.ids) == 0 and not self.waiting

    def schedule(self, make_room: Callable[[int], bool]) -> int:
        """Set ``count`` and reserve the pages; returns the tokens of the step.

        Args:
            make_room: Told the pages that a sequence lacks; whether they will be there in the
                next steps without preempting anybody.
        """
        self.admitted.clear()
        budget = self._shares()
        if self._cache.reserve_all(self.ids, self.computed, self.count):
            while budget > 0 and self._admit():
                known = int(self.known[self.ids[-1]])
                share = min(known, budget)
                self.count[-1] = share
                if not self._cache.reserve(int(self.ids[-1]), 0, share):
                    self._in_order(len(self.ids) - 1, make_room)
                    break
                budget -= share if known > 1 else 0
        else:
            self._in_order(0, make_room)
        return int(self.count.sum())

    def finish(self) -> tuple[Ints, Ints]:
        """The step is over: sequences that got a token, and those of them that are done."""
        self.computed += self.count
        ids = self.ids
        speaks = (self.count > 0) & (self.computed == self.known[ids])
        self.count[:] = 0
        spoke = ids[speaks]
        self.known[spoke] += 1
        done = speaks & (self.known[ids] >= self._goal[ids])
        finished = ids[done]
        if len(finished):
            for sequence in finished.tolist():
                self._cache.release(sequence)
            self._keep(~done)
        return spoke, finished

    def forecast_pages(self) -> int:
        """Pages the running sequences will need soon."""
        known = self.known[self.ids]
        return forecast_kv_pages(
            self._kv,
            held_tokens=self.computed,
            prompt_tokens_left=known - self.computed,
            decode_tokens_left=self._goal[self.ids] - known,
            horizon_steps=HORIZON_STEPS,
            page_bytes=self._page_bytes,
        )

    def _shares(self) -> int:
        """One token for who decodes, prompts in order of admission; returns the prefill left."""
        left = self.known[self.ids] - self.computed
        np.minimum(left, 1, out=self.count)
        budget = self._prefill
        for at in np.flatnonzero(left > 1).tolist():
            share = min(int(left[at]), budget)
            self.count[at] = share
            budget -= share
        return budget

    def _admit(self) -> bool:
        if not self.waiting or len(self.ids) >= self._max_running:
            return False
        sequence = self.waiting.popleft()
        self.admitted.append(sequence)
        self.ids = np.append(self.ids, sequence)
        self.computed = np.append(self.computed, 0)
        self.count = np.append(self.count, 0)
        return True

    def _in_order(self, first: int, make_room: Callable[[int], bool]) -> None:
        """Pages one sequence after the other; nobody is admitted in such a step."""
        at = first
        while at < len(self.ids):
            sequence, held, added = (
                int(column[at]) for column in (self.ids, self.computed, self.count)
            )
            self._cache.leave_behind(sequence, held)
            if added == 0 or self._cache.reserve(sequence, held, added):
                at += 1
                continue
            here = slice(at, at + 1)
            needed = int(self._cache.pages_needed(self.computed[here], self.count[here])[0])
            if make_room(needed):
                self.count[at] = 0
                self._totals.held_back += 1
                at += 1
            else:
                self._preempt()

    def _preempt(self) -> None:
        """The youngest gives its pages up and waits again; alone, it can never be served."""
        victim = int(self.ids[-1])
        self._totals.recomputed_tokens += int(self.computed[-1])
        self._cache.release(victim)
        self._keep(np.arange(len(self.ids)) < len(self.ids) - 1)
        if len(self.ids):
            self._totals.preemptions += 1
            self.preemptions[victim] += 1
            self.waiting.appendleft(victim)
        else:
            self.is_refused[victim] = True

    def _keep(self, mask: NDArray[np.bool_]) -> None:
        self.ids, self.computed = self.ids[mask], self.computed[mask]
        self.count = self.count[mask]
