"""Continuous batching, first come, first served, in pages that may run out.

In order of admission: one token for who decodes, prompts in chunks as far as the step's prefill
reaches, then the waiting ones, each when there are pages for all of it. Short of pages, the driver
is told to ask for room; if none can come, the youngest gives its pages up and waits again at the
front, so the oldest always gets on.

    add -> waiting -> [loading ->] running -> ended
              ^---- preempted ----'

Source: iteration-level scheduling (Orca, OSDI 2022), preemption of the latest arrival (vLLM, SOSP
2023), prompts in chunks beside decoding (Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.kv_paging import KvPaging
from policies.batching.orders import Admission, BatchOrders, Ints
from policies.batching.settings import BatchingSettings

_NONE: Ints = np.zeros(0, dtype=np.int64)
_NOBODY: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)


class _Answer(NamedTuple):
    """Whether pages are on their way, and how many are free now."""

    is_coming: bool
    free_pages: int


class _Waiting:
    """What is known of a sequence in the queue."""

    __slots__ = ("cached", "goal", "known")

    def __init__(self, known: int, goal: int) -> None:
        self.known, self.goal, self.cached = known, goal, 0


class FirstComeBatching:
    """Struct of arrays over the running sequences, and the queue before them.

    Attributes:
        settings: Limits.
        paging: Pages of a block.
        ids: [n] running sequences, in order of admission.
        known: [n] tokens there are of each: prompt and generated.
        computed: [n] tokens whose keys and values are held.
        goal: [n] most tokens of each.
        counts: [n] tokens of each in the step under way.
        loading: [n] tokens being loaded; 0: none.
        pages: [n] pages of each.
    """

    def __init__(self, paging: KvPaging, settings: BatchingSettings | None = None) -> None:
        self.settings = settings if settings is not None else BatchingSettings()
        self.paging = paging
        self._queue: deque[int] = deque()
        self._waiting: dict[int, _Waiting] = {}
        self.ids, self.known, self.computed, self.goal = _NONE, _NONE, _NONE, _NONE
        self.counts, self.loading, self.pages = _NONE, _NONE, _NONE
        self._started: set[int] = set()  # those whose admission has been ordered
        self._schedule: Generator[BatchOrders, _Answer, BatchOrders] | None = None

    # --- what has happened -------------------------------------------------------------------

    def add(self, sequence: int, prompt_tokens: int, max_tokens: int, *, now: float) -> None:
        """A sequence arrives.

        Args:
            sequence: Its number, not in use.
            prompt_tokens: >= 1.
            max_tokens: Most tokens to generate, >= 1.
            now: Seconds since the start of the run.

        Raises:
            ValueError: If the number is in use, or a count is below 1.
        """
        if prompt_tokens < 1 or max_tokens < 1:
            raise ValueError(
                f"sequence {sequence}: prompt_tokens and max_tokens must be >= 1, "
                f"found {prompt_tokens} and {max_tokens}"
            )
        if sequence in self._waiting or self._place(sequence) is not None:
            raise ValueError(f"sequence {sequence}: its number is in use")
        self._waiting[sequence] = _Waiting(prompt_tokens, prompt_tokens + max_tokens)
        self._queue.append(sequence)

    def cached(self, sequence: int, tokens: int, *, now: float) -> None:
        """So many leading tokens of a waiting sequence could be loaded instead of computed.

        At least one token is left to compute. Unknown sequences are none.
        """
        entry = self._waiting.get(sequence)
        if entry is not None:
            entry.cached = max(0, min(tokens, entry.known - 1))

    def loaded(self, sequence: int, tokens: int, *, now: float) -> None:
        """A load has ended with so many leading tokens in place; the pages of others went back."""
        at = self._place(sequence)
        if at is None or not self.loading[at]:
            return
        tokens = max(0, min(tokens, int(self.loading[at])))
        self.loading[at] = 0
        self.computed[at] = tokens
        self.pages[at] = self.paging.held(np.array([tokens]), np.array([0]))[0]

    def cancel(self, sequence: int, *, now: float) -> None:
        """Nobody waits for it any more; its pages go back. Unknown sequences are none."""
        if self._waiting.pop(sequence, None) is not None:
            self._queue.remove(sequence)
            return
        at = self._place(sequence)
        if at is not None:
            self._keep(np.arange(len(self.ids)) != at)

    def step_done(self, ended: Sequence[int], *, now: float) -> None:
        """The step is over: its tokens are held, who speaks has one token more.

        Args:
            ended: Sequences that spoke their last token; those at their goal end by themselves.
            now: Seconds since the start of the run.
        """
        speaks = (self.counts > 0) & (self.computed + self.counts == self.known)
        self.computed = self.computed + self.counts
        self.known = self.known + speaks
        self.counts = np.zeros(len(self.ids), np.int64)
        done = speaks & (self.known >= self.goal)
        if len(ended):
            done = done | np.isin(self.ids, np.asarray(ended, dtype=np.int64))
        if done.any():
            self._keep(~done)

    # --- what is to be done ------------------------------------------------------------------

    def schedule(self, free_pages: int, *, now: float) -> BatchOrders:
        """The next step.

        Args:
            free_pages: Pages that nobody holds.
            now: Seconds since the start of the run.
        """
        self._schedule = self._step(free_pages)
        return self._resume(None)

    def room(self, is_coming: bool, free_pages: int, *, now: float) -> BatchOrders:
        """The answer to ``pages_needed``, and what follows from it.

        Args:
            is_coming: Whether pages will be free in the next steps without preempting anybody.
            free_pages: Pages that nobody holds now.
            now: Seconds since the start of the run.

        Raises:
            RuntimeError: If nobody has asked.
        """
        if self._schedule is None:
            raise RuntimeError("room: nobody has asked for pages")
        return self._resume(_Answer(is_coming, free_pages))

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the sequences in the queue."""
        return sum(entry.known for entry in self._waiting.values())

    @property
    def is_empty(self) -> bool:
        """Whether nobody runs and nobody waits."""
        return len(self.ids) == 0 and not self._queue

    @property
    def held_tokens(self) -> Ints:
        """[n] tokens that the pages of each running sequence are for."""
        return np.maximum(self.computed, self.loading)

    def next_waiting(self, count: int) -> tuple[int, ...]:
        """The first sequences of the queue."""
        return tuple(self._queue[at] for at in range(min(count, len(self._queue))))

    # --- one step ----------------------------------------------------------------------------

    def _resume(self, answer: _Answer | None) -> BatchOrders:
        step = self._schedule
        assert step is not None
        try:
            return next(step) if answer is None else step.send(answer)
        except StopIteration as stop:
            self._schedule = None
            orders: BatchOrders = stop.value
            return orders

    def _step(self, free: int) -> Generator[BatchOrders, _Answer, BatchOrders]:
        part, held_back = _Part(), []
        budget = self._share_out()
        change = self._page_changes()
        at = 0
        if np.cumsum(change).max(initial=0) <= free:
            self._start(part)
            part.grow(self.ids[self.counts > 0], self.counts[self.counts > 0])
            self.pages = self.pages + change
            free -= int(change.sum())
            at = len(self.ids)
            while budget > 0 and self._queue and at < self.settings.max_running:
                if at and (needed := self._pages_of_next()) > free:
                    answer = yield part.orders(pages_needed=needed)
                    part, free = _Part(), answer.free_pages
                    if needed > free:
                        if answer.is_coming:
                            held_back.append(self._queue[0])
                        break
                self._admit(budget)
                change_of_one = int(self._page_changes(slice(at, None))[0])
                if change_of_one > free:
                    break
                free -= change_of_one
                budget -= self._let_in(at, change_of_one, part)
                at += 1
        while at < len(self.ids):
            change_of_one = int(self._page_changes(slice(at, at + 1))[0])
            if change_of_one <= free:
                free -= change_of_one
                self._let_in(at, change_of_one, part)
                at += 1
                continue
            answer = yield part.orders(pages_needed=change_of_one, is_alone=len(self.ids) == 1)
            part, free = _Part(), answer.free_pages
            if change_of_one <= free:  # others have given pages back meanwhile
                continue
            sequence = int(self.ids[at])
            victim = self._youngest()
            if self.pages[at] == 0 and (self.loading[at] or not answer.is_coming) and at:
                self._put_back(at)  # it has only just come: nothing is lost
            elif self.pages[at] == 0 and self.loading[at]:  # alone: begin with less
                self.loading[at] = 0
                self.counts[at] = min(int(self.known[at]), self.settings.prefill_tokens)
            elif answer.is_coming or victim is None:
                self.counts[at] = 0
                held_back.append(sequence)
                at += 1
            elif len(self.ids) == 1 and self.paging.windows and self.counts[at] > 1:
                self.counts[at] //= 2  # a window leaves pages behind between two steps
            elif len(self.ids) == 1:
                part.refused.append(sequence)
                self._keep(np.zeros(1, np.bool_))
            else:
                if int(self.ids[victim]) in self._started:
                    part.preempted.append(int(self.ids[victim]))
                free += int(self.pages[victim])
                self._put_back(victim)
        works = self.counts > 0
        return part.orders(
            sequences=self.ids[works],
            counts=self.counts[works],
            speaks=(self.computed + self.counts == self.known)[works],
            held_back=tuple(held_back),
        )

    def _share_out(self) -> int:
        """Tokens of each running sequence in the step; what is left of the prefill."""
        left = np.where(self.loading > 0, 0, self.known - self.computed)
        self.counts = np.minimum(left, 1)
        budget = self.settings.prefill_tokens
        for at in np.flatnonzero(left > 1).tolist():
            share = min(int(left[at]), budget)
            self.counts[at] = share
            budget -= share
        return budget

    def _start(self, part: _Part) -> None:
        """Those whose pages have come at last."""
        if len(self._started) < len(self.ids):
            for at in np.flatnonzero((self.pages == 0) & (self.counts > 0)).tolist():
                if int(self.ids[at]) not in self._started:
                    self._started.add(int(self.ids[at]))
                    part.admitted.append(Admission(int(self.ids[at]), 0))

    def _page_changes(self, rows: slice = slice(None)) -> Ints:
        """[rows] pages that each takes on, less those that it leaves behind, to compute or load."""
        computed, counts, pages = self.computed[rows], self.counts[rows], self.pages[rows]
        changes = self.paging.held(computed + counts, computed) - pages
        starts = (self.loading[rows] > 0) & (pages == 0)
        changes = np.where(counts > 0, changes, 0)
        if starts.any():
            loading = self.loading[rows]
            changes = np.where(starts, self.paging.held(loading, np.zeros_like(loading)), changes)
        return changes

    def _pages_of_next(self) -> int:
        """Pages to have before the next one of the queue is admitted.

        Of it and of all that run: those for the tokens there are, and for one block more. A prompt
        that runs out of pages half way, or makes others run out at once, would be computed again,
        and might be for ever.
        """
        entry = self._waiting[self._queue[0]]
        goal = np.append(self.goal, entry.goal)
        ahead = np.append(self.known, entry.known) + self.paging.block_tokens
        tokens = np.minimum(ahead, goal)
        held = np.append(self.computed, 0)
        chunk = np.minimum(tokens, self.settings.prefill_tokens)
        pages = self.paging.held(tokens, np.maximum(tokens - chunk, held))
        return int(np.maximum(pages - np.append(self.pages, 0), 0).sum())

    def _admit(self, budget: int) -> None:
        """The next one of the queue stands behind the running ones, without pages."""
        sequence = self._queue.popleft()
        entry = self._waiting.pop(sequence)
        self.ids = np.append(self.ids, sequence)
        self.known = np.append(self.known, entry.known)
        self.goal = np.append(self.goal, entry.goal)
        self.loading = np.append(self.loading, entry.cached)
        self.counts = np.append(self.counts, 0 if entry.cached else min(entry.known, budget))
        self.computed = np.append(self.computed, 0)
        self.pages = np.append(self.pages, 0)

    def _let_in(self, at: int, pages: int, part: _Part) -> int:
        """A sequence gets its pages; how much of the prefill it takes."""
        sequence, loading = int(self.ids[at]), int(self.loading[at])
        is_new = self.pages[at] == 0 and sequence not in self._started
        if is_new:
            self._started.add(sequence)
            part.admitted.append(Admission(sequence, loading))
        added = loading if loading and self.pages[at] == 0 else int(self.counts[at])
        if added:
            part.grow([sequence], [added])
        self.pages[at] += pages
        return int(self.counts[at]) if self.known[at] - self.computed[at] > 1 else 0

    def _youngest(self) -> int | None:
        """Row of the last admitted sequence into whose pages nothing is being copied."""
        idle = np.flatnonzero(self.loading == 0)
        return int(idle[-1]) if len(idle) else None

    def _put_back(self, at: int) -> None:
        """To the front of the queue, with nothing."""
        sequence = int(self.ids[at])
        entry = _Waiting(int(self.known[at]), int(self.goal[at]))
        entry.cached = int(self.loading[at])
        self._waiting[sequence] = entry
        self._queue.appendleft(sequence)
        self._keep(np.arange(len(self.ids)) != at)

    def _place(self, sequence: int) -> int | None:
        found = np.flatnonzero(self.ids == sequence)
        return int(found[0]) if len(found) else None

    def _keep(self, mask: NDArray[np.bool_]) -> None:
        self._started.difference_update(self.ids[~mask].tolist())
        self.ids, self.known, self.computed = self.ids[mask], self.known[mask], self.computed[mask]
        self.goal, self.counts, self.loading = (
            self.goal[mask],
            self.counts[mask],
            self.loading[mask],
        )
        self.pages = self.pages[mask]


