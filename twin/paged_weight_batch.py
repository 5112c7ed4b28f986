"""Running sequences of the simulated engine: the batching policy's orders, carried out on pages.

The policy is the runtime's, object for object; here its pages are counted, not filled.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from models.kv_bytes import KvLayers
from models.kv_paging import kv_paging
from policies.batching.first_come import FirstComeBatching
from policies.batching.log import LoggedBatching
from policies.batching.orders import BatchOrders
from policies.batching.policy import BatchingPolicy
from policies.batching.settings import BatchingSettings
from policies.precision_forecast import HORIZON_STEPS, forecast_kv_pages
from policies.weight_page_ledger import PageLedger
from traces.decisions import DecisionLog
from twin.paged_weight_cache import KvPages
from twin.paged_weight_log import Totals

Ints = NDArray[np.int64]


class RunningBatch:
    """Running sequences, and the queue before them.

    Attributes:
        accounts: The batching policy.
        admitted: Sequences that left the queue in the step that is being built.
        preemptions: [requests] how often each gave its pages up.
        is_refused: [requests] whether it can never be served.
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
        log: DecisionLog | None = None,
    ) -> None:
        self._cache = KvPages(ledger, kv, page_bytes=page_bytes)
        self._kv, self._page_bytes, self._ledger = kv, page_bytes, ledger
        self._totals = totals
        self._prompt, self._output = prompt_tokens, output_tokens
        self._held = np.zeros(len(prompt_tokens), np.int64)
        self.preemptions = np.zeros(len(prompt_tokens), np.int64)
        self.is_refused = np.zeros(len(prompt_tokens), np.bool_)
        self.admitted: list[int] = []
        self.accounts = FirstComeBatching(
            kv_paging(kv, page_bytes=page_bytes),
            BatchingSettings(max_running=max_running, prefill_tokens=prefill_tokens),
        )
        self._policy: BatchingPolicy = (
            self.accounts if log is None else LoggedBatching(self.accounts, log)
        )
        self._orders = BatchOrders()

    @property
    def ids(self) -> Ints:
        """[n] running sequences, in order of admission."""
        return self.accounts.ids

    @property
    def computed(self) -> Ints:
        """[n] tokens whose keys and values are held."""
        return self.accounts.computed

    @property
    def count(self) -> Ints:
        """[n] tokens of each in the step that is being built or under way."""
        return self.accounts.counts

    @property
    def known(self) -> Ints:
        """[n] tokens there are of each: prompt and generated."""
        return self.accounts.known

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return self.accounts.num_waiting

    @property
    def is_empty(self) -> bool:
        """Whether nobody runs and nobody waits."""
        return self.accounts.is_empty

    def arrive(self, sequence: int, *, now: float) -> None:
        """A request comes."""
        self._policy.add(
            sequence, int(self._prompt[sequence]), int(self._output[sequence]), now=now
        )

    def schedule(self, make_room: Callable[[int, bool], bool], *, now: float) -> int:
        """Fix who computes and reserve the pages; the tokens of the step.

        Args:
            make_room: Told the pages that a sequence lacks, and whether it is the only one that
                runs; whether they will be there in the next steps without preempting anybody.
            now: Simulated seconds.
        """
        self.admitted.clear()
        orders = self._policy.schedule(self._ledger.free_pages, now=now)
        self._carry_out(orders)
        while orders.pages_needed:
            is_coming = make_room(orders.pages_needed, orders.is_alone)
            orders = self._policy.room(is_coming, self._ledger.free_pages, now=now)
            self._carry_out(orders)
        self._totals.held_back += len(orders.held_back)
        self._orders = orders
        return int(orders.counts.sum())

    def finish(self, *, now: float) -> tuple[Ints, Ints]:
        """The step is over: sequences that got a token, and those of them that are done."""
        orders, self._orders = self._orders, BatchOrders()
        if not len(orders.sequences):
            return orders.sequences, orders.sequences
        accounts = self.accounts
        works = accounts.counts > 0
        is_last = orders.speaks & (accounts.known[works] + 1 >= accounts.goal[works])
        spoke, finished = orders.sequences[orders.speaks], orders.sequences[is_last]
        self._held[orders.sequences] += orders.counts
        self._policy.step_done(finished.tolist(), now=now)
        for sequence in finished.tolist():
            self._cache.release(sequence)
        return spoke, finished

    def forecast_pages(self) -> int:
        """Pages the running sequences will need soon."""
        accounts = self.accounts
        return forecast_kv_pages(
            self._kv,
            held_tokens=accounts.computed,
            prompt_tokens_left=accounts.known - accounts.computed,
            decode_tokens_left=accounts.goal - accounts.known,
            horizon_steps=HORIZON_STEPS,
            page_bytes=self._page_bytes,
        )

    def _carry_out(self, orders: BatchOrders) -> None:
        for sequence in orders.preempted:
            self._totals.recomputed_tokens += int(self._held[sequence])
            self._totals.preemptions += 1
            self.preemptions[sequence] += 1
            self._held[sequence] = 0
            self._cache.release(sequence)
        for sequence in orders.refused:
            self.is_refused[sequence] = True
            self._cache.release(sequence)
        self.admitted.extend(admission.sequence for admission in orders.admitted)
        growing = orders.growing
        if len(growing) and not self._cache.reserve_all(
            growing, self._held[growing], orders.growth
        ):
            raise RuntimeError("pages were ordered that are not there")