class _Part:
    """What has been ordered since the driver was last told."""

    def __init__(self) -> None:
        self.preempted: list[int] = []
        self.refused: list[int] = []
        self.admitted: list[Admission] = []
        self._growing: list[NDArray[np.int64]] = []
        self._growth: list[NDArray[np.int64]] = []

    def grow(self, sequences: ArrayLike, tokens: ArrayLike) -> None:
        """They get pages for so many tokens more."""
        self._growing.append(np.asarray(sequences, dtype=np.int64))
        self._growth.append(np.asarray(tokens, dtype=np.int64))

    def orders(
        self,
        *,
        pages_needed: int = 0,
        is_alone: bool = False,
        sequences: Ints = _NONE,
        counts: Ints = _NONE,
        speaks: NDArray[np.bool_] = _NOBODY,
        held_back: tuple[int, ...] = (),
    ) -> BatchOrders:
        """All of it."""
        return BatchOrders(
            preempted=tuple(self.preempted),
            refused=tuple(self.refused),
            admitted=tuple(self.admitted),
            growing=np.concatenate([_NONE, *self._growing]),
            growth=np.concatenate([_NONE, *self._growth]),
            pages_needed=pages_needed,
            is_alone=is_alone,
            sequences=sequences,
            counts=counts,
            speaks=speaks,
            held_back=held_back,
        )
